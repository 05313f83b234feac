"""How the engine's process logs: structlog on stderr, readable on a terminal and logfmt elsewhere."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog
from structlog.typing import EventDict, Processor

from driftguard.masking import MaskingFormatter, Secrets, secrets_of_url

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
SECRET_VARIABLES: Final = ("DRIFTGUARD_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# Proxies to the sidecar and the hub; httpx and the hub's client read both spellings.
ADDRESS_VARIABLES: Final = ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


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


def configure_logs(level: str, secrets: Secrets) -> None:
    """level: a key of LEVELS. What is logged, by libraries too, has `secrets` masked."""

    def mask(_: object, __: str, event: EventDict) -> EventDict:
        # Before rendering, which would escape a value a second time; numbers hold no secret.
        return {
            name: value if isinstance(value, int | float | None) else secrets.masked(str(value))
            for name, value in event.items()
        }

    render: Processor = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"])
    if sys.stderr.isatty():
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
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # a line and its end at once
        cache_logger_on_first_use=True,
    )
    # uvicorn and the libraries use logging; only their warnings matter to an operator
    logging.basicConfig(level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(MaskingFormatter(secrets, "%(asctime)s %(levelname)s %(name)s %(message)s"))
