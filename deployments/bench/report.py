"""Results as text: one run in detail, several rates as rows, a capacity, a comparison. Computes nothing."""

import math
from collections.abc import Sequence

from deployments.bench.capacity import Capacity
from deployments.bench.chats_summary import ChatsSummary
from deployments.bench.comparison import Compared
from deployments.bench.slo import Slo
from deployments.bench.stats import Percentiles
from deployments.bench.summary import Latencies, Summary

#: a client whose requests leave this much late in one case of a hundred says so beside its numbers
LATE_CLIENT_S = 0.01
#: a tokenizer may begin each prompt with a token of its own; the rest is rounding
MOST_BEGIN_TOKENS = 1.01


def slo_text(slo: Slo) -> str:
    limits = []
    if slo.ttft_s is not None:
        limits.append(f"first token within {slo.ttft_s * 1e3:.0f} ms")
    if slo.itl_s is not None:
        limits.append(f"99% of inter-token times within {slo.itl_s * 1e3:.0f} ms")
    return " and ".join(limits)


def detail(summary: Summary, slo: Slo) -> str:
    """Everything about one run."""
    lines = [
        f"{summary.target}: {summary.num_requests} requests, {_rate(summary.offered_rate)}, {summary.duration_s:.1f} s",
        f"  complete {summary.num_complete}, failed {summary.num_failed}, unfinished {summary.num_unfinished}"
        + (f", shorter than asked {summary.num_short}" if summary.num_short else "")
        + (f", longer {summary.num_longer}" if summary.num_longer else ""),
        f"  throughput {summary.output_tokens_per_s:.1f} output tokens/s, {summary.input_tokens_per_s:.1f} input "
        f"tokens/s, {summary.requests_per_s:.3g} requests/s",
    ]
    lines += [f"  {line}" for line in _prompt_lines([summary])]
    lines += [f"  error x {count}: {message}" for message, count in summary.errors.items()]
    if summary.abandoned is not None:
        lines.append(f"  ended early: {summary.abandoned}")
    if summary.num_good is not None:
        lines.append(
            f"  goodput {summary.goodput_requests_per_s:.3g} requests/s: {summary.num_good} of "
            f"{summary.num_requests} had their {slo_text(slo)}"
        )
    lines += ["", f"  {'ms':<26}" + "".join(f"{name:>10}" for name in ("p50", "p90", "p99", "max", "count"))]
    lines += _latency_lines("", summary.latencies)
    for kind, latencies in summary.by_kind.items():
        lines += _latency_lines(f"{kind}: ", latencies)
    if summary.chats is not None:
        lines += _chats_lines(summary.chats)
    lines += [_line("client: send lateness", summary.send_lateness), _line("client: loop lag", summary.loop_lag)]
    if summary.stall_threshold_s is not None:
        lines.append(f"  stalls (over {summary.stall_threshold_s * 1e3:.0f} ms between tokens): {summary.num_stalls}")
    if (summary.send_lateness.p99 or 0.0) > LATE_CLIENT_S:
        lines.append("  The client itself was late: its share of the latencies above is not small.")
    return "\n".join(lines)


def sweep_table(summaries: Sequence[Summary]) -> str:
    """One row for each run, times in ms; below them why requests failed, and prompts of another length than asked."""
    rows = [
        ["target", "req/s", "done", "failed", "tokens/s", "goodput", "TTFT p50", "p99", "ITL p50", "p99", "max",
         "E2E p50", "p99", "stalls", "late p99", ""]
    ]  # fmt: skip
    for summary in summaries:
        latencies = summary.latencies
        rows.append(
            [
                summary.target,
                "all at once" if math.isinf(summary.offered_rate) else f"{summary.offered_rate:.3g}",
                f"{summary.num_complete}/{summary.num_requests}",
                str(summary.num_failed),
                f"{summary.output_tokens_per_s:.1f}",
                "-" if summary.goodput_requests_per_s is None else f"{summary.goodput_requests_per_s:.3g}",
                _ms(latencies.ttft.p50),
                _ms(latencies.ttft.p99),
                _ms(latencies.itl.p50),
                _ms(latencies.itl.p99),
                _ms(latencies.itl.max),
                _ms(latencies.e2e.p50),
                _ms(latencies.e2e.p99),
                str(summary.num_stalls),
                _ms(summary.send_lateness.p99),
                "" if summary.abandoned is None else f"ended early: {summary.abandoned}",
            ]
        )
    failures = [
        f"{summary.target}, {_rate(summary.offered_rate)}: error x {count}: {message}"
        for summary in summaries
        for message, count in summary.errors.items()
    ]
    return "\n".join([_table(rows), "(times in ms)", *failures, *_prompt_lines(summaries)])


