"""What the engine reaches in process: tokens a second at several batch sizes, and how far a decode step is from memory.

Prints a line a row. `tokens_per_s` counts output tokens of the whole run for `decode_*` (128 in, 128 out), prompt
tokens until the first output token for `prefill_2048`, all tokens for `mixed_64x512` (512 in, 64 out). For decode rows
`step_ms` is the median decode step at a context of about 256, and `bound_ms` the time that reading its weights and
its cached keys and values takes at the bandwidth measured just before: `ratio` says how many times that a step takes.
With `--peers` come the rows of other engines, each asked in turn with ours: benchmarks/peers.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks.options import NamesOnce, Parser, count, run_program
from benchmarks.peers.__main__ import run as run_peers
from benchmarks.peers.drivers import OURS, PeerError, Setting, peers_at_hand
from kv_cache.huge_pages import advise_huge_pages
from kv_cache.tensor_pool import TensorPool
from worker.config import ATTENTION_BACKENDS, DTYPES, EngineConfig
from worker.engine import Engine
from worker.native.build import ensure_kernels
from worker.native.kernels import Kernels
from worker.types import EngineRequest, SamplingParams
from worker.weights import resolve_model, weight_files

NUM_PROMPT_TOKENS = NUM_OUTPUT_TOKENS = 128
STEP_CONTEXT = 256
NUM_MEASURED_STEPS = 32
BANDWIDTH_BUFFER_BYTES = 2**29
NUM_BANDWIDTH_READS = 5
BATCH_SIZES = (1, 8, 32)
LONG_PROMPT_TOKENS = 2048
NUM_MIXED, MIXED_PROMPT_TOKENS, MIXED_OUTPUT_TOKENS = 64, 512, 64
ENVIRONMENTS = Path("../peers")
ROWS = (*(f"decode_b{size}" for size in BATCH_SIZES), f"prefill_{LONG_PROMPT_TOKENS}", "mixed_64x512")


@dataclass(frozen=True, slots=True)
class Row:
    """One line. Fields that a row does not measure are None."""

    row: str
    tokens_per_s: float
    step_ms: float | None = None
    bound_ms: float | None = None
    ratio: float | None = None
    read_gb_per_s: float | None = None


def weight_bytes_per_step(folder: Path, dtype: torch.dtype) -> int:
    """Bytes of the weights that a step multiplies: all but an embedding that is not the output head as well."""
    sizes: dict[str, int] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is no mapping
                sizes[name] = torch.Size(tensors.get_slice(name).get_shape()).numel()
    if "lm_head.weight" in sizes:
        sizes.pop("model.embed_tokens.weight", None)
    return sum(sizes.values()) * dtype.itemsize


class Bench:
    def __init__(self, config: EngineConfig) -> None:
        self._engine = Engine(config)
        pool = self._engine._tensor_pool
        self._token_bytes = TensorPool.block_bytes(pool.num_layers, 1, pool.num_kv_heads, pool.head_size, pool.dtype)
        self._weight_bytes = weight_bytes_per_step(self._engine.tokenizer_folder, pool.dtype)
        self._kernels = Kernels(ensure_kernels())
        self._buffer = torch.empty(BANDWIDTH_BUFFER_BYTES // 8, dtype=torch.int64)
        # As weights and cache lie in the engine, or the bound would be too slow.
        advise_huge_pages(self._buffer.data_ptr(), self._buffer.nbytes)
        self._buffer.fill_(1)
        self._draw = random.Random(0)

    def run(self, row: str) -> Row:
        kind, _, size = row.partition("_")
        if kind == "decode":
            return self._decode(row, int(size.removeprefix("b")))
        if kind == "prefill":
            elapsed_s, _ = self._generate(1, LONG_PROMPT_TOKENS, 1)
            return Row(row, LONG_PROMPT_TOKENS / elapsed_s)
        elapsed_s, _ = self._generate(NUM_MIXED, MIXED_PROMPT_TOKENS, MIXED_OUTPUT_TOKENS)
        return Row(row, NUM_MIXED * (MIXED_PROMPT_TOKENS + MIXED_OUTPUT_TOKENS) / elapsed_s)

    def read_bytes_per_s(self) -> float:
        """The best of several reads of a buffer that no cache holds."""
        best_s = float("inf")
        for _ in range(NUM_BANDWIDTH_READS):
            began_s = time.perf_counter()
            self._kernels.read_words(self._buffer, torch.get_num_threads())
            best_s = min(best_s, time.perf_counter() - began_s)
        return BANDWIDTH_BUFFER_BYTES / best_s

    def _decode(self, row: str, batch_size: int) -> Row:
        elapsed_s, _ = self._generate(batch_size, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS)
        bytes_per_s = self.read_bytes_per_s()
        # While the last prompts are computed, the first answers are already under way: they need that many tokens more.
        num_output_tokens = NUM_MEASURED_STEPS + 2 * batch_size
        _, steps_s = self._generate(batch_size, STEP_CONTEXT - num_output_tokens // 2, num_output_tokens)
        step_s = statistics.median(steps_s)
        bound_s = (self._weight_bytes + batch_size * STEP_CONTEXT * self._token_bytes) / bytes_per_s
        return Row(
            row,
            batch_size * NUM_OUTPUT_TOKENS / elapsed_s,
            step_s * 1e3,
            bound_s * 1e3,
            step_s / bound_s,
            bytes_per_s / 1e9,
        )

    def _generate(self, num_requests: int, num_prompt_tokens: int, num_output_tokens: int) -> tuple[float, list[float]]:
        """(seconds until all have all their tokens, seconds of each step in which all of them decoded)."""
        engine = self._engine
        params = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
        for number in range(num_requests):
            prompt = [self._draw.randrange(engine.vocab_size) for _ in range(num_prompt_tokens)]
            engine.add_request(EngineRequest(str(number), prompt, params), time.monotonic())
        steps_s: list[float] = []
        began_s = now_s = time.perf_counter()
        while engine.has_unfinished():
            before_s = now_s
            engine.step(time.monotonic())
            now_s = time.perf_counter()
            record = engine.scheduler.records.newest
            if record.num_decodes == num_requests and not record.prefill_chunks:
                steps_s.append(now_s - before_s)
        return now_s - began_s, steps_s


def median_row(rows: Sequence[Row]) -> Row:
    """The run in the middle by tokens per second, whole: its parts were measured together."""
    return sorted(rows, key=lambda row: row.tokens_per_s)[len(rows) // 2]


def as_line(row: Row, *, as_json: bool) -> str:
    values = {
        name: round(value, 2) if isinstance(value, float) else value
        for name, value in asdict(row).items()
        if value is not None
    }
    if as_json:
        return json.dumps(values)
    return "  ".join(f"{value:<14}" if name == "row" else f"{name} {value:<9}" for name, value in values.items())


def print_peers(setting: Setting, peers: Sequence[str], rows: Sequence[str], num_rounds: int, *, as_json: bool) -> None:
    """A line for each peer and row: its rate, and ours over it in the same rounds."""
    for item in run_peers(setting, [OURS, *peers], rows, num_rounds):
        if item["stallfree_ratio"] is None or item["engine"].startswith(OURS):
            continue
        if as_json:
            print(json.dumps(item), flush=True)
        else:
            print(
                f"{item['row']:<14}  tokens_per_s {item['tokens_per_s']:<9.2f}  {item['engine']}, "
                f"ours is {item['stallfree_ratio']:.2f} times as fast",
                flush=True,
            )


def main() -> None:
    parser = Parser("benchmarks.engine", __doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--num-threads", type=count)
    parser.add_argument("--attention-backend", default="auto", choices=ATTENTION_BACKENDS)
    parser.add_argument("--rows", nargs="+", action=NamesOnce, choices=ROWS, default=ROWS)
    parser.add_argument("--repeats", type=count, default=3, help="runs of each row; the one in the middle is printed")
    parser.add_argument("--peers", action="store_true", help="other engines' rows as well, in turn with ours")
    parser.add_argument("--environments", type=Path,
                        help=f"the folder that benchmarks/peers/setup.sh filled (default: {ENVIRONMENTS})")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    if args.environments is not None and not args.peers:
        parser.error("--environments: says nothing without --peers")
    with parser.refusing():
        measure(parser, args)


def measure(parser: Parser, args: argparse.Namespace) -> None:
    setting = None
    if args.peers:
        try:
            num_threads = args.num_threads or len(os.sched_getaffinity(0))
            environments = args.environments or ENVIRONMENTS
            setting = Setting(resolve_model(args.model), environments.resolve(), None, num_threads)
            peers = peers_at_hand(setting)
        except PeerError as error:
            parser.error(str(error))
    config = EngineConfig(model=args.model, dtype=args.dtype, device="cpu", attention_backend=args.attention_backend)
    bench = Bench(replace(config, num_threads=args.num_threads))
    runs: dict[str, list[Row]] = {row: [] for row in args.rows}
    for _ in range(args.repeats):
        # All rows in turn, so that a busy minute of the machine falls on each of them.
        for row in args.rows:
            runs[row].append(bench.run(row))
    for rows in runs.values():
        print(as_line(median_row(rows), as_json=args.json), flush=True)
    if setting is not None:
        del bench
        print_peers(setting, peers, args.rows, args.repeats, as_json=args.json)


if __name__ == "__main__":
    run_program(main)
