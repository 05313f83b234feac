"""A first-in first-out queue of JSON lines in small segment files, bounded in bytes.

Appending is one write to the page cache: it survives kill -9 of the process, not a loss of power.
"""

from __future__ import annotations

import fcntl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog

log = structlog.get_logger("driftguard_engine.spool")

SEGMENT_LINES = 500
SEGMENT_BYTES = 1_000_000
SUFFIX = ".jsonl"


class SpoolError(Exception):
    """{directory}: cannot be used as a spool directory ({why})"""


@dataclass(slots=True)
class Segment:
    """Consecutive lines. `content` holds them where there is no file; nothing is appended to a closed one."""

    path: Path | None
    lines: int
    size_bytes: int
    content: list[bytes] | None = None
    closed: bool = False


class Spool:
    """Oldest first. One thread only. Without a directory (or when it cannot be written) lines stay in memory.

    Invariant: an appended line leaves by `remove` or is counted in a return value of `append`.
    """

    def __init__(self, directory: Path | None, *, max_bytes: int) -> None:
        """Takes over the segments that an earlier process left. Raises SpoolError."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._segments: deque[Segment] = deque()
        self._taken: Segment | None = None
        self._next_number = 0
        self._writable = True
        self.lines = 0
        self.size_bytes = 0
        self.written_lines = 0  # ever written to disk by this process
        if directory is not None:
            self._load(directory)

    def append(self, lines: Sequence[bytes]) -> int:
        """Adds lines (without newline) at the end; returns how many old ones were dropped to make room."""
        self.save()
        start = 0
        while start < len(lines):
            segment = self._tail()
            end = min(len(lines), start + SEGMENT_LINES - segment.lines)
            self._write(segment, lines[start:end])
            start = end
        return self._drop_oldest()

    def save(self) -> None:
        """Writes to disk what had to stay in memory, as far as that is possible now."""
        if self._directory is None:
            return
        for segment in self._segments:
            if segment.content is None:
                continue
            path = self._directory / f"{self._next_number:012d}{SUFFIX}"
            try:
                path.write_bytes(b"\n".join(segment.content) + b"\n")
            except OSError:
                _is_removed(path)  # half of it may be there
                return
            self._writable = True
            self._next_number += 1
            self.written_lines += segment.lines
            segment.path, segment.content = path, None

    def take(self) -> Segment | None:
        """The oldest segment, closed for appending, or None. It stays here until `remove`."""
        if not self._segments:
            return None
        self._taken = self._segments[0]
        self._taken.closed = True
        return self._taken

    def read(self, segment: Segment) -> list[bytes]:
        """Its lines. Raises OSError when the file is gone."""
        if segment.path is None:
            return list(segment.content or ())
        return segment.path.read_bytes().split(b"\n")[: segment.lines]

    def remove(self, segment: Segment) -> bool:
        """False: its file stays, because it cannot be removed. The next start sends it again, which is
        idempotent."""
        self._segments.remove(segment)
        self.lines -= segment.lines
        self.size_bytes -= segment.size_bytes
        return segment.path is None or _is_removed(segment.path)

    def lines_in_memory(self) -> int:
        """Lines that would be lost if the process ended now."""
        return sum(segment.lines for segment in self._segments if segment.path is None)

    def clear(self) -> int:
        """Forgets all lines and erases them; returns how many were erased: not those in a file that stays."""
        return sum(segment.lines for segment in list(self._segments) if self.remove(segment))

    def _load(self, directory: Path) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            paths = sorted(directory.glob(f"*{SUFFIX}"))
            for path in paths:
                self._load_segment(path)
        except OSError as error:
            raise SpoolError(f"{directory}: cannot be used as a spool directory ({error})") from error
        numbers = [int(path.stem) for path in paths if path.stem.isdigit()]
        self._next_number = max(numbers, default=-1) + 1

    def _load_segment(self, path: Path) -> None:
        content = path.read_bytes()
        whole, newline, torn = content.rpartition(b"\n")
        if torn:
            log.warning("the last line of a spool file is torn and is left out", file=str(path))
        if not newline:
            path.unlink()
            return
        segment = Segment(path, whole.count(b"\n") + 1, len(whole) + 1, closed=True)
        self._segments.append(segment)
        self.lines += segment.lines
        self.size_bytes += segment.size_bytes

    def _tail(self) -> Segment:
        if self._segments:
            last = self._segments[-1]
            if not last.closed and last.lines < SEGMENT_LINES and last.size_bytes < SEGMENT_BYTES:
                return last
        path = None
        if self._directory is not None:
            path = self._directory / f"{self._next_number:012d}{SUFFIX}"
            self._next_number += 1
        segment = Segment(path, 0, 0, content=[] if path is None else None)
        self._segments.append(segment)
        return segment

    def _write(self, segment: Segment, lines: Sequence[bytes]) -> None:
        if segment.path is not None:
            try:
                with segment.path.open("ab") as file:
                    file.write(b"\n".join(lines) + b"\n")
                self._writable = True
                self.written_lines += len(lines)
            except OSError as error:
                segment = self._fall_back_to_memory(segment, error)
        if segment.content is not None:
            segment.content.extend(lines)
        size = sum(map(len, lines)) + len(lines)
        segment.lines += len(lines)
        segment.size_bytes += size
        self.lines += len(lines)
        self.size_bytes += size

    def _fall_back_to_memory(self, segment: Segment, error: OSError) -> Segment:
        if self._writable:
            log.warning("the spool cannot be written; lines stay in memory", error=str(error))
        self._writable = False
        if segment.lines == 0:
            self.remove(segment)
        segment.closed = True  # a failed write may have left half a line behind the counted ones
        memory = Segment(None, 0, 0, content=[])
        self._segments.append(memory)
        return memory

    def _drop_oldest(self) -> int:
        dropped = 0
        # The head may be on its way to the sidecar, and the newest has just been written: neither is dropped.
        first = 1 if self._segments and self._segments[0] is self._taken else 0
        while self.size_bytes > self._max_bytes and len(self._segments) > first + 1:
            oldest = self._segments[first]
            dropped += oldest.lines
            self.remove(oldest)
        return dropped


def _is_removed(path: Path) -> bool:
    try:
        if path.exists():  # a read-only file system refuses to remove what is not there, too
            path.unlink(missing_ok=True)
    except OSError as error:
        log.error("a spool file cannot be removed; the next start finds it", file=str(path), error=str(error))
        return False
    return True


def lock_directory(directory: Path) -> IO[bytes]:
    """Locks the directory for this process until the returned file closes (kill -9 closes it too).

    Raises SpoolError: it cannot be made, or another engine has it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (directory / "lock").open("ab")
    except OSError as error:
        raise SpoolError(f"{directory}: cannot be used as a spool directory ({error})") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise SpoolError(f"spool_dir: another engine uses {directory}; give each its own") from None
    return file
