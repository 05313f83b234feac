"""Captured requests scored offline with the registered target and draft: what the server accepted of them,
and what an engine that serves both faithfully would have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# By which an engine keeps draft tokens: see driftguard_training.serving
Rule = Literal["rejection", "match"]
MissingScores = Literal[
    "not_registered",  # the settings name no engine of this server
    "engine_silent",  # it does not say what it serves
    "no_draft_model",  # the draft is none that is run here, such as an n-gram table
    "not_here",  # a model's directory is not known, may not be read, or it or torch is not on this machine
    "typical",  # its rule keeps what the target might not say: no answer is the target's own
    "too_few",  # captured requests on one side that could be scored
    "timeout",
    "failed",
    "interrupted",
]


@dataclass(frozen=True, slots=True)
class SideScores:
    """Of the captured requests of one segment on one side of the change. Rates are of sums, with their
    standard errors; units are conversations. `offline`: of such requests, before their tokens were drawn;
    `gap`: served acceptance less that of a faithful engine that gave the very same answers.
    `surprise`: in nats per token of the answers, 0 in expectation if they are the target's own."""

    requests: int
    units: int
    drafted: int  # by the server
    served: float
    served_error: float
    offline: float
    offline_error: float
    gap: float
    gap_error: float
    surprise: float
    surprise_error: float


@dataclass(frozen=True, slots=True)
class SegmentScores:
    segment: str
    before: SideScores
    after: SideScores


@dataclass(frozen=True, slots=True)
class ServingScores:
    """Of the changed segments with enough of both sides, by the engine's rule. `by_match`: where that is not
    known, the same by "match", and `segments` by "rejection"."""

    segments: tuple[SegmentScores, ...]
    by_match: tuple[SegmentScores, ...] = ()
