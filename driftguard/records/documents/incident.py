"""The documents of an incident: the changed segments, the evidence, and the diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Literal
from uuid import UUID

from driftguard.records.documents.acceptance import Acceptance, AdjustedChange, Gradual
from driftguard.records.documents.cost import Cost, Interval
from driftguard.records.documents.diagnosis import Diagnosis
from driftguard.records.documents.goodput import GoodputChange
from driftguard.records.positions import Positions, combined


@dataclass(frozen=True, slots=True)
class AcrossSettings:
    """Between which levels the end of a fall is looked for since K or other settings changed while it was
    open: those of the first draft token, which K does not change; or, where no counts per position are given
    or a temperature changed (`of_rise`), what the segment accepted then, and as much more than that as it had
    fallen. `k`: draft tokens per step since; None where it did not change, and is not told."""

    before: float
    after: float
    positions: Positions
    k: float | None
    of_rise: bool = False


@dataclass(frozen=True, slots=True)
class ChangedSegment:
    """One segment's acceptance before and after the change. `evidence`: its own sum of bets, to be compared
    with A; None where a comparison found it (a replaced target, another name), which no bet detects. `before`
    and `after` are as counted; `adjusted` is as tested, None of a comparison and of incidents of older
    versions. `renamed_from`: older names whose place it took, `before` is theirs. `back_at`: when the request
    ended at which its acceptance was found back, or another name took its place, while other segments of the
    incident were not back. `across_settings`: where K or other settings have changed since. `silent_at`: the
    seq at which the detector found it silent, where it may go on under another name. `forgotten`: the
    detector began anew since, and knows nothing of its level before. `since`, `since_seq`: when the request
    ended at which it changed, and its seq, where it joined the incident; `named_seq`: the newest record as it
    joined. Else these are the incident's change point and the record that opened it."""

    segment: str
    before: Acceptance
    after: Acceptance
    evidence: float | None = None
    adjusted: AdjustedChange | None = None
    renamed_from: tuple[str, ...] = ()
    back_at: datetime | None = None
    across_settings: AcrossSettings | None = None
    silent_at: int | None = None
    forgotten: bool = False
    since: datetime | None = None
    since_seq: int | None = None
    named_seq: int | None = None

    def is_compared(self, *, of_alarm: bool) -> bool:
        """Whether a comparison found it, or it is forgotten, so that the detector knows nothing of its level
        before. `of_alarm`: of the incident. (Of one of an alarm older versions kept no evidence per segment.)
        """
        if self.forgotten:
            return True
        if self.evidence is not None:
            return False
        return not of_alarm or bool(self.renamed_from) or self.after.positions == "first"

    @property
    def levels(self) -> tuple[float, float]:
        """Before and after, as tested; where nothing was tested, as counted."""
        if self.adjusted is None:
            return self.before.rate, self.after.rate
        return self.adjusted.before, self.adjusted.after


def told_as(from_state: str | None, to_state: str, severity: str | None) -> str:
    """What a step in the history of an incident is told as: its state; where it changed none, the severity to
    which it was raised, or that something was noted."""
    return to_state if from_state != to_state else severity or "noted"


def positions_of(segments: Sequence[ChangedSegment]) -> Positions:
    """The draft positions of the acceptances of these segments: all, or the first."""
    return combined([segment.after.positions for segment in segments])


def not_back(segments: Sequence[ChangedSegment]) -> tuple[ChangedSegment, ...]:
    """Those whose acceptance is not back, and that are not silent; of an incident that is over, all."""
    return tuple(each for each in segments if each.back_at is None) or tuple(segments)


def over_by_now(segments: Sequence[ChangedSegment]) -> tuple[ChangedSegment, ...]:
    """Those whose acceptance was found back, or that were silent, one by one; without those that go on under
    another name, be it a newer one or an older one again."""
    renamed = {name for each in segments for name in each.renamed_from}
    fallen = {each.segment for each in segments if each.back_at is None}
    return tuple(
        each
        for each in segments
        if each.back_at is not None and each.segment not in renamed and fallen.isdisjoint(each.renamed_from)
    )


def going_on(segments: Sequence[ChangedSegment]) -> tuple[ChangedSegment, ...]:
    """All but those that are over by now, hence with the older names of those that go on; of an incident that
    is over, all."""
    over = names_of(over_by_now(segments))
    return tuple(each for each in segments if each.segment not in over) or tuple(segments)


def changed_since(segments: Sequence[ChangedSegment], change_point_at: datetime) -> dict[str, datetime]:
    """When each changed. `change_point_at`: of the incident."""
    return {each.segment: each.since or change_point_at for each in segments}


def names_of(segments: Sequence[ChangedSegment]) -> tuple[str, ...]:
    """In their order."""
    return tuple(segment.segment for segment in segments)


