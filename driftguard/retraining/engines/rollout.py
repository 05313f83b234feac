"""What a run that is rolling out, or back, waits for. Stored with the run."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from driftguard.store.tables import RetrainRun


class Rollout(msgspec.Struct, frozen=True):
    """Records of draft `version` that end and arrive after `asked_at` show that it serves.

    until: then a promotion has failed, and a rollback is asked for again. reason: why it is rolled back.
    output: the end of what the command printed or the webhook answered.
    """

    version: str
    asked_at: datetime
    until: datetime
    reason: str = ""
    output: str = ""


def rollout_of(run: RetrainRun) -> Rollout:
    """Of a run in one of store.retrain_runs.ROLLING_STATES."""
    return msgspec.convert((run.numbers or {})["rollout"], Rollout)


def with_rollout(run: RetrainRun, rollout: Rollout) -> dict[str, Any]:
    """The run's numbers with it."""
    return {**(run.numbers or {}), "rollout": msgspec.to_builtins(rollout)}
