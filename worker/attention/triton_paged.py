"""Paged attention by our own Triton kernels: any block size that is a multiple of 16, head sizes up to 256, windows and
logit softcapping, float32 and half precision.

Knows blocks and rows, not requests. The host gives sizes alone: which row a program works on, it finds on the device.
"""

import torch

from kv_cache.tensor_pool import TensorPool
from worker.attention.backend import AttentionBatch, AttentionFeatures, refuse_unimplemented
from worker.attention.triton_tiles import MIN_ROWS, Tile, Tiles, choose_tiles, power_of_two

#: Programs at which a GPU is taken for full, for each of its processors; in the interpreter, for all of it.
PROGRAMS_PER_PROCESSOR = 2
INTERPRETER_PROGRAMS = 16
#: No part of a split row has fewer keys: joining parts costs as much as these.
MIN_SPLIT_KEYS = 128
#: Parts of one row at most: they are joined in one go.
MAX_SPLITS = 32


class TritonBackend:
    """Rows of one query and rows of several run in a pass each, since tiles of many queries would be mostly empty for
    the former. Few rows of one query have their keys split among programs (flash-decoding); a second kernel joins them.
    """

    name = "triton"
    features = AttentionFeatures(
        sliding_window=True,
        softcap=True,
        sinks=False,
        block_size_multiple=16,
        dtypes=(torch.float32, torch.float16, torch.bfloat16),
        device_types=("cuda", "cpu"),
        max_head_size=256,
        min_capability=(8, 0),
        cuda_graphs=True,
    )

    def __init__(self, tensor_pool: TensorPool) -> None:
        from worker.attention import triton_kernel

        self._kernels = triton_kernel
        self._pool = tensor_pool
        self._is_interpreted = _is_interpreted()
        device = tensor_pool.device
        self._capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        self._num_programs = INTERPRETER_PROGRAMS
        if device.type == "cuda":
            self._num_programs = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        #: What has run once is compiled. So the first step of a kind runs every variant, and no later one stutters.
        self._runs_all_at_first = device.type == "cuda"
        self._have_run: set[tuple[int, int, float]] = set()
        self._tiles: dict[int, Tiles] = {}
        self._batch: AttentionBatch | None = None
        self._has_chunks = self._has_singles = False
        self._parts: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def missing(cls, device: str) -> str | None:
        try:
            import triton  # noqa: F401
        except ImportError as error:
            return f"the package triton is not installed ({error})"
        if device == "cpu" and not _is_interpreted():
            return "on a CPU it runs in Triton's interpreter alone (TRITON_INTERPRET=1), which is for checks"
        return None

    def begin(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._has_chunks, self._has_singles = max(batch.query_lens) > 1, min(batch.query_lens) == 1
        # Memory of a step that was captured belongs to its graph.
        self._parts = None

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        refuse_unimplemented(self, softcap, sinks)
        batch = self._batch
        assert batch is not None, "begin() comes before forward()"
        keys, values = self._pool.key_value(layer)
        store_in_slots(keys, values, key, value, batch.slot_mapping)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        rows = _dense_heads(query.to(self._pool.dtype))
        group = query.shape[1] // keys.shape[2]
        variant = (group, sliding_window or 0, softcap or 0.0)
        runs_all = self._runs_all_at_first and variant not in self._have_run
        self._have_run.add(variant)
        tiles = self._tiles_for(group)
        if runs_all or self._has_chunks:
            self._attend(tiles.chunk, output, rows, keys, values, scale, variant)
        if runs_all or self._has_singles:
            num_rows, num_keys = len(batch.query_lens), batch.block_tables.shape[1] * self._pool.block_size
            num_splits = split_of(num_rows * keys.shape[2], num_keys, self._num_programs)
            for splits in (1, max(num_splits, 2)) if runs_all else (num_splits,):
                self._attend(tiles.single, output, rows, keys, values, scale, variant, num_splits=splits)
        return output

    def _attend(
        self,
        tile: Tile,
        output: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        variant: tuple[int, int, float],
        *,
        num_splits: int = 0,
    ) -> None:
        """One pass: over rows of several queries, or, with `num_splits` of 1 or more, over rows of one."""
        batch = self._batch
        assert batch is not None
        group, window, softcap = variant
        num_tokens, num_heads, head_size = query.shape
        num_rows, padded_head = len(batch.query_lens), max(power_of_two(head_size), MIN_ROWS)
        is_single, is_split = num_splits > 0, num_splits > 1
        num_tiles = num_rows if is_single else num_tokens // (tile.rows // group) + num_rows
        part_sums, part_logs = output, output  # not touched unless split
        if is_split:
            part_sums, part_logs = self._parts_of(num_rows, num_heads, num_splits, padded_head)
        self._kernels.attend[(num_tiles, num_heads // group, max(num_splits, 1))](
            output,
            part_sums,
            part_logs,
            query,
            keys,
            values,
            batch.block_tables,
            batch.query_start_locs,
            batch.context_lens,
            scale,
            num_rows,
            batch.block_tables.shape[1],
            num_splits,
            query.stride(0),
            query.stride(1),
            output.stride(0),
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            HEAD_SIZE=head_size,
            PADDED_HEAD=padded_head,
            BLOCK_SIZE=self._pool.block_size,
            GROUP=group,
            TILE_ROWS=tile.rows,
            TILE_KEYS=tile.keys,
            WINDOW=window,
            SOFTCAP=softcap,
            IS_SINGLE=is_single,
            IS_SPLIT=is_split,
            # The interpreter multiplies bfloat16 wrongly.
            UPCAST=self._is_interpreted and query.dtype == torch.bfloat16,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if is_split:
            self._kernels.combine[(num_rows, num_heads)](
                output,
                part_sums,
                part_logs,
                batch.query_start_locs,
                num_splits,
                output.stride(0),
                HEAD_SIZE=head_size,
                PADDED_HEAD=padded_head,
                MAX_SPLITS=MAX_SPLITS,
            )

    def _tiles_for(self, group: int) -> Tiles:
        if group not in self._tiles:
            pool = self._pool
            self._tiles[group] = choose_tiles(self._capability, pool.head_size, pool.dtype.itemsize, group)
        return self._tiles[group]

    def _parts_of(self, num_rows: int, num_heads: int, num_splits: int, padded_head: int) -> tuple[torch.Tensor, ...]:
        """Scratch of a step, which its layers use one after the other."""
        shape = (num_rows, num_heads, num_splits, padded_head)
        if self._parts is None or self._parts[0].shape != shape:
            sums = torch.empty(shape, dtype=torch.float32, device=self._pool.device)
            self._parts = sums, torch.empty(shape[:3], dtype=torch.float32, device=self._pool.device)
        return self._parts


def split_of(num_programs: int, num_keys: int, wanted_programs: int) -> int:
    """Into how many parts each of `num_programs` is cut to make `wanted_programs` of them; 1: none is. Follows from
    sizes that a captured step has too, so that it runs as it would uncaptured."""
    return max(1, min(wanted_programs // num_programs, num_keys // MIN_SPLIT_KEYS, MAX_SPLITS))


def store_in_slots(
    keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """As `worker.attention.slots.store_in_slots`, in one launch instead of eight."""
    from worker.attention import triton_kernel

    key, value = _dense_heads(key), _dense_heads(value)
    num_tokens, num_heads, head_size = key.shape
    triton_kernel.store[(num_tokens,)](
        keys,
        values,
        key,
        value,
        slot_mapping,
        *keys.stride()[:3],
        *key.stride()[:2],
        *value.stride()[:2],
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=keys.shape[1],
        WIDTH=power_of_two(num_heads * head_size),
    )


def _dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    # The kernels take any stride but that within a head.
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _is_interpreted() -> bool:
    import triton

    from worker.attention import triton_kernel

    return not isinstance(triton_kernel.attend, triton.JITFunction)
