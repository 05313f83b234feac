"""How every process of DriftGuard logs."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging(level: str) -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            # The default shows local variables of a traceback, and keys and token ids could be among them.
            structlog.dev.ConsoleRenderer(
                colors=sys.stdout.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
    )
    logging.basicConfig(level=max(logging.WARNING, getattr(logging, level.upper())))
