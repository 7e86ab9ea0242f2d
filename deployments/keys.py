"""API keys: who may ask, whose request it is, how urgent it may be. Keeps digests, never a key; knows no HTTP."""

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.tenants import TENANT_PATTERN

#: no request can be more urgent
MOST_URGENT_PRIORITY = -100
LEAST_URGENT_PRIORITY = 100
_KEY_PATTERN = r"^[\x21-\x7e]{1,512}$"
#: of a field, as nobody writes a key: words of small letters
_HARMLESS_NAME = re.compile(r"[a-z]{1,12}(_[a-z]{1,12})?")


class KeysError(ValueError):
    """The list of keys is not as it should be; the text names entries and fields, never a key."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is. `most_urgent_priority`: no request of theirs is more urgent (lower is more urgent). `key_id`
    tells keys apart and says nothing of them. Of this very request: `http_request_id` is its `x-request-id`, `read_s`
    the moment at which its body was there (`time.monotonic`; 0.0: as soon as it came), `traceparent` what its client
    says of the trace it belongs to."""

    tenant: str = ""
    is_admin: bool = False
    most_urgent_priority: int = MOST_URGENT_PRIORITY
    key_id: str = field(default="", compare=False)
    http_request_id: str = field(default="", compare=False)
    read_s: float = field(default=0.0, compare=False)
    traceparent: str = field(default="", compare=False)


#: who asks a server that has no keys and names no tenants
ANYBODY = Caller()


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys of a server, as digests. `tenant_weights` are the shares of tenants that the list gives."""

    digests: tuple[bytes, ...] = field(repr=False)
    callers: tuple[Caller, ...]
    tenant_weights: dict[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of a JSON or YAML list of `{key, tenant, admin, weight, max_priority}` or plain keys. Raises KeysError."""
        entries = _entries(text)
        digests = [_digest(entry.key) for entry in entries]
        for position, digest in enumerate(digests):
            first = digests.index(digest)
            if first != position:
                raise KeysError(f"entries {first + 1} and {position + 1} have the same key")
        callers = tuple(
            Caller(entry.tenant, entry.admin, entry.max_priority, hashlib.sha256(digest).hexdigest()[:16])
            for entry, digest in zip(entries, digests, strict=True)
        )
        return cls(tuple(digests), callers, _weights(entries))

    @property
    def tenants(self) -> tuple[str, ...]:
        """Those that the list declares, each once."""
        return tuple(dict.fromkeys(caller.tenant for caller in self.callers if caller.tenant))

    def caller_of(self, key: str) -> Caller | None:
        """None for an unknown key. Every key is compared, in time that tells nothing about any of them."""
        given = _digest(key)
        found = None
        for digest, caller in zip(self.digests, self.callers, strict=True):
            if hmac.compare_digest(digest, given):
                found = caller
        return found


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    key: Annotated[str, Field(pattern=_KEY_PATTERN, repr=False)]
    tenant: Annotated[str, Field(pattern=TENANT_PATTERN)] = ""
    admin: bool = False
    weight: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    max_priority: Annotated[int, Field(ge=MOST_URGENT_PRIORITY, le=LEAST_URGENT_PRIORITY)] = MOST_URGENT_PRIORITY


def _entries(text: str) -> list[_Entry]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", at line {mark.line + 1}" if mark is not None else ""
        # The error's own text quotes lines, and those hold keys.
        raise KeysError(f"not a JSON or YAML list{where}") from None
    if not isinstance(values, list) or not values:
        raise KeysError("must be a list of at least one entry")
    return [_entry(position, value) for position, value in enumerate(values, start=1)]


def _entry(position: int, value: Any) -> _Entry:
    try:
        return _Entry.model_validate({"key": value} if isinstance(value, str) else value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "entry"
        message = first["msg"]
        if first["type"] == "extra_forbidden":
            # A name that is not known could be a key at the wrong place.
            name = name if "key" in value and _HARMLESS_NAME.fullmatch(name) else "entry"
            message = f"unknown field; there are {', '.join(_Entry.model_fields)}"
        raise KeysError(f"entry {position}: {name}: {message}") from None


def _weights(entries: list[_Entry]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for position, entry in enumerate(entries, start=1):
        if entry.weight is None:
            continue
        if not entry.tenant:
            raise KeysError(f"entry {position}: weight: only a tenant has one")
        if weights.setdefault(entry.tenant, entry.weight) != entry.weight:
            raise KeysError(f"entry {position}: weight: its tenant has another one in an earlier entry")
    return weights


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