@dataclass(frozen=True, slots=True)
class Rollback:
    """The draft before the one in service. `gain`: part of the tokens per second, were it in service; None
    where it was not measured on the same segments. `by_hand`: DriftGuard did not put it into service, and
    cannot put it back."""

    version: str
    gain: Interval | None
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """What is kept as an incident ends. `tokens`: emitted in its segments from the change point on, in each
    until it was over there. `mitigated_at`: when the draft that helped came into service, or when the request
    ended (by the source's clock) at which acceptance was found back; None where nothing shows that it
    helped."""

    tokens: int
    mitigated_at: datetime | None


@dataclass(frozen=True, slots=True)
class Repeats:
    """An earlier incident that this one looks like: of the same direction, in segments that it had too, one
    `cycle` before, and no smaller. `since`, `until`: of the earlier one. `differs`: why this one is another
    after all. `usual`: a person said that it is, so that it is expected from then on."""

    cycle: Literal["day", "week"]
    incident_id: UUID
    since: datetime
    until: datetime
    differs: str | None = None
    usual: bool = False

    @property
    def name(self) -> str:
        """For example: that of Saturday 2026-11-14 00:31 UTC."""
        return f"that of {self.since:%A %Y-%m-%d %H:%M} UTC"

    @property
    def when(self) -> str:
        """For example: on Saturdays."""
        return f"on {self.since:%A}s" if self.cycle == "week" else "at this hour"


@dataclass(frozen=True, slots=True)
class GoesOn:
    """An incident of the stream before, whose fall goes on. `change_point_seq`: of its change."""

    incident_id: UUID
    stream_id: int
    change_point_seq: int


@dataclass(frozen=True, slots=True)
class Mitigation:
    """The draft that was trained for an incident and is in service now. `recovered`: how far acceptance has
    come back with it, in words; None until it is shown to be better than the old one. `half_at`: when every
    changed segment was shown to have won back half of its fall, of which `promoted_at` was the beginning."""

    draft_version: str
    recovered: str | None = None
    promoted_at: datetime | None = None
    half_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentEvidence:
    """The evidence of an incident, so that a reader can check it. The fold writes the detector's numbers, the
    examination adds the cost, which is completed while the incident is open."""

    # Of an alarm; all None where the target was replaced. See driftguard.detection.DriftOpened.
    evidence: float | None = None
    false_alarm_every: float | None = None  # A in use, requests
    false_alarm_factor: float = 1.0  # what the stream's own A was multiplied by: driftguard.detection.fleet
    requests_to_alarm: int | None = None
    interval: tuple[int, int] | None = None  # of the change point: seqs, both ends included
    interval_level: float | None = None
    stream_before: Acceptance | None = None
    stream_after: Acceptance | None = None
    adjusted: AdjustedChange | None = None  # of the changed segments, as tested; None of older versions too
    gradual: Gradual | None = None  # None where it cannot have begun before the interval of the change point
    # Of a replaced target or draft: the stream before.
    predecessor_stream_id: int | None = None
    goes_on: GoesOn | None = None  # where that stream had fallen already, instead
    goodput: GoodputChange | None = None  # of an incident of goodput, whose direction is "slower"
    # Of any: parts of the tokens per second, lost; negative where gained.
    slowdown_measured: float | None = None  # only if a slowdown is certain
    slowdown_formula: float | None = None
    num_speculative_tokens: float | None = None  # draft tokens per step in the changed segments
    cost: Cost | None = None
    rollback: Rollback | None = None
    is_retrained: bool = False  # by a retraining under way, also where a person has acknowledged it since
    mitigation: Mitigation | None = None
    ending: Ending | None = None
    raised_because: str | None = None  # why the severity was raised
    repeats: Repeats | None = None
    is_return: bool = False  # a rise that was the end of a fall which no baseline showed
    outgrew_cause: bool = False  # since it was diagnosed other segments joined, or its own fell further
    # What each changed segment accepted once that was known after the alarm: a further fall is one from there
    levels: Mapping[str, Acceptance] = field(default_factory=dict)

    @property
    def is_of_alarm(self) -> bool:
        """Whether the detector opened the incident, with a baseline of the level before."""
        return self.false_alarm_every is not None

    @property
    def may_be_usual(self) -> bool:
        """Whether it repeats an earlier one in everything so far."""
        return self.repeats is not None and self.repeats.differs is None

    @property
    def slowdown(self) -> float | None:
        """Part of the tokens per second lost: measured if that is precise enough, else as the watch over
        goodput has it, else by formula."""
        if self.slowdown_measured is not None:
            return self.slowdown_measured
        return self.slowdown_formula if self.goodput is None else self.goodput.lost


@dataclass(frozen=True, slots=True)
class SeenEvidence:
    """How much evidence a diagnosis had: replayed probes, captured requests (in coarse steps), and the step
    at which these were scored, or could not be."""

    probes: int
    captures: int
    scores: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentDiagnosis(Diagnosis):
    """A diagnosis as it is stored."""

    diagnosed_at: datetime
    seen: SeenEvidence

    @classmethod
    def of(cls, diagnosis: Diagnosis, diagnosed_at: datetime, seen: SeenEvidence) -> IncidentDiagnosis:
        known = {field.name: getattr(diagnosis, field.name) for field in fields(diagnosis)}
        return cls(**known, diagnosed_at=diagnosed_at, seen=seen)
