"""Compiles our Triton kernels for GPUs that need not be there: what their code would take of one.

Run as a program, since Triton either interprets or compiles in a process. Prints a JSON line for each kernel.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker.attention import triton_kernel
from worker.attention.triton_paged import MAX_SPLITS
from worker.attention.triton_tiles import MIN_ROWS, choose_tiles, power_of_two

GROUP = 4
BLOCK_SIZE = 16
POINTERS = {
    **dict.fromkeys(("part_sums", "part_logs"), "*fp32"),
    **dict.fromkeys(("block_tables", "query_start_locs", "context_lens", "slot_mapping"), "*i64"),
}


def compile_for(
    capability: tuple[int, int], kernel: triton.JITFunction, dtype: str, constants: dict[str, object], **options: int
) -> triton.compiler.CompiledKernel:
    names, signature, attributes = kernel.arg_names, {}, {}
    for index, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("output", "query", "keys", "values", "key", "value"):
            signature[name] = f"*{dtype}"
        else:
            signature[name] = POINTERS.get(name, "fp32" if name == "scale" else "i32")
        if signature[name].startswith("*") or name.endswith("stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes
    )
    return triton.compile(source, target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32), options=options)


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        capability, head_size, dtype = tuple(asked["capability"]), asked["head_size"], asked["dtype"]
        num_bytes = 4 if dtype == "fp32" else 2
        padded = max(power_of_two(head_size), MIN_ROWS)
        sizes = {"HEAD_SIZE": head_size, "PADDED_HEAD": padded}
        if asked["kernel"] == "combine":
            compiled = compile_for(capability, triton_kernel.combine, dtype, {**sizes, "MAX_SPLITS": MAX_SPLITS})
        elif asked["kernel"] == "store":
            constants = {"NUM_HEADS": 8, "HEAD_SIZE": head_size, "BLOCK_SIZE": BLOCK_SIZE, "WIDTH": 8 * padded}
            compiled = compile_for(capability, triton_kernel.store, dtype, constants)
        else:
            is_single = asked["kernel"] == "single"
            tiles = choose_tiles(capability, head_size, num_bytes, GROUP)
            tile = tiles.single if is_single else tiles.chunk
            constants = {
                **sizes,
                "BLOCK_SIZE": BLOCK_SIZE,
                "GROUP": GROUP,
                "TILE_ROWS": tile.rows,
                "TILE_KEYS": tile.keys,
                "WINDOW": asked["window"],
                "SOFTCAP": asked["softcap"],
                "UPCAST": False,
                "IS_SINGLE": is_single,
                "IS_SPLIT": is_single,
            }
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            compiled = compile_for(capability, triton_kernel.attend, dtype, constants, **options)
        code = compiled.asm["ptx"]
        multiplications = {name: code.count(name) for name in ("wgmma.mma_async", "mma.sync")}
        print(json.dumps({**asked, "shared_memory_bytes": compiled.metadata.shared, **multiplications}), flush=True)


if __name__ == "__main__":
    main()
