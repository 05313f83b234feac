"""The files of a candidate draft, as the training wrote them: SHA256SUMS, and the digest of that list.

The list is in the directory of the files. Its own digest is stored with the run, so that a file that was
changed together with the list is detected too.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

from driftguard.errors import DriftGuardError

FILE_NAME: Final = "SHA256SUMS"
_LINE: Final = re.compile(r"([0-9a-f]{64}) [ *]([^/\0]+)")


class DraftChanged(DriftGuardError):
    """The files of a draft are not those that the training wrote; the message names the file."""

    status = 409
    title = "Draft changed"


def digest_of_list(directory: Path) -> str:
    """The digest of a new draft's list. Raises DraftChanged: there is no list."""
    return _digest(directory / FILE_NAME)


def verify(directory: Path, digest: str | None = None) -> None:
    """Raises DraftChanged: a file differs from the list or is missing, or the list does not have the `digest`
    given.
    """
    if digest is not None and digest_of_list(directory) != digest:
        raise DraftChanged(f"{directory / FILE_NAME} is not the list that the training wrote")
    for name, wanted in _listed(directory).items():
        if _digest(directory / name) != wanted:
            raise DraftChanged(f"{directory / name} is not as the training wrote it ({FILE_NAME})")


def verify_if_known(directory: Path, digest: str | None) -> None:
    """As `verify`, where there is anything to verify by: the digest of a list, or a list."""
    path = directory / FILE_NAME
    if digest is None:
        try:
            path.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unreadable(path, error.strerror) from None
    verify(directory, digest)


def _listed(directory: Path) -> dict[str, str]:
    """File name -> SHA-256 digest in hex."""
    path = directory / FILE_NAME
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    found = [_LINE.fullmatch(line) for line in lines]
    listed = {match[2]: match[1] for match in found if match is not None}
    if len(listed) != len(lines) or not any(name.endswith(".safetensors") for name in listed):
        raise DraftChanged(f"{path} is no list of a model's files")
    return listed


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error.strerror) from None


def _unreadable(path: Path, reason: object) -> DraftChanged:
    return DraftChanged(f"{path} cannot be read ({reason})")
