"""The state of a stream in the words of the status page."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.acceptance import acceptance_of
from driftguard.detection.baseline import baselines, reference_acceptance
from driftguard.detection.config import DetectorConfig
from driftguard.detection.findings import Acceptance, SegmentSummary, SegmentVerdict, StreamSummary, Verdict
from driftguard.detection.state import OpenIncident, StreamState

RECENT_REQUESTS = 200
STOPPED_AFTER = 100  # requests in a row without a drafted token, in a stream that drafted before


def describe(config: DetectorConfig, state: StreamState) -> StreamSummary:
    """What the detector would say now. Intervals are at 95% and do not correct for having been selected."""
    verdict, since = _verdict(state)
    opened = [incident for incident in state.incidents if incident is not None]
    every = np.arange(len(state.history))
    return StreamSummary(
        verdict=verdict,
        since=since,
        ordinal=state.ordinal,
        requests=state.requests,
        undrafted=state.undrafted,
        requests_per_day=state.requests_per_day,
        false_alarm_every=config.threshold(state.requests_per_day),
        change_point=opened[0].change_point if opened else None,
        acceptance=_acceptance(state, every[-RECENT_REQUESTS:]),
        segments=tuple(_segment(config, state, code) for code in range(len(state.names))),
    )


def _verdict(state: StreamState) -> tuple[Verdict, float | None]:
    down, up = state.incidents
    if state.undrafted_in_a_row >= STOPPED_AFTER and state.undrafted < state.requests:
        return "drafting_stopped", float(state.history.ended_ms[-1]) / 1000.0
    if down is not None:
        return "degraded", down.change_point_ms / 1000.0
    if up is not None:
        return "improved", up.change_point_ms / 1000.0
    if state.ready.any():
        return "steady", state.steady_since
    return "insufficient_data", state.first_ended_at if state.requests else None


def _segment(config: DetectorConfig, state: StreamState, code: int) -> SegmentSummary:
    sums = state.reference[code]
    ready = bool(state.ready[code])
    base = baselines(sums, config.ignore)
    down, up = (incident if _concerns(incident, code) else None for incident in state.incidents)
    own = np.flatnonzero(state.history.segment == code)
    incident = down or up
    recent = own[state.history.ordinal[own] >= incident.change_point] if incident else own[-RECENT_REQUESTS:]
    verdict: SegmentVerdict = "degraded" if down else "improved" if up else "steady"
    return SegmentSummary(
        segment=state.names[code],
        verdict=verdict if ready else "insufficient_data",
        requests=int(state.drafted_requests[code]),
        requests_needed=0 if ready else int(state.reference_size[code] - sums[0]),
        baseline=reference_acceptance(sums) if ready else None,
        recent=_acceptance(state, recent),
        mean_per_request=float(base.mean) if ready else None,
        standard_deviation=float(np.sqrt(base.variance)) if ready else None,
    )


def _concerns(incident: OpenIncident | None, code: int) -> bool:
    return incident is not None and code in incident.segments


def _acceptance(state: StreamState, places: NDArray[np.intp]) -> Acceptance | None:
    if len(places) == 0:
        return None
    return acceptance_of(state.history.drafted[places], state.history.accepted[places])
