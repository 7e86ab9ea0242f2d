"""`stallfree explain`: asks a server why a request took as long as it did, and draws the answer.

Owns the command's options and what it says when the server does not answer. The text is `explain_table.py`'s.
"""

import argparse
import json
import shutil
import sys
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from deployments.cli.options import EXIT_FAILED, OneLineParser, UsageError, error_line

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 15.0

_DESCRIPTION = """\
Where the time of a request went: what it waited for, what other requests added, and who they were. The id is that of
the answer's body, or its x-request-id. Requests that are still running are explained as far as they have come."""


def add_parser(subparsers: "argparse._SubParsersAction[OneLineParser]") -> OneLineParser:
    parser = subparsers.add_parser(
        "explain", help="say why a request took as long as it did", description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("id", metavar="ID", help="of the answer, or its x-request-id")
    parser.add_argument(
        "--url", default=DEFAULT_URL, help=f"of the server, with or without /v1 (default: {DEFAULT_URL})"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the request's own, or an admin's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    url = f"{args.url.rstrip('/').removesuffix('/v1')}/v1/requests/{quote(args.id, safe='')}/explain"
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise UsageError("--url", "must begin with http:// or https:// and name a host")
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    try:
        with urlopen(Request(url, headers=headers), timeout=_TIMEOUT_S) as response:
            explanation: dict[str, Any] = json.load(response)
    except HTTPError as error:
        with error:
            return _failed(_reason(error))
    except (OSError, HTTPException, ValueError) as error:
        return _failed(f"{args.url} does not answer as it should: {error}")
    if args.json:
        print(json.dumps(explanation))
    else:
        from deployments.cli.explain_table import explanation_text

        sys.stdout.write(explanation_text(explanation, shutil.get_terminal_size().columns))
    return 0


def _reason(error: HTTPError) -> str:
    """The server's own words where it has some."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code}"


def _failed(message: str) -> int:
    sys.stderr.write(error_line(message))
    return EXIT_FAILED
