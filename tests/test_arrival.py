"""When a request came: what Serve's proxy writes down, and what an ingress believes of it."""

import asyncio
import time

import pytest
from starlette.requests import Request
from starlette.types import Message, Scope

from deployments.arrival import HEADER, MAX_AGE_S, arrival_of, received_now
from deployments.proxy_headers import middlewares


def through_the_proxy(*headers: tuple[bytes, bytes]) -> Scope:
    """What an application behind all of the proxy's middlewares gets."""
    seen: list[Scope] = []

    async def application(scope: Scope, receive: object, send: object) -> None:
        seen.append(scope)

    async def nothing() -> Message:
        raise AssertionError("nobody reads")

    async def nobody(message: Message) -> None:
        raise AssertionError("nobody answers")

    app = application
    for middleware in reversed(middlewares()):
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    asyncio.run(app({"type": "http", "headers": list(headers)}, nothing, nobody))
    [scope] = seen
    return scope


def asked(value: bytes | None) -> Request:
    return Request({"type": "http", "headers": [] if value is None else [(HEADER, value)]})


def test_a_request_came_when_the_proxy_says():
    before_s = time.monotonic()
    scope = through_the_proxy((b"accept", b"*/*"))
    after_s = time.monotonic()
    time.sleep(0.01)
    assert before_s <= arrival_of(Request(scope)) <= after_s


def test_what_a_client_says_of_it_does_not_pass_the_proxy():
    scope = through_the_proxy((HEADER, b"x 1"), (HEADER.title(), b"x 2"), (b"accept", b"*/*"))
    assert [name for name, _ in scope["headers"]] == [b"accept", HEADER]
    assert not scope["headers"][1][1].startswith(b"x ")


@pytest.mark.parametrize("moment", ["future", "long ago", "1.5", "-1", "٣", "", "9" * 30])
def test_a_moment_that_cannot_be_is_not_believed(moment: str):
    boot_id = received_now().partition(b" ")[0].decode()
    now_ns = time.monotonic_ns()
    moments = {"future": str(now_ns + 10**12), "long ago": str(now_ns - int((MAX_AGE_S + 5) * 1e9))}
    value = f"{boot_id} {moments.get(moment, moment)}".encode()
    began_s = time.monotonic()
    assert began_s <= arrival_of(asked(value)) <= time.monotonic()


@pytest.mark.parametrize("value", [None, b"", b"another-machine 1", b" 1", b"nonsense", "é 1".encode("latin-1")])
def test_without_the_proxys_word_or_from_another_machine_it_came_now(value: bytes | None):
    began_s = time.monotonic()
    assert began_s <= arrival_of(asked(value)) <= time.monotonic()
