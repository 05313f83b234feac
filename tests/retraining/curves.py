"""Curves of trainings that did not take place."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from driftguard.records.documents.retraining_run import TrainingCurve
from driftguard.retraining.ledger.training_curve import with_report


def curve_of(
    losses: Sequence[tuple[int, float]], kept: Sequence[tuple[int, float]], now: datetime
) -> TrainingCurve:
    """Of a loss at each step, and of what is kept of held-out tokens at each."""
    curve = TrainingCurve()
    for step, loss in losses:
        told = {"event": "progress", "step": step, "steps": 1_000, "loss": loss, "acceptance": 0.5}
        curve = with_report(curve, told, now + timedelta(seconds=step))
    for step, acceptance in kept:
        told = {"event": "held_out", "step": step, "steps": 1_000, "loss": 1.0, "acceptance": acceptance}
        curve = with_report(curve, told, now + timedelta(seconds=step))
    return curve
