"""`make demo`: serves the demo model, asks it one question over HTTP, prints the answer as it streams, stops.

Uses the server as any client would; knows nothing of its inside.
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

QUESTION = "What is the capital of France?"
_STOP_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 120.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deployments.cli.demo", description=__doc__)
    parser.add_argument("--model", default="demo", help="demo, a folder, or a Hub id (default: %(default)s)")
    parser.add_argument("--question", default=QUESTION, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    command = [sys.executable, "-m", "deployments.cli.main", "serve", "--model", args.model]
    command += ["--served-model-name", "demo", "--port", str(_free_port()), "--metrics-port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = _url_of(server)
        if url is None:
            return server.wait()
        print(f"\n> {args.question}\n", flush=True)
        for text in _answer(url, args.question, args.max_tokens):
            print(text, end="", flush=True)
        print("\n", flush=True)
    except KeyboardInterrupt:
        return 130
    finally:
        _stop(server)
    return server.returncode


def _url_of(server: "subprocess.Popen[str]") -> str | None:
    """The base URL, once the server has printed it; None if it ended before."""
    assert server.stdout is not None
    line = server.stdout.readline().strip()
    return line.rpartition(" ")[2] or None


def _answer(url: str, question: str, max_tokens: int) -> Iterator[str]:
    """The pieces of text as the server sends them. Raises RuntimeError for an error that it sends instead."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data in ("", "[DONE]"):
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


def _stop(server: "subprocess.Popen[str]") -> None:
    """As Ctrl-C would: the server takes down all that it started."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    sys.exit(main())
