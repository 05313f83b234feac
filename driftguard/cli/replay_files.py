"""The files that `driftguard replay` reads: records, logs of serving engines, the history in a Prometheus.

Records are numbered over all the input, so that an event can name one: the N-th line of records or of a log
(blank lines are not counted), the N-th window of a Prometheus' history.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final, TextIO

from driftguard.adapters import ReplayFormat, prometheus_history, sglang_log, vllm_log
from driftguard.adapters.condition import RECORDED
from driftguard.adapters.prometheus_history import NoHistory
from driftguard.adapters.window import Identity, Incomplete, Window
from driftguard.cli.plain import plain
from driftguard.records import AcceptanceRecord, RecordError, decode_record

Numbered = tuple[int, AcceptanceRecord | RecordError]  # the number is the record's place in its file

NOTHING_KNOWN: Final = Identity("")
STANDARD_INPUT: Final = Path("-")
MAX_LISTED_PROBLEMS: Final = 100


@dataclass(slots=True)
class Reader:
    """Numbers the records of the files; prints to `err` what could not be read, and counts it. `known`:
    values that logs and metrics lack; if its server is empty, the file's name or the instance is used."""

    err: TextIO
    format: ReplayFormat = "records"
    known: Identity = NOTHING_KNOWN
    lines: int = 0
    problems: int = 0

    def read(self, files: list[Path]) -> Iterator[tuple[int, AcceptanceRecord]]:
        return chain.from_iterable(map(self._file, files))

    def _file(self, path: Path) -> Iterator[tuple[int, AcceptanceRecord]]:
        name = "standard input" if path == STANDARD_INPUT else str(path)
        known = replace(self.known, server=self.known.server or path.stem)
        base = self.lines
        try:
            with nullcontext(sys.stdin.buffer) if path == STANDARD_INPUT else path.open("rb") as file:
                for number, found in _DECODERS[self.format](file, known):
                    self.lines = base + number
                    if isinstance(found, RecordError):
                        self._problem(f"{name}: {found}")
                    else:
                        yield base + number, found
        except OSError as error:
            self._problem(f"{name}: cannot be read ({error.strerror})")
        except (Incomplete, NoHistory) as error:
            self._problem(f"{name}: {error}")
        else:
            if self.format != "records" and self.lines == base:
                self._problem(f"{name}: {_NOTHING_FOUND[self.format]}")

    def tell_total(self) -> None:
        """Where anything was read at all: else the problems say it."""
        if self.problems and self.lines:
            print(f"{self.problems} of {self.lines} lines or files could not be read", file=self.err)
        if self.format == "records" and 0 < self.lines <= self.problems:
            print(_LOG_INSTEAD, file=self.err)

    def _problem(self, text: str) -> None:
        self.problems += 1
        if self.problems <= MAX_LISTED_PROBLEMS:
            print(plain(text), file=self.err)
        elif self.problems == MAX_LISTED_PROBLEMS + 1:
            print(f"more than {MAX_LISTED_PROBLEMS} problems; the rest are only counted", file=self.err)


def _records(file: BinaryIO, _: Identity) -> Iterator[Numbered]:
    number = 0
    for line, text in enumerate(file, start=1):
        if text.strip():
            number += 1
            try:
                yield number, decode_record(text, line=line)
            except RecordError as error:
                yield number, error


def _vllm_log(file: BinaryIO, known: Identity) -> Iterator[Numbered]:
    return _from_windows(vllm_log.windows(_text(file), datetime.now(UTC)), known)


def _sglang_log(file: BinaryIO, known: Identity) -> Iterator[Numbered]:
    return _from_windows(sglang_log.windows(_text(file), known.num_speculative_tokens), known)


def _prometheus(file: BinaryIO, known: Identity) -> Iterator[Numbered]:
    found = prometheus_history.windows(file.read(), known)
    for number, (instance, window) in enumerate(found, start=1):
        if window.condition in RECORDED:
            yield number, _record(window, replace(known, server=instance or known.server))


def _text(file: BinaryIO) -> Iterator[str]:
    return (line.decode(errors="replace") for line in file if line.strip())


def _from_windows(windows: Iterable[tuple[int, Window | RecordError]], known: Identity) -> Iterator[Numbered]:
    known = replace(known, target=known.target or "unknown")
    for number, found in windows:
        if isinstance(found, RecordError):
            yield number, found
        elif found.drafted:
            yield number, _record(found, known)


def _record(window: Window, known: Identity) -> AcceptanceRecord | RecordError:
    try:
        return window.record(known)
    except RecordError as error:
        return error


_DECODERS: Final[dict[ReplayFormat, Callable[[BinaryIO, Identity], Iterator[Numbered]]]] = {
    "records": _records,
    "vllm-log": _vllm_log,
    "sglang-log": _sglang_log,
    "prometheus": _prometheus,
}
_LOG_INSTEAD: Final = "the log of a server is read with --format vllm-log or --format sglang-log"
_NOTHING_FOUND: Final[dict[ReplayFormat, str]] = {
    "vllm-log": vllm_log.NOTHING_FOUND,
    "sglang-log": sglang_log.NOTHING_FOUND,
    "prometheus": prometheus_history.NOTHING_FOUND,
}
