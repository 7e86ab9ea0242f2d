"""Whole servers side by side, through HTTP: `python -m benchmarks.http --environments FOLDER`.

Starts every server that is set up, one after the other, and then loads one at a time, in turns, with the same
prompts at the same moments; the others are frozen, since an idle server takes processor time, too. Prints a Markdown
table, and each goal with what became of it; exit status 1 tells that one was missed, or that
nothing was measured.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.documents import document_with, with_table
from benchmarks.http_rows import GOALS, SEED, Row, all_rows
from benchmarks.http_table import BEGIN, END, Measured, goal_lines, table
from benchmarks.options import NamesOnce, Parser, count, existing_folder, number_from, port, run_program
from benchmarks.peers.drivers import OURS, PeerError, Setting
from benchmarks.servers.__main__ import LAST_PORT, add_setting_options, interrupt_on_signals, setting_of
from benchmarks.servers.commands import SERVERS, USUAL
from benchmarks.servers.process import RunningServer, ServerError
from deployments.bench.chats import LONG_EVERY_S
from deployments.bench.comparison import compare
from deployments.bench.http_target import HttpTarget, agree_on_prompts
from deployments.bench.prompts import FALLBACK_VOCAB_SIZE, PromptMaker
from deployments.bench.session import OnTurn, Session, SessionSettings
from deployments.bench.slo import Slo
from deployments.bench.target import TargetError
from deployments.bench.traces import MOONCAKE_BLOCK_TOKENS

FIRST_PORT = 8110
#: after its pause a server does first what it would have done meanwhile
CATCH_UP_S = 1.0
REQUEST_TIMEOUT_S = 300.0
NUM_WARM_UP = 2
MAX_RUNS_PER_ROW = 1000


class Turns:
    """One server awake at a time. A server that has ended, or does not wake up, raises TargetError with its name."""

    def __init__(self, servers: Sequence[RunningServer]) -> None:
        self._servers = {server.name: server for server in servers}

    async def give(self, name: str) -> None:
        for server in self._servers.values():
            if server.name != name:
                server.pause()
        with _as_target_error(name):
            await asyncio.to_thread(self._servers[name].resume)
        await asyncio.sleep(CATCH_UP_S)

    def check(self, names: Iterable[str]) -> None:
        for name in names:
            with _as_target_error(name):
                self._servers[name].check()


@contextlib.contextmanager
def _as_target_error(name: str) -> Iterator[None]:
    try:
        yield
    except ServerError as error:
        raise TargetError(str(error), name) from error


async def measure(servers: Sequence[RunningServer], rows: Sequence[Row], num_rounds: int) -> list[Measured]:
    """A server that cannot be used, ends, or answers in other lengths than asked for is left out from there on."""
    failures: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        targets: list[HttpTarget] = []
        for server in servers:
            prompts = PromptMaker(FALLBACK_VOCAB_SIZE, SEED, MOONCAKE_BLOCK_TOKENS)
            target = HttpTarget(
                server.url,
                prompts,
                model=None,
                text=False,
                api_key=None,
                name=server.name,
                more_fields=server.command.more_fields,
            )
            stack.push_async_callback(target.close)
            try:
                await target.open()
                targets.append(target)
            except TargetError as error:
                _say(f"left out: {server.name}: {error}")
                failures[server.name] = str(error)
        refusing = agree_on_prompts(targets)
        if refusing:
            _say(f"all get words, as these take no token ids: {', '.join(refusing)}")

        turns = Turns(servers)
        await _warm_up(session_of(rows[0], 0, turns.give), targets, failures)
        return [
            await _measure_row(row, session_of(row, place, turns.give), turns, targets, failures, num_rounds)
            for place, row in enumerate(rows, 1)
        ]


def session_of(row: Row, place: int, on_turn: OnTurn) -> Session:
    """Runs of different places have different prompts, so that no prefix cache answers from the row before."""
    settings = SessionSettings(row.workload, Slo(), row.num_requests, REQUEST_TIMEOUT_S, NUM_WARM_UP)
    session = Session(settings, on_turn=on_turn)
    session.num_runs = place * MAX_RUNS_PER_ROW
    return session


def _leave_out(error: TargetError, targets: list[HttpTarget], failures: dict[str, str]) -> None:
    if error.target is None:
        raise error
    _say(f"left out: {error}")
    failures[error.target] = str(error)
    targets[:] = [target for target in targets if target.name != error.target]


async def _warm_up(session: Session, targets: list[HttpTarget], failures: dict[str, str]) -> None:
    for target in list(targets):
        _say(f"warming up {target.name}")
        try:
            await session.warm_up(target, equal=True)
        except TargetError as error:
            _leave_out(error, targets, failures)


async def _measure_row(
    row: Row,
    session: Session,
    turns: Turns,
    targets: list[HttpTarget],
    failures: dict[str, str],
    num_rounds: int,
) -> Measured:
    while targets:
        _say(f"{row.name}: {num_rounds} rounds of {', '.join(target.name for target in targets)}")
        try:
            rounds = await session.compare(targets, row.rate, num_rounds)
            # Whoever ended in its last turn has figures of a part.
            turns.check(target.name for target in targets)
        except TargetError as error:
            _leave_out(error, targets, failures)
            # The others may have answered the prompts of this run already.
            session.num_runs += 1
            continue
        summaries = [[one.summary for one in of_target] for of_target in rounds]
        # Ratios are to the first, whatever the order of their turns.
        columns = compare(sorted(summaries, key=lambda of_target: of_target[0].target != OURS))
        _say(table([Measured(row, columns)], [target.name for target in targets]))
        return Measured(row, columns, dict(failures))
    return Measured(row, [], dict(failures))


def run(args: argparse.Namespace, setting: Setting, report: Callable[[list[Measured]], None]) -> None:
    """`report` is called before the servers are ended, which takes its time."""
    failures: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        logs = Path(args.logs or stack.enter_context(tempfile.TemporaryDirectory()))
        servers: list[RunningServer] = []
        for place, name in enumerate(args.servers):
            port = args.first_port + place
            try:
                command = SERVERS[name](setting, port)
                server = stack.enter_context(RunningServer(command, port, logs / f"{name}.log"))
            except (PeerError, ServerError) as error:
                _say(f"left out: {error}")
                failures[name] = str(error)
                continue
            _say(f"{name}: ready after {server.start_s:.0f} s ({server.command.note})")
            servers.append(server)
        chosen = all_rows(args.duration_s)
        measured = asyncio.run(measure(servers, [chosen[name] for name in args.rows], args.rounds))
        for one in measured:
            one.failures |= failures
        report(measured)


def parser() -> Parser:
    options = Parser("benchmarks.http", __doc__)
    add_setting_options(options)
    add = options.add_argument
    add("--servers", nargs="+", action=NamesOnce, choices=tuple(SERVERS), default=list(USUAL))
    add("--rows", nargs="+", action=NamesOnce, choices=tuple(all_rows(1.0)), default=list(all_rows(1.0)))
    add("--rounds", type=count, default=2)
    add("--duration-s", type=number_from(2 * LONG_EVERY_S), default=20.0, metavar="S",
        help="of a run of the chats (default: %(default)g)")  # fmt: skip
    add("--first-port", type=port, default=FIRST_PORT, help="of as many as there are servers (default: %(default)s)")
    add("--logs", type=existing_folder, metavar="FOLDER", help="keep what the servers print there")
    add("--json", action="store_true", help="a line of JSON for each row and server, no table")
    add("--write", type=document_with(BEGIN, END), metavar="FILE", help="also put the table into this "
        "document, between its marks")  # fmt: skip
    return options


def show(args: argparse.Namespace, measured: list[Measured]) -> bool:
    """True if something was measured and no goal was missed."""
    if args.json:
        for one in measured:
            for line in one.to_dicts():
                print(json.dumps(line), flush=True)
    if not any(one.has_figures for one in measured):
        _say("nothing was measured: no server answered")
        return False
    shown = table(measured, args.servers)
    if not args.json:
        print(shown, flush=True)
    for name, why in measured[-1].failures.items():
        _say(f"not measured: {name}: {why}")
    goals = goal_lines(measured, GOALS)
    _say("\n".join(goals))
    if args.write is not None:
        args.write.write_text(with_table(args.write.read_text(), shown, BEGIN, END))
    return not any(line.startswith("MISSED") for line in goals)


def main() -> int:
    options = parser()
    args = options.parse_args()
    last_port = args.first_port + len(args.servers) - 1
    if last_port > LAST_PORT:
        options.error(f"--first-port: the last of so many servers has {last_port}, and {LAST_PORT} is the most")
    interrupt_on_signals()
    with options.refusing():
        setting = setting_of(args)
    kept: list[bool] = []
    run(args, setting, lambda measured: kept.append(show(args, measured)))
    return 0 if all(kept) else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(main)
