"""An explanation as text for people: what the time went to, the timeline as bars, who stood in the way.

Knows the fields of an explanation, not where it comes from.
"""

from collections.abc import Mapping
from typing import Any

from deployments.explain.explanation import PART_NAMES

BAR = "█"
_LESS_THAN_ONE = "▏"
_CAUSES = {
    "token_budget": "the token budget went to others",
    "sequence_slots": "all sequence slots were taken",
    "blocks": "there were no free cache blocks",
    "priority": "more urgent requests went first",
    "fairness": "it was other tenants' turn",
    "behind_swapped": "swapped-out requests come back first",
    "behind_recomputed": "preempted requests come back first",
    "partial_prefill_cap": "as many prompts as allowed were mid-way",
    "long_prefill": "shorter prompts went first",
    "preemption": "nobody is let in by a step that preempts",
    "prefills_first": "prompts run before swapped-out requests come back",
    "in_flight": "a step that still uses its blocks had to end",
    "running_step": "it came in the middle of a step",
    "grammar": "its grammar was compiled",
    "prompts": "others' prompts made its steps longer",
    "answers": "others' answers made its steps longer",
    "recompute": "computed again after a preemption",
    "request": "from the proxy to the server, until all of it was there",
    "failover": "computed again after its worker was lost",
    "on_a_lost_worker": "on a worker that was lost later",
    "host_pool_full": "there were no free blocks, nor room on the host",
    "route": "on the way to another worker",
    "unknown": "its worker could not be asked",
    "died": "its worker died",
    "stalled": "its worker gave no sign of life",
    "drained": "its worker was told to stop",
}


def explanation_text(explanation: Mapping[str, Any], width: int) -> str:
    """Lines of at most `width` columns, as far as ids allow it."""
    total_ms = explanation["end_to_end_ms"]
    first_ms = explanation["time_to_first_token_ms"]
    title = f"{explanation['id']}  {explanation['status']}  {_time(total_ms)}"
    if first_ms is not None:
        title += f", first token after {_time(first_ms)}"
    lines = [title, ""]
    lines += _part_lines(explanation["parts"], total_ms)
    lines += ["", "timeline", *_timeline(explanation["timeline"], total_ms, width)]
    lines += _facts(explanation)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _part_lines(parts: list[Mapping[str, Any]], total_ms: float) -> list[str]:
    lines = []
    for part in parts:
        share = part["ms"] / total_ms if total_ms else 0.0
        cause = "" if part["cause"] is None else _CAUSES.get(part["cause"], part["cause"])
        lines.append(f"  {part['name']:<13}{_time(part['ms']):>11}  {share:>6.1%}  {cause}")
        lines += [f"{'':17}{_time(blocker['ms']):>11}  {blocker['id']}" for blocker in part["blockers"]]
        if part["blockers"] and part.get("others_ms", 0.0) >= 0.1:
            lines.append(f"{'':17}{_time(part['others_ms']):>11}  others, and what is nobody's")
    return lines


def _timeline(timeline: list[list[Any]], total_ms: float, width: int) -> list[str]:
    """One row for each name, with bars where its time was."""
    room = max(width - 17, 20)
    lines = []
    for name in PART_NAMES:
        if not any(piece_name == name for piece_name, _, _ in timeline):
            continue
        row, at_ms = [" "] * room, 0.0
        for piece_name, _, ms in timeline:
            if piece_name == name and total_ms:
                first, last = at_ms / total_ms * room, (at_ms + ms) / total_ms * room
                cells = range(round(first), round(last))
                for cell in cells or [min(int(first), room - 1)]:
                    row[cell] = BAR if cells or row[cell] == BAR else _LESS_THAN_ONE
            at_ms += ms
        lines.append(f"  {name:<13}{''.join(row)}")
    end = _time(total_ms)
    lines.append(f"  {'':<13}0{end:>{room - 1}}")
    return lines


def _facts(explanation: Mapping[str, Any]) -> list[str]:
    lines = [""]
    cache = explanation["cache"]
    num_chunks = len(explanation["chunks"])
    lines.append(
        f"prompt: {cache['prompt_tokens']:,} tokens, {cache['cached_tokens']:,} of them from the cache, "
        f"in {num_chunks} chunk{'' if num_chunks == 1 else 's'}"
    )
    for lost in explanation["preemptions"]:
        lines.append(
            f"preempted {_time(lost['at_ms'])} after it came to its worker ({lost['mode']}, {lost['blocks']} blocks) "
            f"{_in_favour_of(lost['beneficiary'])}: {_CAUSES.get(lost['reason'], lost['reason'])}"
        )
    for worker in explanation["workers"]:
        lost = f", lost: {_CAUSES.get(worker['lost'], worker['lost'])}" if worker["lost"] else ""
        name = "no worker" if worker["worker"] is None else f"worker {worker['worker']} ({worker['replica']})"
        lines.append(name + lost)
    if "requests" in explanation:
        lines.append(f"the longest of {len(explanation['requests'])}: {', '.join(explanation['requests'])}")
    return lines


def _in_favour_of(beneficiary: str | None) -> str:
    return "as it could not grow and nobody else could make room" if beneficiary is None else f"for {beneficiary}"


def _time(ms: float) -> str:
    return f"{ms:,.1f} ms" if ms < 1000 else f"{ms / 1000:,.2f} s"
