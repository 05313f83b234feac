"""The outcome of a retraining, and its progress while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from driftguard.records.documents.retraining_run import RunNumbers

Ending = Literal["promoted", "rolling_out", "nothing_to_do", "rejected", "failed"]
Trigger = Literal["incident", "nightly", "manual"]
Stage = Literal["collecting", "training", "evaluating", "promoting"]

EXIT_CODES: Mapping[Ending, int] = {
    "promoted": 0,
    "rolling_out": 0,
    "failed": 1,
    "nothing_to_do": 3,
    "rejected": 4,
}


@dataclass(frozen=True, slots=True)
class RetrainOutcome:
    """How one retraining ended. `reason` is one line for a person; `numbers` are those behind the decision.

    rolling_out: the engine restarts with the new draft; its records will show whether that succeeded.
    `waits_for_traffic`: nothing was done only because more traffic has to be captured first.
    """

    state: Ending
    reason: str
    numbers: RunNumbers | None = None
    run_id: UUID | None = None
    waits_for_traffic: bool = False

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of a running retraining. step of steps and acceptance (training set) while it trains."""

    stage: Stage
    detail: str
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    acceptance: float | None = None
