"""Grammar libraries side by side: time to compile, time of a mask, what they cover, what hostile inputs do to them.

    python -m benchmarks.grammar_libraries llguidance
    python -m benchmarks.grammar_libraries xgrammar      # pip install --no-deps xgrammar apache-tvm-ffi

Prints one JSON line a case, then sums. Each hostile input has a process of its own, which is ended after a time; of
those that compile, masks of a few tokens are timed too, since a lazy library does its work there.
"""

import importlib.util
import json
import multiprocessing
import random
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.options import Parser, run_program
from tests.structured.schemas import HOSTILE, SCHEMAS
from worker.demo_model import ensure_demo_model

VOCAB_SIZE = 49_152
EOS = 2
HOSTILE_LIMIT_S = 20.0
NUM_WALKS = 3
MAX_WALK_TOKENS = 100
#: answers that must be taken and answers that must not, for what libraries tend to pass over
COVERAGE: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("integer bounds", {"type": "integer", "minimum": 3, "maximum": 500}, ["3", "500"], ["2", "501", "3.5"]),
    ("number bounds", {"type": "number", "minimum": 0.5, "maximum": 2.25}, ["0.5", "2.25"], ["0.4", "2.26", "7"]),
    ("multipleOf", {"type": "integer", "multipleOf": 15}, ["30"], ["31"]),
    ("string length", {"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"'], ['"a"', '"abcd"']),
    ("pattern", {"type": "string", "pattern": "^[a-c]{2}$"}, ['"ab"'], ['"ad"', '"a"']),
    ("format date", {"type": "string", "format": "date"}, ['"2026-02-03"'], ['"2026-23-03"']),
    ("const object", {"const": {"a": [1, None]}}, ['{"a":[1,null]}', '{"a": [1, null]}'], ['{"a":[1]}']),
    ("array counts", {"type": "array", "minItems": 1, "maxItems": 2}, ["[1]"], ["[]", "[1,2,3]"]),
    (
        "tuple",
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 1},
        ["[1]"],
        ["[]", "[1,2]"],
    ),
    ("maxProperties", {"type": "object", "maxProperties": 1}, ['{"a":1}'], ['{"a":1,"b":2}']),
    ("patternProperties",
     {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
     ['{"x1":null}'], ['{"y":null}', '{"x":1}']),
    ("allOf", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ["4"], ["2", "6"]),
    ("any whitespace", {"type": "object"}, ['{ "a" :\n 1 }'], []),
    ("order of keys", {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
     ['{"a":null,"b":null}'], []),
]  # fmt: skip


class LlGuidance:
    def __init__(self, tokenizer: Any) -> None:
        from llguidance import LLMatcher, LLTokenizer

        self._matcher = LLMatcher
        self._tokenizer = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS])

    def compile(self, kind: str, text: str) -> Any:
        from llguidance import grammar_from

        if kind == "ebnf":
            kind = "lark"
        matcher = self._matcher(self._tokenizer, grammar_from(kind, text), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def start(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def fill(self, matcher: Any, mask: torch.Tensor) -> None:
        matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * 4)
        if matcher.is_error():
            raise ValueError(matcher.get_error())

    def take(self, matcher: Any, token_id: int) -> bool:
        return matcher.consume_token(token_id) and not matcher.is_stopped()

    def matches(self, compiled: Any, answer: list[int]) -> bool:
        matcher = self.start(compiled)
        return matcher.consume_tokens(answer) and matcher.is_accepting()


class XGrammar:
    def __init__(self, tokenizer: Any) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=VOCAB_SIZE, stop_token_ids=[EOS])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, kind: str, text: str) -> Any:
        if kind == "json_schema":
            return self._compiler.compile_json_schema(text)
        if kind == "regex":
            return self._compiler.compile_regex(text)
        if kind == "ebnf":
            return self._compiler.compile_lark(text)
        choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
        return self._compiler.compile_grammar(f"root ::= {choices}")

    def start(self, compiled: Any) -> Any:
        return self._xgrammar.GrammarMatcher(compiled)

    def fill(self, matcher: Any, mask: torch.Tensor) -> None:
        matcher.fill_next_token_bitmask(mask)

    def take(self, matcher: Any, token_id: int) -> bool:
        return matcher.accept_token(token_id) and not matcher.is_terminated()

    def matches(self, compiled: Any, answer: list[int]) -> bool:
        matcher = self.start(compiled)
        return all(matcher.accept_token(token_id) for token_id in answer) and matcher.accept_token(EOS)


LIBRARIES: dict[str, Callable[[Any], LlGuidance | XGrammar]] = {"llguidance": LlGuidance, "xgrammar": XGrammar}


