"""The process in which a grammar is first compiled, and followed a little: it may hang or run out of memory alone.

Reads lines of JSON from its standard input: a vocabulary, answered with "ready", then grammars, each answered with
itself in the library's terms or what is wrong with it. Ends with its input.
"""

import json
import os
import resource
import sys
import threading
from typing import Any

import psutil

from worker.grammar.bounds import check_bounds
from worker.grammar.errors import GrammarError
from worker.grammar.library import compile_grammar, library_grammar, library_tokenizer
from worker.grammar.trial_walk import try_walks
from worker.types import GrammarSpec

#: Half of what threads get where least is given: what passes here passes where requests are served.
STACK_BYTES = 1 << 20
#: beyond what the process has when it is ready
MEMORY_BYTES = 1 << 30
PARENT_CHECK_S = 1.0
#: grammars that run away must not slow down those who serve
NICENESS = 10


def main() -> None:
    threading.stack_size(STACK_BYTES)
    parent = os.getppid()
    thread = threading.Thread(target=_serve, daemon=True)
    thread.start()
    while thread.is_alive() and os.getppid() == parent:  # what compiles does not read the end of its input
        thread.join(PARENT_CHECK_S)


def _serve() -> None:
    given = json.loads(sys.stdin.readline())
    token_bytes = [bytes.fromhex(token) for token in given["token_bytes"]]
    tokenizer = library_tokenizer(token_bytes, given["special_ids"], given["eos_token_ids"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.nice(NICENESS)
    _say("ready")
    for line in sys.stdin:
        kind, text = json.loads(line)
        try:
            spec = GrammarSpec(kind, text)
            check_bounds(spec)
            grammar = library_grammar(spec)
            try_walks(compile_grammar(tokenizer, grammar))
            _say({"grammar": grammar})
        except GrammarError as error:
            _say({"error": str(error)})


def _say(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
