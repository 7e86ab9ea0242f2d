"""The simulator on traces: real scheduler, virtual clock. And the fit of its step times."""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from deployments.cli.main import main
from kv_cache import BlockManager
from scheduler import PreemptionMode, Scheduler, SchedulerConfig, SequenceEnd
from scheduler.arrivals import Arrival, Work
from scheduler.comparison import simulate
from scheduler.listening import RunListener
from scheduler.outputs import SchedulerOutputs
from scheduler.recording import Recorder
from scheduler.recording_reader import Pools, Recording
from scheduler.replay import Replayer
from scheduler.run_report import RunReport, percentiles
from scheduler.simulator import Simulator
from scheduler.step_fit import FitError, StepTimes, fit_step_model
from scheduler.step_model import PRESETS, StepModel, StepWork
from scheduler.traces import TracedRequest, TraceError, read_trace, works_of

TRACES = Path(__file__).parent.parent.parent / "shared" / "data" / "traces"
GPU = PRESETS["gpu-8b"]


def trace(name: str) -> Path:
    path = TRACES / name
    if not path.is_file():
        pytest.skip(f"the trace {name} is not in ../shared/data/traces")
    return path


def work(request_id: str, arrival_s: float, num_input: int, num_output: int, max_model_len: int = 1024) -> Work:
    return Work(Arrival(request_id, arrival_s, num_input, num_output, max_model_len), [num_output])


