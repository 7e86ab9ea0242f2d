"""What a user of `LLM` asks of sampling, and how that becomes `SamplingParams`.

Owns ranges and defaults: what is not asked for comes from the model's generation_config.json, and what that does
not say is OpenAI's default. Knows no engine.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.types import BeamParams, GrammarSpec, SamplingParams

MAX_TEMPERATURE = 2.0
#: seeds are taken modulo this, so that they mean the same in process and over HTTP
SEED_LIMIT = 2**63
MAX_LENGTH_PENALTY = 10.0
#: the values with which these ask for nothing
_NEUTRAL_FOR_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "temperature": (None, 0.0, 1.0),
    "top_p": (None, 1.0),
    "top_k": (None, 0),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "min_tokens": (0,),
    "grammar": (None,),
}


class SamplingError(ValueError):
    """A sampling option out of range. `option` is its name in `SamplingChoices`."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option


@dataclass(frozen=True, slots=True)
class SamplingChoices:
    """None means: the model's default. `max_tokens` None: up to the model's length. `seed` None: a random one.

    With `prompt_logprobs` `max_tokens` may be 0: the prompt is scored, and that is all. With `beam_width` the `n` best
    answers of a beam search: it goes by the model's own probabilities, so that nothing of what shapes samples may be
    set beside it.
    """

    max_tokens: int | None = None
    n: int = 1
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: GrammarSpec | None = None

    def resolve(
        self, defaults: Mapping[str, Any], *, max_tokens: int, vocab_size: int, random_seed: int
    ) -> SamplingParams:
        """`max_tokens` is what the model's length leaves for this prompt: an answer ends there at the latest.

        Raises `SamplingError` for the first choice that is out of range.
        """
        self.check()
        for option in ("logprobs", "prompt_logprobs"):
            count = getattr(self, option)
            if count is not None and count > vocab_size:
                raise SamplingError(option, f"must be at most the vocabulary's {vocab_size}, got {count}")
        longest = max_tokens if self.max_tokens is None else min(self.max_tokens, max_tokens)
        if self.beam_width is not None:
            if self.beam_width > vocab_size:
                at_most = f"must be at most the vocabulary's {vocab_size}"
                raise SamplingError("beam_width", f"{at_most}, got {self.beam_width}")
            return SamplingParams(
                max_tokens=longest,
                n=self.n,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=self.ignore_eos,
                beam=BeamParams(self.beam_width, self.length_penalty, self.early_stopping),
            )
        off = SamplingParams(max_tokens=0)

        def choice(name: str) -> Any:
            chosen = getattr(self, name)
            if chosen is not None:
                return chosen
            default = defaults.get(name)
            return getattr(off, name) if default is None else default

        return SamplingParams(
            max_tokens=longest,
            n=self.n,
            temperature=float(choice("temperature")),
            top_p=float(choice("top_p")),
            top_k=int(choice("top_k")),
            min_p=float(choice("min_p")),
            repetition_penalty=float(choice("repetition_penalty")),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=(random_seed if self.seed is None else self.seed) % SEED_LIMIT,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            grammar=self.grammar,
        )

    def check(self) -> None:
        """Raises `SamplingError` for the first choice that is out of range."""
        _check("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0, math.inf)
        _check("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("top_k", self.top_k, 0, math.inf)
        _check("min_p", self.min_p, 0.0, 1.0)
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise SamplingError("repetition_penalty", f"must be above 0, got {self.repetition_penalty}")
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("logprobs", self.logprobs, 0, math.inf)
        _check("prompt_logprobs", self.prompt_logprobs, 0, math.inf)
        _check("min_tokens", self.min_tokens, 0, math.inf)
        _check("n", self.n, 1, math.inf)
        self._check_beams()

    def _check_beams(self) -> None:
        if self.beam_width is None:
            if self.length_penalty != 1.0 or self.early_stopping is not False:
                option = "early_stopping" if self.length_penalty == 1.0 else "length_penalty"
                raise SamplingError(option, "is for beam searches: set beam_width too")
            return
        _check("beam_width", self.beam_width, self.n, math.inf)
        _check("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise SamplingError("early_stopping", f"must be True, False or 'never', got {self.early_stopping!r}")
        for option, neutral in _NEUTRAL_FOR_BEAMS.items():
            if getattr(self, option) not in neutral:
                raise SamplingError(option, "does not go with beam_width")


def _check(option: str, value: float | None, lowest: float, highest: float) -> None:
    if value is None or lowest <= value <= highest:  # false for NaN
        return
    bounds = f"at least {lowest:g}" if highest == math.inf else f"from {lowest:g} to {highest:g}"
    raise SamplingError(option, f"must be {bounds}, got {value}")
