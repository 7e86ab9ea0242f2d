"""`check_grammar`: whether the grammar of a request can be used, before anything is asked of a worker.

The waiting is the event loop's, the work is another process's; errors become responses that name the field, those of
the worker too, which knows of no fields.
"""

import asyncio

from deployments.protocol.errors import ApiError, bad_request
from worker.grammar.checks import GrammarChecks
from worker.grammar.errors import GrammarBusyError, GrammarError
from worker.grammar.vocabulary import vocabulary_of
from worker.text import Tokenizer
from worker.types import GrammarSpec

_RETRY_AFTER_S = 1
#: how a worker's refusal begins that is for the grammar
_REFUSAL = "grammar: "


def grammar_checks(tokenizer: Tokenizer, vocab_size: int) -> GrammarChecks:
    """The worker knows which tokens end an answer; for whether a grammar is any good, one stands for all."""
    end = 0 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return GrammarChecks(lambda: vocabulary_of(tokenizer, vocab_size, [end]))


async def check_grammar(checks: GrammarChecks, asked: tuple[GrammarSpec, str] | None) -> None:
    """`asked`: the grammar and the field that asks for it, or None. Raises ApiError: 400 for a grammar that cannot be
    used, 503 where nobody could look at it in time."""
    if asked is None:
        return
    grammar, field = asked
    try:
        await asyncio.wrap_future(checks.submit(grammar))
    except GrammarError as error:
        raise bad_request(f"{field}: {error}", field) from error
    except GrammarBusyError as error:
        headers = {"Retry-After": str(_RETRY_AFTER_S)}
        raise ApiError(503, f"{field}: {error}", param=field, code="grammar_busy", headers=headers) from error


def refused_grammar(message: str, field: str | None) -> ApiError | None:
    """The error for a worker's refusal that is for the grammar of the request, by the field that asked for it; None:
    for something else."""
    if field is None or not message.startswith(_REFUSAL):
        return None
    return bad_request(f"{field}: {message.removeprefix(_REFUSAL)}", field)
