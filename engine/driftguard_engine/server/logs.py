"""How the engine's process logs: structlog on stderr, readable on a terminal and logfmt elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO, cast

import structlog
from structlog.typing import EventDict, Processor

from driftguard.masking import MaskingFormatter, Secrets, UnfailingStream, secrets_of_url

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
SECRET_VARIABLES: Final = ("DRIFTGUARD_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# Proxies to the sidecar and the hub; httpx and the hub's client read both spellings.
ADDRESS_VARIABLES: Final = ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
MOST_ALIKE: Final = 10  # lines of one kind in a minute
MINUTE_SECONDS: Final = 60.0


def secrets_of(environment: Mapping[str, str], sidecar: str | None, api_key_hash: str | None) -> Secrets:
    """Every secret that the engine receives: from its options, its environment, and the hub's token file."""
    return Secrets(_secrets(environment, sidecar, api_key_hash))


def _secrets(environment: Mapping[str, str], sidecar: str | None, api_key_hash: str | None) -> Iterator[str]:
    yield from (environment.get(name, "") for name in SECRET_VARIABLES)
    yield api_key_hash or ""
    yield from secrets_of_url(sidecar or "")
    for name in ADDRESS_VARIABLES:
        yield from secrets_of_url(environment.get(name, ""))
        yield from secrets_of_url(environment.get(name.lower(), ""))
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{caches}/huggingface"
    with suppress(OSError, UnicodeDecodeError, RuntimeError):  # most users have no such file
        yield Path(environment.get("HF_TOKEN_PATH") or f"{home}/token").expanduser().read_text().strip()


class FloodFilter(logging.Filter):
    """Lets MOST_ALIKE lines of one kind through in a minute, and the next that is let through says how many
    were left out.

    What fails in one step may fail in every step, for each request. A kind is a message without its values.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._ends_at = clock() + MINUTE_SECONDS
        self._seen: dict[tuple[str, str], int] = {}
        self._left_out: dict[tuple[str, str], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.name, str(record.msg)
        with self._lock:  # a handler asks its filters before it takes its own
            if self._clock() >= self._ends_at:
                self._ends_at = self._clock() + MINUTE_SECONDS
                many = {kind: seen for kind, seen in self._seen.items() if seen > MOST_ALIKE}
                self._left_out |= {kind: seen - MOST_ALIKE for kind, seen in many.items()}
                self._seen = {}
            seen = self._seen[kind] = self._seen.get(kind, 0) + 1
            left_out = self._left_out.pop(kind, 0)
        if left_out:
            record.msg = f"{record.msg} ({left_out} more of this kind were not logged)"
        return seen <= MOST_ALIKE


def configure_logs(level: str, secrets: Secrets) -> None:
    """level: a key of LEVELS. What is logged, by libraries too, has `secrets` masked."""

    def mask(_: object, __: str, event: EventDict) -> EventDict:
        # Before rendering, which would escape a value a second time; numbers hold no secret.
        return {
            name: value if isinstance(value, int | float | None) else secrets.masked(str(value))
            for name, value in event.items()
        }

    render: Processor = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"])
    if sys.stderr is not None and sys.stderr.isatty():
        render = structlog.dev.ConsoleRenderer(
            colors=not os.environ.get("NO_COLOR"), exception_formatter=structlog.dev.plain_traceback
        )
    else:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when transformers is imported
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            mask,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        # Writes a line and its end at once.
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", UnfailingStream(lambda: sys.stderr))),
        cache_logger_on_first_use=True,
    )
    # uvicorn and the libraries use logging; only their warnings matter to an operator
    logging.basicConfig(level=logging.WARNING)
    flood = FloodFilter()
    for handler in logging.getLogger().handlers:
        handler.addFilter(flood)
        handler.setFormatter(MaskingFormatter(secrets, "%(asctime)s %(levelname)s %(name)s %(message)s"))
