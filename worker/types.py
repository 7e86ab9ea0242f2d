"""Plain messages between the engine and whoever asks it: requests, token events, load. No tensors, no text."""

from dataclasses import dataclass, field
from typing import Literal

from scheduler.life_report import LifeReport

#: JSON text of a schema for json_schema, a JSON list for choice, Lark or GBNF for ebnf, nothing for json_object
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "ebnf"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer is held to, as a client wrote it; `worker.grammar.specs` makes them."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search with `width` beams. A finished answer scores its log-probability / length ** length_penalty.

    early_stopping: True ends when `width` answers have ended; False also when the best running beam, at its present
    length, is worse than the worst of them; "never" only when no longer answer could be better.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it stops. Ranges are checked at the edge (`deployments.protocol`, `LLM`).

    temperature 0 is greedy; top_k 0, top_p 1.0 and min_p 0.0 are off. `seed` is always set: whoever takes the
    request in draws one for an unseeded request. `logprobs` is the number of alternatives reported beside the
    chosen token (0: the chosen one alone; None: no log-probabilities), `prompt_logprobs` the same for the tokens of
    the prompt. With `max_tokens` 0 nothing is generated: the prompt is computed, and that is all. With `beam`, `n` is
    how many of the best answers are returned, all at the end; temperature, cuts, penalties and bias do not apply. A
    `grammar` decides which tokens may be chosen and when the answer may end; there is none beside `beam`.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    beam: BeamParams | None = None
    grammar: GrammarSpec | None = None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as the engine takes it. `output_token_ids` (one list per sample) is what a resumed request
    has already produced; empty for a new one. Its `ended_samples` are not run, and no event tells of them.
    `priority`: lower is more urgent. `cache_salt`: only requests with the same one share cached prefixes."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    output_token_ids: list[list[int]] = field(default_factory=list)
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    ended_samples: tuple[int, ...] = ()

    @property
    def open_samples(self) -> list[int]:
        """The indices of the samples that are to run."""
        return [index for index in range(self.params.n) if index not in self.ended_samples]

    @property
    def num_known_tokens(self) -> int:
        """Tokens that are computed before the first new one."""
        return len(self.prompt_token_ids) + sum(map(len, self.output_token_ids))


#: (log-probability of the chosen token, [(token id, log-probability), ...] of the best alternatives, best first)
TokenLogprobs = tuple[float, list[tuple[int, float]]]
#: of a prompt's token: (its log-probability, its rank among all tokens from 1 on, the best alternatives as above)
PromptTokenLogprobs = tuple[float, int, list[tuple[int, float]]]


@dataclass(slots=True)
class TokenEvent:
    """New tokens of one sample, or its end, or both. `token_ids` includes the stop token that ended it.

    finish_reason: None while it goes on, else "stop", "length", "abort" or "error". Then `error` says why;
    `is_refusal`: it is for what the request asks, and nothing is wrong with the engine; `is_worker_lost`: the engine
    died or is stopping, and another one may go on with the request. The first event of a request says how many tokens
    of its prompt the prefix cache gave (`num_cached_tokens`; None in the others), and has the log-probabilities of its
    prompt from the second token on, if the request wants them (`prompt_logprobs`). The last event of a request, and
    some before it, say what its time was spent on (`life`).
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    error: str | None = None
    is_refusal: bool = False
    is_worker_lost: bool = False
    num_cached_tokens: int | None = None
    prompt_logprobs: list[PromptTokenLogprobs] | None = None
    life: LifeReport | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a worker holds, as the router scores it and the gauges show it.

    Blocks without `host` in their name are the device's; free ones include those that are only cached.
    `reference_step_s` is what a step of a fixed content is foreseen to take (`rates.StepSpeed`); 0.0 until it is known.
    """

    num_waiting: int
    num_running: int
    num_swapped: int
    num_queued_tokens: int
    num_free_blocks: int
    num_used_blocks: int
    num_used_host_blocks: int = 0
    num_free_host_blocks: int = 0
    num_cached_blocks: int = 0
    reference_step_s: float = 0.0
