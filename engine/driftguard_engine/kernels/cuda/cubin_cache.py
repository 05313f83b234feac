"""Compiled kernels on disk: one file for each source, set of options, architecture, compiler and driver.

A file is the SHA-256 of a cubin followed by the cubin, so that a truncated or damaged file is not loaded.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from driftguard_engine.kernels.cuda.compiler import OPTIONS, Source, compile_source, nvrtc_version

CACHE_VARIABLE = "DRIFTGUARD_CACHE_DIR"

logger = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size


def cache_directory() -> Path | None:
    """`DRIFTGUARD_CACHE_DIR`, else `driftguard` in the user's cache. None where the user has no home."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named) / "kernels"
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - never raises
    return Path(user) / "driftguard" / "kernels" if Path(user).is_absolute() else None


def cubin(source: Source, architecture: str, driver_version: int, directory: Path | None) -> bytes:
    """The cubin from the directory, or compiled and stored there. A failure to store it is only logged.

    driver_version: as cuDriverGetVersion counts. Raises KernelsUnavailable, CompilationFailed.
    """
    path = directory and directory / f"{_key(source, architecture, driver_version)}.cubin"
    kept = path and _read(path)
    if kept:
        return kept
    built = compile_source(source, architecture).cubin
    if path is None:
        logger.warning("compiled kernels are not kept: no home directory; set %s", CACHE_VARIABLE)
    else:
        _write(path, built)
    return built


def _key(source: Source, architecture: str, driver_version: int) -> str:
    parts = [architecture, nvrtc_version(), str(driver_version), *OPTIONS, source.name, source.text]
    parts += [part for header in source.headers for part in header]
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("compiled kernel %s cannot be read (%s): compiling it again", path, error)
        return None
    digest, kept = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(kept).digest() == digest:
        return kept
    logger.warning("compiled kernel %s is damaged: compiling it again", path)
    return None


def _write(path: Path, built: bytes) -> None:
    """Writes the file atomically: another process may read or write the same file now."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(hashlib.sha256(built).digest() + built)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        logger.warning(
            "compiled kernels cannot be kept in %s (%s), so every start compiles them: set %s to a directory"
            " that can be written",
            path.parent,
            error,
            CACHE_VARIABLE,
        )
