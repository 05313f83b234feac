"""What a part of a check is given, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.check import rows
from tests.gpu.check.rows import Checked, Findings, LeftOut, Row

NO_DEVICE, DEVICE_LOST, FAILED = 2, 3, 4  # 1: Python itself gave up

started = time.monotonic()


class NoDevice(Exception):
    """{detail}: why nothing can be checked on a GPU here."""


@dataclass(slots=True)
class Run:
    """What a part is given. path: of the rows of the whole run, to which it adds its own."""

    path: Path
    end: float  # by time.monotonic
    failed: bool = field(default=False, init=False)

    def add(self, row: Row) -> None:
        """Keeps the row."""
        self.failed |= isinstance(row, Checked) and row.failed
        rows.append(self.path, row)

    def say(self, line: str) -> None:
        print(f"  [{time.monotonic() - started:5.1f} s] {line}", flush=True)

    def found(self) -> Findings:
        """All rows of the run so far, those of other parts too."""
        return rows.read(self.path)

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def late(self, what: str) -> bool:
        """True: the time is over, and `what` is named as left out."""
        if self.seconds_left > 0:
            return False
        self.add(LeftOut(what))
        self.say(f"left out: {what}")
        return True

    @contextmanager
    def row(self, what: str, *failures: type[Exception]) -> Iterator[None]:
        """Reports these failures of one row, and goes on with the next."""
        try:
            yield
        except failures as problem:
            self.fail(what, problem)

    def fail(self, what: str, problem: Exception) -> None:
        told = (
            f"{type(problem).__name__}: {str(problem).strip().splitlines()[0][:400] if str(problem) else ''}"
        )
        self.add(Checked(what, told, failed=True))
        self.say(f"{what} FAILED: {told}")
