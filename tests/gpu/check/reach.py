"""One goal of the engine, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from tests.gpu.check.tables import NOT_YET


@dataclass(frozen=True, slots=True)
class Reach:
    what: str
    reach: str
    measured: str = NOT_YET
    met: bool | None = None  # None: not measured, or not all of it

    @property
    def verdict(self) -> str:
        return {True: "met", False: "not met", None: NOT_YET}[self.met]
