"""Values of `stallfree bench`'s options: what their texts may be, and what they come to."""

import argparse
import json
import math
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from deployments.bench.mixes import MOST_TOKENS, LengthRange, MixPart, parse_lengths, parse_mix
from deployments.cli.options import whole_number

#: fields that a comparison keeps equal, or that the benchmark depends on
_OWN_FIELDS = ("model", "prompt", "max_tokens", "stream")
_NAMED_URL = re.compile(r"(?:([\w.-]+)=)?(https?://.+)")
_SCHEMES = ("http", "https")
_NAMED_BODY = re.compile(r"(?:([\w.-]+)=)?(\{.*\})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ItlLimit:
    """A limit on inter-token times: `value_ms`, or so many times (`factor`) what a lone request sees."""

    value_ms: float | None = None
    factor: float | None = None


@dataclass(frozen=True, slots=True)
class NamedUrl:
    """A server to compare; without a name it is called by its URL."""

    name: str | None
    url: str


@dataclass(frozen=True, slots=True)
class MoreFields:
    """Fields of every request to the server of this name, or to all."""

    name: str | None
    fields: dict[str, Any]


def mix(text: str) -> list[MixPart]:
    try:
        return parse_mix(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def lengths(text: str) -> LengthRange:
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rates_list(text: str) -> list[float]:
    return [positive_or_inf(item) for item in text.split(",")]


def http_url(text: str) -> str:
    """As it is, if a server can stand there."""
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        is_url = False
    if not is_url:
        raise argparse.ArgumentTypeError(f"must read http://HOST:PORT or https://HOST:PORT, got {text!r}")
    return text


def named_url(text: str) -> NamedUrl:
    match = _NAMED_URL.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must read http://HOST:PORT or NAME=http://HOST:PORT, got {text!r}")
    return NamedUrl(match[1], http_url(match[2]))


def more_fields(text: str) -> MoreFields:
    match = _NAMED_BODY.fullmatch(text)
    try:
        fields = None if match is None else json.loads(match[2])
    except ValueError:
        fields = None
    if match is None or fields is None:
        raise argparse.ArgumentTypeError(f"must be a JSON object, or NAME= and one, got {text!r}")
    for name in _OWN_FIELDS:
        if name in fields:
            raise argparse.ArgumentTypeError(f"{name} is what the benchmark sets")
    return MoreFields(match[1], fields)


def positive_or_inf(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def positive(text: str) -> float:
    value = positive_or_inf(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}")
    return value


def share(text: str) -> float:
    value = positive_or_inf(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, got {text!r}")
    return value


def count(text: str) -> int:
    value = whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")
    return value


def num_tokens(text: str) -> int:
    value = count(text)
    if value > MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_TOKENS:,} tokens, got {text!r}")
    return value


def itl_limit(text: str) -> ItlLimit:
    factor = text.removesuffix("x")
    if factor and factor != text:
        return ItlLimit(factor=positive(factor))
    return ItlLimit(value_ms=positive(text))