def main() -> None:
    parser = Parser("benchmarks.grammar_libraries", __doc__)
    parser.add_argument("name", choices=tuple(LIBRARIES))
    name = parser.parse_args().name
    if importlib.util.find_spec(name) is None:
        parser.error(f"{name} is not installed")
    tokenizer = AutoTokenizer.from_pretrained(str(ensure_demo_model()))
    began_s = time.perf_counter()
    library = LIBRARIES[name](tokenizer)
    tokenizer_ms = _ms_since(began_s)
    print(json.dumps({"library": name, "tokenizer_ms": round(tokenizer_ms, 1)}))
    _time_schemas(library, tokenizer)
    _count_coverage(library, tokenizer)
    for case in HOSTILE:
        print(json.dumps(_in_own_process(library, case)), flush=True)


def _time_schemas(library: Any, tokenizer: Any) -> None:
    compile_ms, mask_us = [], []
    for case, (schema, _) in SCHEMAS.items():
        began_s = time.perf_counter()
        try:
            compiled = library.compile("json_schema", json.dumps(schema))
        except Exception as error:
            print(json.dumps({"schema": case, "error": str(error)[:100]}))
            continue
        compile_ms.append(_ms_since(began_s))
        own_us = [us for seed in range(NUM_WALKS) for us in _walk(library, compiled, seed)]
        mask_us += own_us
        row = {"schema": case, "compile_ms": round(compile_ms[-1], 2), "mask_us": round(statistics.median(own_us), 1)}
        print(json.dumps(row | {"mask_us_max": round(max(own_us), 1)}))
    quantiles = statistics.quantiles(mask_us, n=100)
    print(
        json.dumps(
            {
                "schemas": len(compile_ms),
                "compile_ms_median": round(statistics.median(compile_ms), 2),
                "compile_ms_max": round(max(compile_ms), 2),
                "mask_us_median": round(quantiles[49], 1),
                "mask_us_p99": round(quantiles[98], 1),
                "mask_us_max": round(max(mask_us), 1),
            }
        )
    )


def _walk(library: Any, compiled: Any, seed: int) -> list[float]:
    """Microseconds of each mask on a random way through the grammar."""
    rng = random.Random(seed)
    matcher = library.start(compiled)
    mask = torch.full((1, -(-VOCAB_SIZE // 32)), -1, dtype=torch.int32)
    times_us = []
    for _ in range(MAX_WALK_TOKENS):
        began_s = time.perf_counter()
        library.fill(matcher, mask)
        times_us.append(_ms_since(began_s) * 1000)
        allowed = np.nonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))[0]
        if not library.take(matcher, int(rng.choice(allowed))):
            break
    return times_us


def _count_coverage(library: Any, tokenizer: Any) -> None:
    for case, schema, good, bad in COVERAGE:
        row: dict[str, Any] = {"keyword": case}
        try:
            compiled = library.compile("json_schema", json.dumps(schema))
        except Exception as error:
            print(json.dumps(row | {"error": str(error)[:100]}))
            continue
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        wrong = [text for text in good if not library.matches(compiled, encode(text))]
        wrong += [text for text in bad if library.matches(compiled, encode(text))]
        print(json.dumps(row | ({"wrong": wrong} if wrong else {"right": True})))


def _try_hostile(library: Any, case: str) -> dict[str, Any]:
    before_mb = _peak_mb()
    began_s = time.perf_counter()
    row: dict[str, Any] = {"hostile": case}
    try:
        compiled = library.compile(*HOSTILE[case])
        row["compile_s"] = round(time.perf_counter() - began_s, 3)
        times_us = _walk(library, compiled, seed=0)
        row |= {"compiled": True, "masks": len(times_us), "mask_ms_max": round(max(times_us) / 1000, 1)}
    except Exception as error:
        row["error"] = str(error)[:120]
    row["total_s"] = round(time.perf_counter() - began_s, 3)
    return row | {"memory_mb": round(_peak_mb() - before_mb)}


def _in_own_process(library: Any, case: str) -> dict[str, Any]:
    """A fork, since loading everything anew takes longer than most inputs."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(_try_hostile(library, case)))
    process.start()
    sender.close()
    try:
        if receiver.poll(HOSTILE_LIMIT_S):
            return receiver.recv()
        return {"hostile": case, "ended_after_s": HOSTILE_LIMIT_S}
    except EOFError:
        process.join()
        return {"hostile": case, "exit_code": process.exitcode}
    finally:
        process.kill()
        process.join()


def _ms_since(began_s: float) -> float:
    return (time.perf_counter() - began_s) * 1000


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    run_program(main)
