"""The serving options of `stallfree serve` by the names of `AppArgs`. Owns their texts, no rule about values."""

import argparse
from typing import Any, get_args

from deployments.cli.options import whole_number
from deployments.tool_calls.names import ReasoningParserName, ToolCallParserName

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Options that are not given leave no trace in the namespace, so that a configuration file can fill them in."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML: a Serve config with one application, or options by name; "
        "the command line goes before it")  # fmt: skip
    add("--address", metavar="ADDRESS", help="a running Ray cluster (default: start Ray on this machine)")
    add("--host", metavar="HOST", help=f"where to listen (default: {DEFAULT_HOST})")
    add("--port", type=whole_number, metavar="PORT", help=f"(default: {DEFAULT_PORT})")
    _add_replicas(parser.add_argument_group("replicas"))
    _add_requests(parser.add_argument_group("requests"))
    _add_access(parser.add_argument_group("access"))
    _add_time_limits(parser.add_argument_group("time limits"))
    _add_tracing(parser.add_argument_group("tracing"))


def _add_replicas(group: Any) -> None:
    _add_count(group, "num_workers", 1, "replicas of the model; between the bounds below, how many there are at first")
    _add_count(group, "min_workers", None, "least replicas, between which and the most an autoscaler chooses "
               "(default: --num-workers)")  # fmt: skip
    _add_count(group, "max_workers", None, "most replicas (default: --num-workers)")
    _add_seconds(group, "target_queue_s", 2, "add workers where waiting prompts would take the present ones longer")
    _add_seconds(group, "scale_up_delay_s", 10, "how long more workers must have been wanted")
    _add_seconds(group, "scale_down_delay_s", 300, "how long fewer workers must have been wanted")
    _add_count(group, "num_ingress", 1, "replicas of the HTTP API")
    group.add_argument("--metrics-host", metavar="HOST", help="where to listen for scrapes (default: 127.0.0.1)")
    _add_count(group, "metrics_port", 9400, "0: no scrape port", "PORT")
    group.add_argument("--vllm-metric-names", action="store_true", help="metrics under vLLM's names, too")
    group.add_argument("--request-log", metavar="FILE", help="a line of JSON for each ended request; off: none "
        "(default: in Serve's log of the HTTP API's replica)")  # fmt: skip


def _add_requests(group: Any) -> None:
    add = group.add_argument
    add("--served-model-name", metavar="NAME", help="what clients call the model (default: as in --model)")
    add("--chat-template", metavar="FILE", help="a Jinja template in place of the model's own")
    add("--tool-call-parser", choices=get_args(ToolCallParserName), help="how the model writes tool calls (default: "
        "auto, by its chat template)")  # fmt: skip
    add("--reasoning-parser", choices=get_args(ReasoningParserName), help="think: answers may begin with reasoning "
        "between <think> tags (default: auto, by the chat template)")  # fmt: skip
    _add_count(group, "max_n", 64, "most answers to one prompt: bounds n, best_of and beam_width")
    _add_count(group, "most_urgent_priority", -100, "no request is more urgent, whatever it asks; lower is more urgent",
               "P")  # fmt: skip
    add("--tenant-header", metavar="NAME", help="HTTP header whose value is the tenant, for --queue-policy fair "
        "(default: none, all requests are one tenant's)")  # fmt: skip
    _add_count(group, "max_queued_tokens", None, "prompt tokens that may wait at one worker before it answers 429; 0: "
               "any (default: 128 x the token budget of a step)")  # fmt: skip
    _add_count(group, "max_queued_requests", 1024, "requests that may wait at one worker before it answers 429; 0: any")
    _add_count(group, "max_open_requests", 4096, "calls that may be open at one ingress replica; 0: any")


def _add_access(group: Any) -> None:
    add = group.add_argument
    add("--api-key-file", metavar="FILE", help="JSON or YAML list of keys, each {key, tenant, admin, weight, "
        "max_priority}; every route but /health, /ready and /dashboard then wants one (default: STALLFREE_API_KEYS, "
        "the same list; else none)")  # fmt: skip
    add("--cors-origin", metavar="ORIGINS", help="origins whose web pages may ask, separated by commas; * for all "
        "(default: none)")  # fmt: skip


def _add_tracing(group: Any) -> None:
    group.add_argument("--otlp-endpoint", metavar="URL", help="send OpenTelemetry spans of each request's time there, "
                       "as http://HOST:4318/v1/traces; needs the extra `tracing` (default: none)")  # fmt: skip


def _add_time_limits(group: Any) -> None:
    _add_seconds(group, "request_timeout_s", 0, "no request takes longer, whatever its timeout says; 0: no limit")
    _add_seconds(group, "keep_alive_s", 15, "a stream gets a comment whenever it was silent for so long; 0: off")
    _add_seconds(group, "stall_timeout_s", 5, "a worker silent for so long has failed")
    _add_seconds(group, "step_timeout_s", 60, "a step that runs so long is stuck")
    _add_seconds(group, "accept_timeout_s", 30, "until a worker takes a request in")
    _add_seconds(group, "drain_timeout_s", 20, "time for running answers at the end")
    _add_seconds(group, "drain_grace_s", None, "answers of a worker that is told to stop go on elsewhere after so long "
                 "(default: 10, or half of --drain-timeout-s)")  # fmt: skip


def _add_count(group: Any, name: str, default: float | None, help_text: str, metavar: str = "N") -> None:
    _add(group, name, default, help_text, whole_number, metavar)


def _add_seconds(group: Any, name: str, default: float | None, help_text: str) -> None:
    _add(group, name, default, help_text, float, "S")


def _add(group: Any, name: str, default: float | None, help_text: str, kind: Any, metavar: str) -> None:
    """`default` is shown alone, since a file may hold another value: `AppArgs` has the rule (a test compares)."""
    if default is not None:
        help_text += f" (default: {default:g})"
    group.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=help_text)
