"""Starts of a server with the draft in its state directory that no end of the server followed.

A draft that ends its process, while it is loaded or by a request, would end every next one too, which begins
with the same draft. An end on request, and a start that is refused with a reason, are not counted.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from driftguard_engine.drafters.state_file import forget_draft, saved_version

FILE_NAME = "unended_starts.json"
MOST = 3
WITHIN_SECONDS = 3_600.0

logger = logging.getLogger(__name__)


def begin(state_dir: Path, now: float) -> str | None:
    """Counts this start. Returns the version that is given up, so that the configured draft serves."""
    version = saved_version(state_dir)
    if version is None:
        return None
    path = state_dir / FILE_NAME
    starts = [at for at in _starts(path, version) if now - WITHIN_SECONDS < at <= now]
    try:
        if len(starts) < MOST:
            path.write_text(json.dumps({"version": version, "starts": [*starts, now]}), encoding="utf-8")
            return None
        forget_draft(state_dir)
    except OSError as error:
        logger.error("%s cannot be written to (%s): starts are not counted", state_dir, error)
        return None
    logger.error(
        "this server was started %d times within an hour with draft %s, and never ended on request: the "
        "draft may be what ended it, and is given up; serving the configured draft",
        MOST,
        version,
    )
    return version


def end(state_dir: Path) -> None:
    """The server that was started last has ended on request, or says why it does not start."""
    try:
        (state_dir / FILE_NAME).unlink(missing_ok=True)
    except OSError as error:
        logger.error("%s cannot be written to (%s): this end is not counted as one", state_dir, error)


def _starts(path: Path, version: str) -> list[float]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return [float(at) for at in found["starts"]] if found["version"] == version else []
    except (OSError, ValueError, TypeError, KeyError):  # none yet, or half a file after a crash
        return []
