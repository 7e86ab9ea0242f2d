"""A model's chat template: messages to ids. Contents of messages can never become control tokens.

Templates run in Transformers' sandbox, for a limited time. Knows nothing of requests; roles are checked where they
enter.
"""

import copy
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import tokenizers

from worker.text.time_limit import TimeLimit, TimeLimitExceeded

#: the longest conversation that a server takes renders in a small part of this
RENDER_LIMIT_S = 5.0
#: several times the text of the longest conversation that a server takes
MAX_RENDERED_CHARS = 32 * 1024 * 1024
#: What a template can raise, besides its own errors, when messages are not as it expects them.
_PYTHON_ERRORS_OF_TEMPLATES = (
    TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip


class ChatTemplateError(ValueError):
    """The messages cannot be turned into a prompt; the text says why, in the template's own words where it has any."""


class ChatTemplate:
    """Renders and encodes conversations.

    Where a content holds the text of a control token (a special token, one that the template itself writes, or
    one of the form <|...|>), the token is put between two private marks before rendering, so that templates
    which look for it still find it. After rendering, each marked token is cut apart by a third mark, which the
    tokenizer knows as a token of its own: no token can reach across it, and its id is dropped from the result.
    """

    def __init__(
        self,
        wrapper: Any,
        backend: tokenizers.Tokenizer,
        chat_template: str | None,
        render_limit_s: float = RENDER_LIMIT_S,
    ) -> None:
        self._wrapper = wrapper
        self._time_limit = TimeLimit(render_limit_s)
        self._render_limit_s = render_limit_s
        self._backend = backend
        self._template = chat_template
        if chat_template is None and wrapper.chat_template is not None:
            self._template = wrapper.get_chat_template()
        self._open, self._close, self._cut = (_private_mark() for _ in range(3))
        added = backend.get_added_tokens_decoder().values()
        control_tokens = [token for token in added if _is_control(token, self._template or "")]
        texts = sorted((re.escape(token.content) for token in control_tokens), key=len, reverse=True)
        self._control = re.compile("|".join(texts) or "(?!)")
        self._marked = re.compile(f"{self._open}({self._control.pattern}){self._close}|{self._open}|{self._close}")
        # A token that cannot be cut apart, or that matches text which only looks like it, cannot be kept out.
        self._uncuttable = {token.content for token in control_tokens if len(token.content) == 1}
        self._normalized = [token.content for token in control_tokens if token.normalized]
        self._cutting_backend: tokenizers.Tokenizer | None = None
        if self._template is not None and control_tokens:
            self._cutting_backend = copy.deepcopy(backend)
            self._cutting_backend.add_special_tokens([tokenizers.AddedToken(self._cut, normalized=False)])

    @property
    def text(self) -> str | None:
        """The template itself; None for a model without one."""
        return self._template

    def encode(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        given = [value for message in messages for key, value in message.items() if key != "role"]
        if not any(map(self._holds_control_token, _texts([*given, options]))):
            return encode_text(self._backend, self._render(messages, options), add_special_tokens=False)
        assert self._cutting_backend is not None
        marked = [
            {key: value if key == "role" else self._mark(value) for key, value in message.items()}
            for message in messages
        ]
        rendered = self._marked.sub(self._cut_apart, self._render(marked, self._mark(options)))
        cut_id = self._cutting_backend.token_to_id(self._cut)
        found = encode_text(self._cutting_backend, rendered, add_special_tokens=False)
        return [token_id for token_id in found if token_id != cut_id]

    def _render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        if self._template is None:
            raise ChatTemplateError("the model has no chat template, and none was given (of a server: --chat-template)")
        try:
            rendered: str = self._time_limit.run(
                lambda: self._wrapper.apply_chat_template(
                    [dict(message) for message in messages], chat_template=self._template, tokenize=False, **options
                )
            )
        except TimeLimitExceeded as error:
            raise ChatTemplateError(f"the chat template ran for more than {self._render_limit_s:g} s") from error
        except jinja2.TemplateError as error:
            raise ChatTemplateError(error.message or type(error).__name__) from error
        except _PYTHON_ERRORS_OF_TEMPLATES as error:
            # Such a message could quote the conversation, so only its kind is passed on.
            raise ChatTemplateError(f"the chat template failed on these messages ({type(error).__name__})") from error
        if len(rendered) > MAX_RENDERED_CHARS:
            raise ChatTemplateError(f"the chat template wrote more than {MAX_RENDERED_CHARS} characters")
        return rendered

    def _holds_control_token(self, text: str) -> bool:
        if any(token in text for token in self._uncuttable):
            raise ChatTemplateError("a message holds a control token of the model that cannot be taken as plain text")
        if self._control.search(text) is not None:
            return True
        if self._normalized and self._backend.normalizer is not None:
            normalized = self._backend.normalizer.normalize_str(text)
            if any(token in normalized for token in self._normalized):
                raise ChatTemplateError("a message holds text that the tokenizer would read as a control token")
        return False

    def _mark(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {self._mark(key): self._mark(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._mark(inner) for inner in value]
        if not isinstance(value, str):
            return value
        return self._control.sub(lambda match: f"{self._open}{match[0]}{self._close}", value)

    def _cut_apart(self, match: re.Match[str]) -> str:
        """A marked token, cut so that no control token is left in it; a mark alone (the template took the token
        out between two of them) is a cut too, so that its neighbours do not join."""
        if match[1] is None:
            return self._cut
        pieces, rest = [], match[1]
        while (inner := self._control.search(rest)) is not None:
            pieces.append(rest[: inner.start() + 1])
            rest = rest[inner.start() + 1 :]
        return self._cut + self._cut.join([*pieces, rest]) + self._cut


def encode_text(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The batch call lets other threads run meanwhile; the call for a single text does not."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _is_control(token: tokenizers.AddedToken, template: str) -> bool:
    text = token.content
    if not text or text.isspace():
        return False
    return token.special or text in template or (text.startswith("<|") and text.endswith("|>"))


def _texts(value: Any) -> list[str]:
    """All strings in a JSON value, names of fields included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for key, inner in value.items() for text in [*_texts(key), *_texts(inner)]]
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner)]
    return []


def _private_mark() -> str:
    """Eight private-use characters that no client can guess; they have no case and are no white space."""
    return "".join(chr(random.SystemRandom().randrange(0xE000, 0xF900)) for _ in range(8))
