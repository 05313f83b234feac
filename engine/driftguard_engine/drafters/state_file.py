"""The draft in service, kept over restarts in one small JSON file."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from driftguard_engine.config import InvalidConfig

FILE_NAME = "draft_in_service.json"
LOCK_NAME = "state.lock"  # not that of a spool, which may be in the same directory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedDraft:
    """`configured`: what the engine was started with; started with another value, it ignores this.
    `own_version`: of its files when they were read, whatever version the draft was given; None: not known, as
    in what an earlier engine saved."""

    configured: str
    directory: str | None
    version: str
    corpus: str | None = None
    own_version: str | None = None


def check_writable(state_dir: Path) -> None:
    """Raises InvalidConfig."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=state_dir):
            pass
    except OSError as error:
        raise InvalidConfig(f"state_dir: {state_dir} cannot be written to ({error})") from error


def lock_state(state_dir: Path) -> IO[bytes]:
    """Keeps the directory for this process until the returned file closes, as it does with `kill -9`.

    Where several engines shared one, the draft that one puts into service would serve from the others after a
    restart, and starts of all of them would count as those of one that ends again and again. Raises
    InvalidConfig: another one has it, or it cannot be written to.
    """
    check_writable(state_dir)
    try:
        file = (state_dir / LOCK_NAME).open("ab")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InvalidConfig(f"state_dir: another engine uses {state_dir}; give each its own") from None
    except OSError as error:
        raise InvalidConfig(f"state_dir: {state_dir} cannot be locked ({error})") from error
    return file


def save_draft(state_dir: Path, draft: SavedDraft) -> None:
    """Replaces the file atomically: after a crash it is the old one or the new one. Raises OSError."""
    state_dir.mkdir(parents=True, exist_ok=True)
    partial = state_dir / f".{FILE_NAME}.partial"  # fixed: the next save overwrites what a crash left
    with partial.open("w", encoding="utf-8") as file:
        json.dump(asdict(draft), file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(state_dir / FILE_NAME)
    _sync_directory(state_dir)


def saved_version(state_dir: Path) -> str | None:
    """Of the draft that was saved, whatever is configured now; None: no draft, or none that can be read."""
    try:
        return str(json.loads((state_dir / FILE_NAME).read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget_draft(state_dir: Path) -> None:
    """Raises OSError."""
    (state_dir / FILE_NAME).unlink(missing_ok=True)
    _sync_directory(state_dir)


def saved_draft(state_dir: Path, configured: str) -> SavedDraft | None:
    """The draft saved under this configuration; None, with the reason logged, where none is usable."""
    path = state_dir / FILE_NAME
    try:
        draft = SavedDraft(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        logger.error("%s cannot be read (%s); starting with the configured draft", path, error)
        return None
    if draft.configured != configured:
        logger.warning(
            "draft %s was in service before, but another one is configured now; serving the configured draft",
            draft.version,
        )
        return None
    return draft


def is_older(state_dir: Path, files: Iterable[Path]) -> bool:
    """Whether the draft in service was saved before one of these files was written."""
    try:
        saved_at = (state_dir / FILE_NAME).stat().st_mtime_ns
        return any(file.stat().st_mtime_ns > saved_at for file in files)
    except OSError:  # one that cannot be read is named where it is loaded
        return False


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
