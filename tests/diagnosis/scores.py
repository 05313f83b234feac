"""Scores of captured requests, as a scoring makes them."""

from __future__ import annotations

from driftguard.records.documents.serving_scores import SegmentScores, ServingScores, SideScores


def side(served: float, offline: float, surprise: float = 0.0, *, error: float = 0.01) -> SideScores:
    """60 requests. `error` of the gap; the others are a little more, as those of requests that differ are."""
    return SideScores(
        requests=60,
        units=60,
        drafted=5_000,
        served=served,
        served_error=1.5 * error,
        offline=offline,
        offline_error=1.2 * error,
        gap=served - offline,
        gap_error=error,
        surprise=surprise,
        surprise_error=3 * error,
    )


def scores(
    served: float,
    offline: float,
    surprise: float = 0.0,
    *,
    error: float = 0.01,
    segments: tuple[str, ...] = ("german",),
) -> ServingScores:
    """Since a change; before it .70 was served, and the models account for .71."""
    before = side(0.7, 0.71, error=error)
    after = side(served, offline, surprise, error=error)
    return ServingScores(tuple(SegmentScores(name, before, after) for name in segments))


OPENED = scores(0.45, 0.71)  # where german fell from .70 to .45
ACCOUNTED = scores(0.45, 0.46)
OTHER_TARGET = scores(0.45, 0.5, 0.3)
