"""How the engine's process logs: structlog on stderr, readable on a terminal and logfmt elsewhere."""

from __future__ import annotations

import logging
import os
import sys

import structlog
from structlog.typing import Processor

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure_logs(level: str) -> None:
    """level: a key of LEVELS."""
    render: list[Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
    ]
    if sys.stderr.isatty():
        render = [structlog.dev.ConsoleRenderer()]
    else:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when transformers is imported
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # uvicorn and the libraries speak through logging; only their warnings matter to an operator
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
