"""SHA256SUMS of a model directory: digests of its files, in the format that `sha256sum -c` verifies."""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path

from driftguard_engine.core import InvalidModel

FILE_NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\0]+)")

logger = logging.getLogger(__name__)


def verify(directory: Path, *, field: str) -> None:
    """Verifies every file that is listed, and that all weights are listed. Directories of other makers often
    have no list: that is logged. Raises InvalidModel, which names the file.
    """
    if not (directory / FILE_NAME).is_file():
        logger.info("%s: %s has no %s; its files are not verified", field, directory, FILE_NAME)
        return
    listed = _listed(directory, field)
    unlisted = [path.name for path in directory.glob("*.safetensors") if path.name not in listed]
    if unlisted:
        raise InvalidModel(f"{field}: {directory / min(unlisted)} is not in {FILE_NAME}", field=field)
    for name, wanted in listed.items():
        found = _digest(directory / name, field)
        if found != wanted:
            raise InvalidModel(
                f"{field}: {directory / name} was changed or is damaged: its SHA-256 is {found[:12]}..., "
                f"{FILE_NAME} lists {wanted[:12]}...",
                field=field,
            )


def _listed(directory: Path, field: str) -> dict[str, str]:
    """File name -> SHA-256 digest in hex."""
    listed: dict[str, str] = {}
    try:
        lines = (directory / FILE_NAME).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidModel(
            f"{field}: {directory / FILE_NAME} cannot be read ({error})", field=field
        ) from None
    for number, line in enumerate(lines, start=1):
        found = _LINE.fullmatch(line)
        if found is None:
            raise InvalidModel(
                f"{field}: {directory / FILE_NAME}, line {number}: not a SHA-256 and a file's name",
                field=field,
            )
        listed[found[2]] = found[1]
    return listed


def _digest(path: Path, field: str) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        reason = f"is in {FILE_NAME} and cannot be read ({error.strerror})"
        raise InvalidModel(f"{field}: {path} {reason}", field=field) from None
