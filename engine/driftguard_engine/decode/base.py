"""The interface of a decoder, and the outcome of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from driftguard_engine.sequence import RunningSequence


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """The outcome of one verification for one sequence: accepted + 1 tokens, or why there are none."""

    emitted: list[int]
    drafted: int
    accepted: int
    error: str | None = None


class StepDecoder(Protocol):
    """Runs one verification per step for each row that it is given."""

    @property
    def in_flight(self) -> bool:
        """Whether a step has been launched whose outcome `step` has not returned yet."""
        ...

    def admit(self, row: RunningSequence) -> None:
        """The row's prompt is about to be read; it will be decoded."""
        ...

    def forget(self, row: RunningSequence) -> None:
        """The row has left."""
        ...

    def reset(self) -> None:
        """After a failure: gives up the outcomes that `step` has not returned yet."""
        ...

    def step(
        self, rows: Sequence[RunningSequence], draft_counts: Sequence[int]
    ) -> list[tuple[RunningSequence, RowOutcome]]:
        """Decodes these rows with the given numbers of draft tokens, each at most the row's `draft_count`.

        Returns the outcomes of this step or of the one before, for rows that have not left.
        """
        ...
