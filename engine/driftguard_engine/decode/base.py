"""What every decoder does in a step, and what a step gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from driftguard_engine.sequence import RunningSequence


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What one verification gave one sequence: accepted + 1 tokens, or the reason why it gave none."""

    emitted: list[int]
    drafted: int
    accepted: int
    error: str | None = None


class StepDecoder(Protocol):
    """Runs one verification per step for each of any rows."""

    @property
    def in_flight(self) -> bool:
        """Is there an outcome that nobody has been told yet?"""
        ...

    def admit(self, row: RunningSequence) -> None:
        """The row's prompt is about to be read; it will be decoded."""
        ...

    def forget(self, row: RunningSequence) -> None:
        """The row has left."""
        ...

    def reset(self) -> None:
        """After a failure: outcomes that nobody has been told are given up."""
        ...

    def step(
        self, rows: Sequence[RunningSequence], draft_counts: Sequence[int]
    ) -> list[tuple[RunningSequence, RowOutcome]]:
        """Decodes these rows, each with so many draft tokens, at most its `draft_count`. Returns what has
        become known of rows that have not left: of this step or the one before."""
        ...
