"""The state of a stream in the words of the status page."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.config import DetectorConfig
from driftguard.detection.expected_delay import expected_delays
from driftguard.detection.findings import (
    SegmentSummary,
    SegmentVerdict,
    SessionsGiven,
    StreamSummary,
    Verdict,
)
from driftguard.detection.state.columns import Columns, history_rows
from driftguard.detection.state.stream_state import OpenIncident, StreamState
from driftguard.detection.statistics.baseline import FIRST_CHECK, Baselines, baselines, length_of_acceptance
from driftguard.detection.statistics.strata import unpack, why_new
from driftguard.detection.steps.at_baseline import acceptance_over, at_baseline, baseline_of
from driftguard.records.documents.acceptance import Acceptance

RECENT_REQUESTS = 200
PRESENT_REQUESTS = 50  # newest requests of a segment that say which of its strata is in use
STOPPED_AFTER = 100  # requests in a row without a drafted token, in a stream that drafted before


def describe(config: DetectorConfig, state: StreamState) -> StreamSummary:
    """What the detector would say now. Intervals are at 95% and do not correct for having been selected."""
    rows = history_rows(state)
    base = baselines(state.reference, state.blocks)
    segments = tuple(_segment(config, state, base, rows, code) for code in range(len(state.names)))
    verdict, since = _verdict(state, rows, segments)
    opened = [incident for incident in state.incidents if incident is not None]
    return StreamSummary(
        verdict=verdict,
        since=since,
        ordinal=state.ordinal,
        requests=state.requests,
        undrafted=state.undrafted,
        requests_per_day=state.requests_per_day,
        false_alarm_every=config.threshold(state.requests_per_day),
        change_point=opened[0].change_point if opened else None,
        acceptance=_acceptance(state, rows[-RECENT_REQUESTS:]),
        segments=segments,
        sessions=_sessions_given(state),
        windows_after_gap=state.windows_after_gap,
        block_length=int(state.block_length.max(initial=1)),
    )


def _sessions_given(state: StreamState) -> SessionsGiven:
    requests = int(state.drafted_requests[~state.of_windows].sum())
    if requests == 0:
        return "no requests"
    if state.in_session == 0:
        return "not given"
    return "given" if state.in_session >= requests else "in part"


def _verdict(
    state: StreamState, rows: Columns, segments: tuple[SegmentSummary, ...]
) -> tuple[Verdict, float | None]:
    down, up = state.incidents
    if state.undrafted_in_a_row >= STOPPED_AFTER and state.undrafted < state.requests:
        return "drafting_stopped", rows.ended_at(-1) if len(rows) else None
    if down is not None:
        return "degraded", down.change_point_ms / 1000.0
    if up is not None:
        return "improved", up.change_point_ms / 1000.0
    if any(segment.verdict == "steady" for segment in segments):
        return "steady", state.steady_since
    return "insufficient_data", state.first_ended_at if state.requests else None


def _segment(
    config: DetectorConfig, state: StreamState, base: Baselines, rows: Columns, code: int
) -> SegmentSummary:
    down, up = (incident if _concerns(incident, code) else None for incident in state.incidents)
    own = rows[np.flatnonzero(rows.segment == code)]
    newest = own[-RECENT_REQUESTS:]
    learning = None if down or up else _learning(state, newest[-PRESENT_REQUESTS:])
    incident = down or up
    recent = own[np.flatnonzero(own.ordinal >= incident.change_point)] if incident else newest
    watched = recent[np.flatnonzero(state.ready[recent.stratum])]
    newest_ready = state.newest_baseline(code)
    known = learning is None and newest_ready is not None
    verdict: SegmentVerdict = "degraded" if down else "improved" if up else "steady"
    strata = watched.stratum if len(watched) else np.array([newest_ready or 0])
    mean, deviation = _per_request(base, strata) if known else (None, None)
    return SegmentSummary(
        segment=state.names[code],
        verdict=verdict if known or incident else "insufficient_data",
        requests=int(state.drafted_requests[state.segment_of_stratum == code].sum()),
        requests_needed=_missing(state, code, learning),
        baseline=_baseline(state, watched, strata) if known else None,
        recent=_acceptance(state, watched if len(watched) and known else recent),
        mean_per_request=mean,
        standard_deviation=deviation,
        learning=None if learning is None else learning_text(state, learning),
        baseline_reason=_baseline_reason(state, strata) if known else None,
        expected_delays=expected_delays(config, state, base, rows, strata) if known else (),
        block_length=int(state.block_length[strata].max()) if known else 1,
        daily_rhythm=float(state.rhythms.amplitude[strata].max()) if known else 0.0,
        length_of_acceptance=known and bool(length_of_acceptance(state.reference[strata]).any()),
    )


def _learning(state: StreamState, newest: Columns) -> int | None:
    """The stratum without a baseline that most of the segment's newest requests are in, if most are."""
    unwatched = newest.stratum[~state.ready[newest.stratum]]
    if 2 * len(unwatched) <= len(newest):
        return None
    return int(np.bincount(unwatched).argmax())


def _missing(state: StreamState, code: int, learning: int | None) -> int:
    if learning is not None:
        return max(int(state.reference_size[learning] - state.reference[learning, 0]), 1)
    return FIRST_CHECK if state.newest_baseline(code) is None else 0  # nothing was drafted yet, or watched


def learning_text(state: StreamState, code: int) -> str:
    setting = int(state.setting_of_stratum[code])
    return f"{unpack(setting)}: {state.why_learning(code)}"


def _baseline(state: StreamState, watched: Columns, strata: NDArray[np.integer[Any]]) -> Acceptance:
    """In the mix of the recent requests; of the newest baseline where the history holds none of them."""
    return at_baseline(state, watched) if len(watched) else baseline_of(state, int(strata[0]))


def _baseline_reason(state: StreamState, strata: NDArray[np.integer[Any]]) -> str:
    """Why the newest baseline of these strata was begun, against the segment's baseline before it."""
    code = int(strata[state.ready_ordinal[strata].argmax()])
    if state.accepted_anew[code]:
        return state.why_learning(code)
    same = state.ready & (state.segment_of_stratum == state.segment_of_stratum[code])
    earlier = np.flatnonzero(same & (state.ready_ordinal < state.ready_ordinal[code]))
    before = earlier[state.ready_ordinal[earlier].argmax()] if len(earlier) else None
    settings = state.setting_of_stratum
    return why_new(int(settings[code]), None if before is None else int(settings[before]))


def _per_request(base: Baselines, strata: NDArray[np.integer[Any]]) -> tuple[float, float]:
    """Baseline mean per request in this mix of strata, and the deviation around it."""
    return float(base.mean[strata].mean()), float(np.sqrt(base.variance[strata].mean()))


def _concerns(incident: OpenIncident | None, code: int) -> bool:
    return incident is not None and code in incident.segments


def _acceptance(state: StreamState, rows: Columns) -> Acceptance | None:
    return acceptance_over(state, rows) if len(rows) else None
