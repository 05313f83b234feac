"""The curve of a training, thinned while it grows: a run keeps a few hundred points, however long it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec

from driftguard.records.documents.retraining_run import CurvePoint, Thinned, TrainingCurve

MOST_POINTS: Final = 256  # of the training, and as many of what is held out


class _Report(msgspec.Struct, frozen=True):
    """What of a line of the training process is kept."""

    event: Literal["progress", "held_out"]
    step: Annotated[int, msgspec.Meta(ge=0)]
    steps: Annotated[int, msgspec.Meta(ge=1)]
    loss: float
    acceptance: Annotated[float, msgspec.Meta(ge=0, le=1)]


def with_report(curve: TrainingCurve, told: Mapping[str, Any], at: datetime) -> TrainingCurve:
    """The curve with one report of the training more. One that makes no sense is counted in `left_out`."""
    try:
        report = msgspec.convert(told, _Report)
        point = CurvePoint(report.step, at, _finite(report.loss), report.acceptance)
        if report.event == "progress":
            return replace(curve, training=_with_point(curve.training, point, report.steps))
        return replace(curve, held_out=_with_point(curve.held_out, point, report.steps))
    except ValueError as error:  # msgspec's as well
        return replace(
            curve, left_out=curve.left_out + 1, left_out_reason=curve.left_out_reason or str(error)
        )


def _finite(loss: float) -> float:
    if not math.isfinite(loss):
        raise ValueError(f"loss: {loss} is not a finite number")
    return loss


def _with_point(thinned: Thinned, point: CurvePoint, steps: int) -> Thinned:
    """Raises ValueError for a step after the last one, or that does not come after the one before."""
    if point.step > steps:
        raise ValueError(f"step {point.step} of {steps}")
    points, reports, stride = thinned.points, thinned.reports, thinned.stride
    if points and point.step <= points[-1].step:
        raise ValueError(f"step {point.step} comes after step {points[-1].step}")
    if points and (reports - 1) % stride:
        points = points[:-1]  # the newest until now, between two that stay
    if len(points) == MOST_POINTS:
        points, stride = points[::2], 2 * stride
    return Thinned((*points, point), reports + 1, stride)
