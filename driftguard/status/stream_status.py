"""The status of one stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from driftguard.cost import Cost, Speculation
from driftguard.cost.best_action import Action
from driftguard.detection import Acceptance, SegmentSummary, StreamSummary, Unit
from driftguard.store.streams import StreamRow
from driftguard.store.tables import Incident, RetrainRun


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """One stream now. Acceptances are over the watched segments, both weighted by the current mix of
    segments."""

    stream: StreamRow
    verdict: str
    acceptance_verdict: str  # without regard to whether speculation pays
    text: str
    since: datetime | None
    in_service: bool
    target_in_service: str
    draft_in_service: str
    now: Acceptance | None
    baseline: Acceptance | None
    tokens_per_second_now: float | None
    tokens_per_second_baseline: float | None
    acceptance_length: float | None  # emitted tokens a step, in the last five minutes
    acceptance_per_position: Sequence[float | None]  # in these minutes; empty where it is not told
    cost_percent: float | None  # of the tokens per second, while degraded
    sample_size: int  # requests folded
    requests_missing: int  # until the first segment is watched
    incident_id: UUID | None
    last_retrain: RetrainRun | None
    segments: Sequence[SegmentSummary]
    cost: Cost | None  # as it was last measured
    cost_measured_at: datetime | None
    promoted_at: datetime | None  # of a draft that is being watched
    recovery: str | None  # how far acceptance came back with it, in words
    last_incident: Incident | None  # of the server and target, resolved within a day
    speculation: Speculation | None  # None where there is none in service
    actions: Sequence[Action]  # in order, one of them the best; empty where nothing is drafted now
    summary: StreamSummary | None  # the detector's; None before the first fold

    @property
    def unit(self) -> Unit:
        """What `sample_size` and `requests_missing` count."""
        return self.segments[0].unit if self.segments else "requests"
