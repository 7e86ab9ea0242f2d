"""What the engine asks of a request before it looks at its own state: whether there is anything to generate.

Ranges of parameters are checked at the edge; whether a prompt fits is the scheduler's to say.
"""

from worker.types import EngineRequest


class RequestError(ValueError):
    """The engine refuses this request; the message is for the client."""


def check_token_ids(token_ids: list[int], vocab_size: int) -> None:
    """Raises RequestError for an id that is no token: in a step it would end it for everybody, and the process on some
    devices."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        strange = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(f"token id {strange} is not in the vocabulary of {vocab_size}")


def checked_outputs(request: EngineRequest, vocab_size: int) -> list[list[int]]:
    """A list of the tokens that each sample has already. Raises RequestError for what leaves nothing to do, and for
    ids that are no tokens."""
    params = request.params
    for token_ids in (request.prompt_token_ids, *request.output_token_ids):
        check_token_ids(token_ids, vocab_size)
    if not request.prompt_token_ids:
        raise RequestError("the prompt is empty")
    if params.n < 1 or (params.beam is not None and params.beam.width < params.n):
        raise RequestError(f"n: {params.n} answers cannot come of it")
    outputs = [list(output) for output in request.output_token_ids] or [[] for _ in range(params.n)]
    if len(outputs) != params.n:
        raise RequestError(f"output_token_ids: {len(outputs)} lists for {params.n} samples")
    if not request.open_samples:
        raise RequestError("ended_samples: nothing is left to generate")
    is_for_nothing = params.max_tokens == 0 and params.beam is None and not any(outputs)
    num_known = max(len(outputs[index]) for index in request.open_samples)
    if params.max_tokens <= num_known and not is_for_nothing:
        raise RequestError(f"max_tokens: {params.max_tokens} leaves nothing to generate")
    return outputs
