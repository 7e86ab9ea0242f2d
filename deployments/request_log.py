"""`RequestLog`: a line of JSON for each ended request, at INFO: whose it was, its tokens, its times, how it ended.

Owns the shape of the line and where it goes. No text of a prompt or an answer is ever in it.
"""

import json
import logging
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler

from deployments.answer_meter import EndedRequest
from deployments.replica_log import SERVE_LOGGER

#: in place of a file: no lines
OFF = "off"


class RequestLog:
    """`logger` None: nothing is written. `file`: the logger's own."""

    def __init__(
        self, logger: logging.Logger | None = None, model: str = "", file: logging.Handler | None = None
    ) -> None:
        self._logger = logger
        self._file = file
        self._model = model

    def ended(self, request_id: str, request: EndedRequest, num_cached_tokens: int) -> None:
        """`num_cached_tokens`: of the prompt, from the prefix cache."""
        if self._logger is None or not self._logger.isEnabledFor(logging.INFO):
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "event": "request",
            "id": request_id,
            "model": self._model,
            "tenant": request.tenant,
            "finish_reason": request.finish_reason,
            "prompt_tokens": request.num_prompt_tokens,
            "cached_tokens": num_cached_tokens,
            "completion_tokens": request.num_generated_tokens,
            "ttft_ms": _ms(request.ttft_s),
            "time_per_token_ms": _ms(request.time_per_token_s),
            "e2e_ms": _ms(request.e2e_s),
        }
        self._logger.info("%s", json.dumps(line))

    def close(self) -> None:
        """Of a file of its own; Serve's log is Serve's."""
        if self._file is not None:
            self._file.close()


NO_LOG = RequestLog()


def open_request_log(target: str | None, model: str) -> RequestLog:
    """`target`: a file that lines are added to, and that may be moved away at any time; `off`; None: Serve's log of
    this process. Raises OSError where the file cannot be written."""
    if target == OFF:
        return NO_LOG
    if target is None:
        return RequestLog(logging.getLogger(SERVE_LOGGER), model)
    handler = WatchedFileHandler(target, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.Logger("stallfree.requests", logging.INFO)
    logger.addHandler(handler)
    return RequestLog(logger, model, handler)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
