"""What a benchmark drives: a server or an engine, behind one small protocol."""

from typing import Protocol

from deployments.bench.requests import Answer


class TargetError(Exception):
    """A request failed, or the target cannot be used at all; the message is counted and shown. `target` is its name,
    where it is known."""

    def __init__(self, message: str, target: str | None = None) -> None:
        super().__init__(message)
        self.target = target


class Target(Protocol):
    """`ask` fills in the answer's deliveries and counts and returns when it is complete. It raises TargetError when
    it fails; cancelled, it leaves nothing running. Times are those of the running event loop's clock."""

    name: str

    async def open(self) -> None:
        """Gets ready and finds out what the target can do. Raises TargetError."""

    async def ask(self, answer: Answer, run: int) -> None: ...

    async def close(self) -> None: ...
