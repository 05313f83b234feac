"""From the measurements of the training process to the inputs of the gate.

Drafts of one architecture (equal config.json) do the same arithmetic per token: their measured times differ
only by other load on the machine. Both then get the mean of the two times, so that a busy machine neither
rejects a good candidate nor favours a bad one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import msgspec

from driftguard.diagnosis.serving_gap import OTHER_TARGET, SAME_TARGET
from driftguard.records.documents.retraining_run import Costs
from driftguard.retraining.training.gate import DraftScores, GroupScores
from driftguard.retraining.training.plan import MINIMUM_HELD_OUT, is_changed
from driftguard.retraining.training.process import TrainingFailed

_ERRORS = 3.0  # standard errors of the mean of held-out requests
_NOT_ARCHITECTURE = frozenset({"_name_or_path", "transformers_version"})


class _Segment(msgspec.Struct, frozen=True):
    segment: str
    positions: int
    steps: float
    kept: list[float]
    drafted: list[float]
    accepted: list[float]

    @property
    def scores(self) -> DraftScores:
        return DraftScores(self.kept, self.drafted, self.accepted, self.steps)


class _Draft(msgspec.Struct, frozen=True):
    directory: str | None  # None: no corpus
    seconds_per_draft_token: float | None
    segments: list[_Segment]


class _Measurements(msgspec.Struct, frozen=True):
    num_speculative_tokens: int
    seconds_per_target_step: float | None
    drafts: list[_Draft]


def read_measurements(measured: Mapping[str, Any]) -> tuple[list[GroupScores], Costs]:
    """Of two drafts: the one in service first, then the candidate. Raises TrainingFailed, OSError."""
    try:
        found = msgspec.convert(measured, _Measurements)
        parent, candidate = found.drafts
        groups = [_scores(*pair) for pair in zip(parent.segments, candidate.segments, strict=True)]
    except (msgspec.ValidationError, ValueError) as error:
        raise TrainingFailed(f"the evaluation's measurements cannot be read: {error}") from error
    seconds = [parent.seconds_per_draft_token, candidate.seconds_per_draft_token]
    told = [each for each in seconds if each is not None]
    if len(told) == len(seconds) and _architecture(parent) == _architecture(candidate):
        seconds = [sum(told) / 2] * 2
    return groups, Costs(found.num_speculative_tokens, found.seconds_per_target_step, *seconds)


def told_of_answers(measured: Mapping[str, Any]) -> str | None:
    """That the held-out answers are not the target's own, in words; None where that is not shown, or not
    measured. Answers of some other temperature than most move a mean, and no median."""
    each: list[float] = measured.get("surprise", [])
    if len(each) < MINIMUM_HELD_OUT:
        return None
    surprise, error = mean(each), stdev(each) / math.sqrt(len(each))
    if median(each) < SAME_TARGET or surprise - _ERRORS * error < OTHER_TARGET:
        return None
    return (
        f"the captured answers are not those of this target at temperature {measured['temperature']:g}: they "
        f"surprise it by {surprise:.2f} nats per token more than its own would; were its weights replaced "
        "since they were captured?"
    )


def _architecture(draft: _Draft) -> dict[str, Any]:
    if draft.directory is None:
        return {}
    config = msgspec.json.decode((Path(draft.directory) / "config.json").read_bytes(), type=dict[str, Any])
    return {name: value for name, value in config.items() if name not in _NOT_ARCHITECTURE}


def _scores(parent: _Segment, candidate: _Segment) -> GroupScores:
    if parent.segment != candidate.segment:
        raise ValueError(f"the drafts were scored on different groups: {parent.segment}, {candidate.segment}")
    return GroupScores(
        group=parent.segment,
        changed=is_changed(parent.segment),
        positions=parent.positions,
        parent=parent.scores,
        candidate=candidate.scores,
    )
