"""From a checked request and its prompt to what the engine takes: defaults, lengths, ids of the vocabulary."""

import secrets
from collections.abc import Mapping
from typing import Any

from deployments.protocol.choices import beam_params
from deployments.protocol.errors import bad_request, context_length_exceeded
from deployments.protocol.requests import GenerationRequest
from worker.types import SamplingParams

#: seeds are non-negative below this, whatever the client sent
_SEED_LIMIT = 2**63
#: log-probabilities of one prompt that a request may ask for: its tokens times one more than their alternatives. They
#: come from the worker in one message, of which Serve's transport takes 4 MiB.
MAX_PROMPT_LOGPROB_ENTRIES = 150_000
_DEFAULTS: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    if any(not 0 <= token_id < vocab_size for token_id in token_ids):
        raise bad_request(f"{param}: token ids must be at least 0 and below {vocab_size}", param)


def sampling_params(
    request: GenerationRequest,
    *,
    num_prompt_tokens: int,
    prompt_param: str,
    max_model_len: int,
    vocab_size: int,
    generation_defaults: Mapping[str, Any],
) -> SamplingParams:
    """Checks what depends on the model and fills in its defaults. A prompt of `max_model_len - 1` tokens gets one
    token; a longer one, or a limit that the context cannot hold, is refused with the numbers. Where nothing is to be
    generated a prompt may fill the context."""
    max_tokens = request.token_limit
    num_least = 1 if max_tokens is None else min(max_tokens, 1)
    if num_prompt_tokens + num_least > max_model_len:
        raise context_length_exceeded(num_prompt_tokens, max_tokens or num_least, max_model_len, prompt_param)
    if max_tokens is None:
        max_tokens = max_model_len - num_prompt_tokens
    elif num_prompt_tokens + max_tokens > max_model_len:
        raise context_length_exceeded(num_prompt_tokens, max_tokens, max_model_len, request.max_tokens_field)
    num_entries = num_prompt_tokens * (1 + (request.num_prompt_logprobs or 0))
    if request.num_prompt_logprobs is not None and num_entries > MAX_PROMPT_LOGPROB_ENTRIES:
        field = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        most = MAX_PROMPT_LOGPROB_ENTRIES // num_prompt_tokens
        at_most = f"at most {most - 1}" if most else "none"
        raise bad_request(f"{field}: {at_most} for a prompt of {num_prompt_tokens} tokens", field)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens: must be at most {max_tokens}, the limit of this answer", "min_tokens")
    check_token_ids(request.stop_token_ids or [], vocab_size, "stop_token_ids")
    check_token_ids(list(request.logit_bias or {}), vocab_size, "logit_bias")

    beam = beam_params(request)
    if beam is not None:
        if beam.width > vocab_size:
            raise bad_request(f"beam_width: must be at most the vocabulary's {vocab_size}", "beam_width")
        # The model's own sampling defaults are for samples; beams go by its probabilities alone.
        return SamplingParams(
            max_tokens=max_tokens,
            n=request.num_choices,
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            beam=beam,
        )

    def chosen(name: str) -> Any:
        value = getattr(request, name)
        return value if value is not None else generation_defaults.get(name, _DEFAULTS[name])

    temperature, top_p = float(chosen("temperature")), float(chosen("top_p"))
    if top_p == 0.0:
        # The smallest set of tokens whose probability exceeds 0 is the best token alone.
        temperature, top_p = 0.0, 1.0
    num_logprobs = request.num_logprobs
    if request.is_ranked and num_logprobs is None:
        num_logprobs = 0  # those of the chosen tokens, to rank the answers by
    return SamplingParams(
        max_tokens=max_tokens,
        n=request.num_candidates,
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, int(chosen("top_k"))),
        min_p=float(chosen("min_p")),
        seed=secrets.randbelow(_SEED_LIMIT) if request.seed is None else request.seed % _SEED_LIMIT,
        logprobs=num_logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
        min_tokens=min_tokens,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=float(chosen("repetition_penalty")),
        logit_bias=tuple((request.logit_bias or {}).items()),
        grammar=None if request.grammar is None else request.grammar[0],
    )
