"""How every process of DriftGuard logs."""

from __future__ import annotations

import logging
import os
import sys
from typing import Final, TextIO, cast

import structlog

from driftguard.masking import MaskingFormatter, Secrets, UnfailingStream

_NONE: Final = Secrets([])


def configure_logging(level: str, secrets: Secrets = _NONE) -> None:
    """Masks `secrets` in complete lines, of DriftGuard and of libraries, tracebacks included: after that,
    nothing is added to a line."""
    # The default prints local variables in tracebacks, which may contain keys and token ids.
    render = structlog.dev.ConsoleRenderer(
        colors=sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR"),
        exception_formatter=structlog.dev.plain_traceback,
    )

    def render_masked(logger: object, name: str, event: structlog.typing.EventDict) -> str:
        return secrets.masked(render(logger, name, event))

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            render_masked,
        ],
        # Writes a line and its end at once, also where Python does not buffer: processes share the file.
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", UnfailingStream(lambda: sys.stdout))),
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
    )
    logging.basicConfig(level=max(logging.WARNING, getattr(logging, level.upper())))
    for handler in logging.getLogger().handlers:
        handler.setFormatter(MaskingFormatter(secrets, logging.BASIC_FORMAT))