class Heard(RunListener):
    """What a run told, for assertions."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[str, float]] = []
        self.tokens: list[tuple[str, float]] = []
        self.ends: list[tuple[str, str, float]] = []
        self.most_open = 0

    def arrived(self, arrival: Arrival) -> None:
        self.arrivals.append((arrival.request_id, arrival.arrival_s))
        self.most_open = max(self.most_open, len(self.arrivals) - len(self.ends))

    def settled(self, outputs: SchedulerOutputs, now: float, tokens: list[tuple[str, int]]) -> None:
        self.tokens += [(request_id, now) for request_id, _ in tokens]

    def ended(self, ends: list[SequenceEnd], now: float) -> None:
        self.ends += [(end.request_id, end.finish_reason, now) for end in ends]


def run(works: list[Work], model: StepModel = GPU, *, concurrency: int | None = None) -> Heard:
    heard = Heard()
    scheduler = Scheduler(SchedulerConfig(64, 8, 1024), BlockManager(16, 200, 0))
    Simulator(scheduler, 16, model, [heard], concurrency=concurrency).run(works)
    return heard


# --- the clock


def test_the_clock_is_what_the_model_says_of_each_step() -> None:
    model = StepModel(1.0, 0.1, 0.01, 0.0, 0.0, 0.0, 0.5)
    heard = run([work("r", 10.0, 20, 3)], model)
    # 20 prompt tokens take 3 s; each of the two decodes 1.01 s, half a second after the step before.
    assert [now for _, now in heard.tokens] == pytest.approx([13.0, 14.51, 16.02])


def test_an_idle_engine_waits_for_the_next_arrival() -> None:
    heard = run([work("a", 1.0, 4, 1), work("b", 500.0, 4, 1)])
    assert [now for _, now in heard.tokens] == pytest.approx([1.0 + GPU.base_s, 500.0 + GPU.base_s], rel=1e-3)


def test_every_request_gets_the_tokens_that_the_trace_says() -> None:
    rng = Random(1)
    works = [work(f"r{n}", n * 0.01, rng.randint(1, 200), rng.randint(1, 50)) for n in range(100)]
    heard = run(works)
    for item in works:
        count = sum(request_id == item.arrival.request_id for request_id, _ in heard.tokens)
        assert [count] == item.num_output_tokens
    assert len(heard.ends) == 100


def test_one_at_a_time_means_that_no_two_are_open() -> None:
    heard = run([work(f"r{n}", 0.0, 30, 5) for n in range(20)], concurrency=1)
    assert heard.most_open == 1
    assert [start for _, start in heard.arrivals[1:]] >= [now for _, _, now in heard.ends[:-1]]


def test_a_cancelled_request_ends_when_its_client_leaves() -> None:
    heard = run([replace(work("r", 0.0, 10, 500), cancel_s=0.1), work("other", 0.0, 10, 20)])
    ends = {request_id: (reason, now) for request_id, reason, now in heard.ends}
    assert ends["r"][0] == "abort"
    assert 0.1 <= ends["r"][1] < 0.12
    assert ends["other"][0] == "stop"


def test_the_same_trace_gives_the_same_run() -> None:
    rng = Random(2)
    works = [work(f"r{n}", n * 0.02, rng.randint(1, 300), rng.randint(1, 60)) for n in range(80)]
    assert run(works).tokens == run(works).tokens


# --- traces


def test_the_block_keys_of_a_mooncake_prompt_are_equal_exactly_where_its_hashes_are() -> None:
    first = TracedRequest(0.0, 1500, 1, (1, 2, 3))
    second = TracedRequest(0.0, 1300, 1, (1, 2, 9))
    for block_size, num_common in ((16, 64), (48, 21), (512, 2), (1024, 1)):
        keys, others = first.block_keys(block_size), second.block_keys(block_size)
        assert len(keys) == 1500 // block_size
        assert len(set(keys)) == len(keys)
        assert sum(key == other for key, other in zip(keys, others, strict=False)) == num_common


def test_the_azure_trace_runs_at_least_a_hundred_times_faster_than_its_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = trace("azure_2023_code.csv")
    assert main(["simulate", "--trace", str(path), "--limit", "2000", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    print(f"{result['simulated_s']:.0f} s in {result['wall_s']:.2f} s: {result['speedup']:.0f}x")
    assert result["num_finished"] == 2000
    assert result["speedup"] == pytest.approx(result["simulated_s"] / result["wall_s"])
    assert result["speedup"] >= 100.0


def test_the_mooncake_trace_finds_the_blocks_that_can_be_found() -> None:
    """One token of output each: hits are about prompts."""
    requests = [replace(r, num_output_tokens=1) for r in read_trace(trace("mooncake_synthetic_trace.jsonl"))]
    num_blocks = sum(request.num_input_tokens // 512 + 2 for request in requests)
    blocks = BlockManager(512, 2 * num_blocks)
    scheduler = Scheduler(SchedulerConfig(2048, 256, 200_000, chunk_alignment=256), blocks)
    Simulator(scheduler, 512, GPU, [], concurrency=1).run(works_of(requests, 512, 200_000))
    counts = blocks.prefix_counts
    assert counts.num_queried_blocks == sum(request.num_input_tokens // 512 for request in requests)
    assert counts.num_hit_blocks / counts.num_queried_blocks == pytest.approx(0.659, rel=0.005)


@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_a_pool_of_half_the_blocks_costs_little_throughput(mode: PreemptionMode) -> None:
    """200 requests, each of which holds more for its answer than for its prompt; printed for both step models."""
    rng = random.Random(1)
    now, works = 0.0, []
    for number in range(200):
        now += rng.expovariate(10.0)
        works.append(work(f"r{number}", now, rng.randint(20, 400), rng.randint(50, 600)))
    losses = {}
    for name, model in PRESETS.items():
        config = SchedulerConfig(512, 256, 1024, preemption_mode=mode, chunk_alignment=16)
        ample = simulate(works, config, Pools(16, 20_000, 1, 0.01), model, None).as_dict()
        num_blocks = ample["max_num_device_blocks_used"] // 2 + 1
        tight = simulate(works, config, Pools(16, num_blocks, num_blocks, 0.01), model, None).as_dict()
        assert tight["num_finished"] == 200
        assert sum(tight["preemptions"].values()) > 0
        losses[name] = 1.0 - tight["output_tokens_per_s"] / ample["output_tokens_per_s"]
        print(
            f"{mode.value}, {name}: {losses[name]:.1%} less throughput, preemptions {tight['preemptions']}, "
            f"{tight['max_num_preemptions_of_a_request']} at most of one request"
        )
    assert losses["cpu-demo"] <= 0.15


# --- fitting


def random_step(rng: Random) -> StepWork:
    prefill, decodes = rng.choice([0, 64, 128, 256]), rng.randint(0, 40)
    context = prefill * 2 + decodes * rng.randint(10, 800)
    return (1.0, prefill, decodes, context, prefill * rng.randint(1, 900), rng.choice([0, 0, 0, 32, 160]))


def test_a_known_model_is_found_again_through_noise_and_outliers() -> None:
    rng = Random(3)
    known = StepModel(5e-3, 2e-4, 4e-4, 2e-6, 1e-7, 3e-5)
    works = [random_step(rng) for _ in range(1500)]
    times = [known.step_s(item) * rng.lognormvariate(0.0, 0.05) for item in works]
    for place in range(0, len(times), 50):
        times[place] *= 20.0
    fitted = fit_step_model(works, times)
    for name, value in known.as_dict().items():
        assert fitted.as_dict()[name] == pytest.approx(value, rel=0.1), name


def test_no_coefficient_is_ever_negative() -> None:
    rng = Random(4)
    works = [random_step(rng) for _ in range(200)]
    times = [0.01 + 1e-4 * item[1] - 1e-4 * item[2] + rng.random() * 1e-3 for item in works]
    fitted = fit_step_model(works, times)
    assert min(fitted.as_dict().values()) == 0.0
    assert fitted.prefill_token_s == pytest.approx(1e-4, rel=0.1)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(FitError, match="19 steps are too few"):
        fit_step_model([(1.0, 1, 1, 1, 1, 1)] * 19, [1.0] * 19)


@dataclass(frozen=True)
class NoisyEngine(StepModel):
    """Steps as the model says, but for a quarter of noise and a rare hiccup of twenty times the time."""

    rng: Random = Random(0)  # noqa: RUF009

    def step_s(self, work: StepWork) -> float:
        hiccup = 20.0 if self.rng.random() < 0.002 else 1.0
        return StepModel.step_s(self, work) * self.rng.lognormvariate(0.0, 0.25) * hiccup


def test_the_fitted_model_predicts_a_noisy_run_within_nine_percent(tmp_path: Path) -> None:
    """500 requests that keep the engine busy but do not drown it, with cancels."""
    rng = Random(6)
    now, works = 0.0, []
    for number in range(500):
        now += rng.expovariate(12.0)
        item = work(f"r{number}", now, rng.randint(10, 300), rng.randint(5, 60))
        works.append(replace(item, cancel_s=now + rng.random()) if rng.random() < 0.1 else item)
    engine = NoisyEngine(4e-3, 1e-4, 4e-4, 1e-6, 1e-8, 1e-5, 2e-4, Random(7))
    recorder = Recorder(str(tmp_path / "run"))
    blocks = BlockManager(16, 300, 100)
    config = SchedulerConfig(256, 32, 1024, preemption_mode=PreemptionMode.AUTO)
    Simulator(Scheduler(config, blocks, recorder), 16, engine, []).run(works)
    recorder.close()

    recording = Recording(tmp_path / "run")
    times = StepTimes(16)
    replayer = Replayer(recording, [times])
    measured = RunReport(replayer.blocks)
    replayer.listeners.append(measured)
    replayed = replayer.run()
    assert replayed.difference is None
    simulated = simulate(replayed.works, recording.config, recording.pools, times.fit(), replayed.rates)
    for name in ("ttft_s", "inter_token_s", "end_to_end_s"):
        was, said = measured.as_dict()[name]["p50"], simulated.as_dict()[name]["p50"]
        print(f"{name}: measured {was:.4f} s, predicted {said:.4f} s ({said / was - 1:+.1%})")
        assert said == pytest.approx(was, rel=0.09), name


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([float(n) for n in range(100, 0, -1)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0}
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"arrival_s,input_tokens,output_tokens\ninf,5,5\n", "a time or a length that cannot be"),
        (b"arrival_s,input_tokens,output_tokens\n1e300,5,5\n", "a time or a length that cannot be"),
        (b"arrival_s,input_tokens,output_tokens\n0,5\n", "too few columns"),
        (b"\xff\xfe\x00\x80", "is not text"),
    ],
)
def test_a_trace_that_cannot_be_is_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_a_trace_from_a_spreadsheet_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbfarrival_s,input_tokens,output_tokens\n0,5,7\n")
    assert [request.num_output_tokens for request in read_trace(path)] == [7]
