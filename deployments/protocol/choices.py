"""How many answers a request asks for and how they are found: `n`, `best_of`, beam search.

Owns the rules between these fields and the others. Ranges of single fields are those of `requests.py`.
"""

from typing import TYPE_CHECKING, Any

from deployments.protocol.errors import bad_request, not_supported
from worker.types import BeamParams

if TYPE_CHECKING:
    from deployments.protocol.requests import GenerationRequest

#: of a beam search that names no width: one beam would be greedy
MIN_BEAM_WIDTH = 2

#: Beam search goes by the model's own probabilities: the values of these fields that ask for nothing else.
_NEUTRAL_FOR_BEAMS: dict[str, tuple[Any, ...]] = {
    "stop": (None, []),
    "temperature": (None, 0.0, 1.0),
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "prompt_logprobs": (None,),
}
#: What these fields hold where there are no beams for them to steer.
_NEUTRAL_WITHOUT_BEAMS: dict[str, tuple[Any, ...]] = {
    "beam_width": (None,),
    "length_penalty": (None, 1.0),
    "early_stopping": (None, False),
}


def check_choices(request: "GenerationRequest") -> None:
    """What the fields must not be together, by the name of the one at fault."""
    n = request.num_choices
    if request.best_of is not None and request.best_of < n:
        raise bad_request(f"best_of: must be at least n, which is {n}", "best_of")
    if not request.use_beam_search:
        for name, neutral in _NEUTRAL_WITHOUT_BEAMS.items():
            if getattr(request, name) not in neutral:
                raise bad_request(f"{name}: only allowed when use_beam_search is true", name)
        if request.stream and request.is_ranked:
            raise bad_request(
                "best_of: above n not together with stream: the best are known only when all have ended", "best_of"
            )
        return
    for name, neutral in _NEUTRAL_FOR_BEAMS.items():
        value = getattr(request, name)
        # `0 == False`, but logprobs 0 asks for log-probabilities
        if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral):
            raise not_supported(name, "together with use_beam_search it")
    if request.token_limit == 0:
        field = request.max_tokens_field
        raise bad_request(f"{field}: must be at least 1 together with use_beam_search", field)
    least = max(n, request.best_of or 1)
    if request.beam_width is not None and request.beam_width < least:
        raise bad_request(f"beam_width: must be at least n and best_of, here {least}", "beam_width")


def check_limits(request: "GenerationRequest", *, num_prompts: int, max_n: int, max_sequences: int) -> None:
    """Refuse more answers than the server allows, before anything is made for them."""
    for name in ("n", "best_of", "beam_width"):
        value = getattr(request, name)
        if value is not None and value > max_n:
            raise bad_request(f"{name}: must be at most {max_n}", name)
    num_sequences = num_prompts * num_sequences_of(request)
    if num_sequences > max_sequences:
        field = next((name for name in ("beam_width", "best_of", "n") if getattr(request, name)), "prompt")
        raise bad_request(
            f"{field}: {num_prompts} prompts come to {num_sequences} answers; at most {max_sequences} in one request",
            field,
        )


def num_sequences_of(request: "GenerationRequest") -> int:
    """Sequences that the engine runs for each prompt."""
    beam = beam_params(request)
    return request.num_candidates if beam is None else beam.width


def beam_params(request: "GenerationRequest") -> BeamParams | None:
    """The width is `beam_width`, else the largest of `n`, `best_of` and 2."""
    if not request.use_beam_search:
        return None
    width = request.beam_width or max(request.num_choices, request.best_of or 1, MIN_BEAM_WIDTH)
    length_penalty = 1.0 if request.length_penalty is None else request.length_penalty
    return BeamParams(width, length_penalty, request.early_stopping or False)
