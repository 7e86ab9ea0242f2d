import pytest
import torch

from kv_cache.tensor_pool import TensorPool
from worker.rates import UNMEASURED_BLOCKS_PER_S, SwapRates, measure_swap_rates


class Ticks:
    """A clock that a move of blocks pushes on: by a second to the host, by four back, and by what comes in between."""

    def __init__(self, stalls_s: list[float] | None = None) -> None:
        self.now_s = 0.0
        self.stalls_s = stalls_s or []

    def __call__(self) -> float:
        return self.now_s


class TimedPool(TensorPool):
    def __init__(self, num_host_blocks: int, clock: Ticks) -> None:
        super().__init__(2, 21, num_host_blocks, 4, 1, 8, torch.float32, "cpu")
        self._clock = clock

    def swap(self, *pairs: list[tuple[int, int]]) -> None:
        super().swap(*pairs)
        self._clock.now_s += (1.0 if pairs[0] else 0.0) + (4.0 if pairs[1] else 0.0)
        self._clock.now_s += self._clock.stalls_s.pop() if self._clock.stalls_s else 0.0


def test_each_way_is_measured_by_itself_and_a_swap_takes_both() -> None:
    clock = Ticks()
    rates = measure_swap_rates(TimedPool(10, clock), clock)
    assert (rates.out_blocks_per_s, rates.in_blocks_per_s) == (10.0, 2.5)
    # One block there and back: 0.1 s + 0.4 s.
    assert 2 / rates.blocks_per_s == pytest.approx(0.5)
    assert rates.note(10**9) == "swapped blocks move to the host at 10.0 GB/s and back at 2.5 GB/s"


@pytest.mark.parametrize("place", range(8))
def test_other_work_of_the_machine_in_one_measurement_changes_nothing(place: int) -> None:
    clock = Ticks([100.0 * (other == place) for other in range(8)])
    rates = measure_swap_rates(TimedPool(10, clock), clock)
    assert (rates.out_blocks_per_s, rates.in_blocks_per_s) == (10.0, 2.5)


def test_measuring_leaves_all_blocks_as_they_were() -> None:
    clock = Ticks()
    pool = TimedPool(30, clock)
    for layer in range(2):
        for cache in pool.key_value(layer):
            cache[1:] = torch.arange(1, 21)[:, None, None, None]
    rates = measure_swap_rates(pool, clock)
    assert rates.out_blocks_per_s == 16.0
    for layer in range(2):
        for cache in pool.key_value(layer):
            assert cache[:, 0, 0, 0].tolist() == list(range(21))


def test_without_blocks_on_the_host_there_is_nothing_to_measure() -> None:
    clock = Ticks()
    rates = measure_swap_rates(TimedPool(0, clock), clock)
    assert rates == SwapRates(0.0, 0.0)
    assert rates.blocks_per_s == UNMEASURED_BLOCKS_PER_S