def capacity_text(target: str, capacity: Capacity, slo: Slo) -> str:
    level = slo_text(slo).replace("first token", "median first token")
    tried = f"{len(capacity.trials)} rates tried"
    if capacity.rate is None:
        return f"{target}: capacity none ({level}; missed at {capacity.lowest_miss:.3g} requests/s; {tried})"
    bound = "none missed" if capacity.lowest_miss is None else f"missed at {capacity.lowest_miss:.3g}"
    at_least = "" if capacity.why_ended == "precision" else f"at least, ended by {capacity.why_ended}, "
    return f"{target}: capacity {capacity.rate:.3g} requests/s ({at_least}{bound}; {level}; {tried})"


def comparison_table(compared: Sequence[Compared]) -> str:
    """One row for each quantity; medians, and in brackets the ratio to the first target."""
    rows = [["", *(column.target for column in compared)]]
    for name in compared[0].medians:
        is_time = name.endswith("_s") and not name.endswith("per_s")
        cells = []
        for column in compared:
            value, ratio = column.medians[name], column.ratios[name]
            shown = _ms(value) if is_time else ("-" if value is None else f"{value:.3g}")
            cells.append(shown if ratio is None else f"{shown} ({ratio:.2f}x)")
        rows.append([name.removesuffix("_s") + " ms" if is_time else name, *cells])
    rows.append(["failed", *(str(column.num_failed) for column in compared)])
    return _table(rows)


def _prompt_lines(summaries: Sequence[Summary]) -> list[str]:
    """A line for each target that counts other prompts than were asked for; a token that begins them may be more."""
    lines = {}
    for summary in summaries:
        counted, asked = summary.prompt_tokens, summary.prompt_tokens_asked
        if counted is not None and asked is not None and abs(counted - asked) > MOST_BEGIN_TOKENS:
            lines[summary.target] = (
                f"prompts of {summary.target}: {counted:.1f} tokens on average as it counts them, {asked:.1f} asked for"
            )
    return list(lines.values())


def _chats_lines(chats: ChatsSummary) -> list[str]:
    answered = chats.num_long - chats.num_long_unanswered
    return [
        _line("chats beside a long prompt", chats.itl_beside),
        f"  chats: {chats.tokens_per_s:.1f} tokens/s, {chats.num_stalls} stalls, longest silence "
        f"{chats.longest_silence_s * 1e3:.0f} ms; long prompts: {answered} of {chats.num_long} answered",
    ]


def _latency_lines(prefix: str, latencies: Latencies) -> list[str]:
    return [
        _line(f"{prefix}time to first token", latencies.ttft),
        _line(f"{prefix}inter-token", latencies.itl),
        _line(f"{prefix}per output token", latencies.tpot),
        _line(f"{prefix}end to end", latencies.e2e),
    ]


def _line(title: str, values: Percentiles) -> str:
    cells = [_ms(values.p50), _ms(values.p90), _ms(values.p99), _ms(values.max), str(values.count)]
    return f"  {title:<26}" + "".join(f"{cell:>10}" for cell in cells)


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:.1f}"


def _rate(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"{rate:.3g} requests/s"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join((first, *others)).rstrip())
    return "\n".join(lines)
