"""Cycles: where a day or a week ends, which requests it counts, and what changes when it is over. The
effects (`factors.py`) are what they are during a whole cycle. A step of the fold therefore ends
where a cycle ends that counts; one with too few requests is forgotten without a halt.

The end of a day that counts also tells the stream's traffic, from which A follows: requests_per_day is that
of the first whole day, then a mean in which a day counts for 1 / DAYS_OF_TRAFFIC, of the first few for as
much as each of those before. So A follows the traffic, over a week because weekends are part of it, and is
known before the requests that it is held against: as M_t - t is a supermartingale (`evidence.py`), the
expected number of requests to a false alarm is at least the expected A at it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.findings import Finding, ProfileLearned
from driftguard.detection.state.columns import Columns
from driftguard.detection.state.stream_state import DIRECTIONS, Floats, Ints, OpenIncident, StreamState
from driftguard.detection.statistics.baseline import (
    Baselines,
    length_of_acceptance,
)
from driftguard.detection.statistics.factors import (
    ANSWER,
    DAY,
    FACTORS,
    LEAST_REQUESTS,
    OF_TIME,
    PROMPT,
    Factor,
    Profile,
    Profiles,
    counts,
    cycle_over,
    cycles_begun,
    tallied,
)
from driftguard.detection.steps.dependence import measured_anew
from driftguard.detection.steps.evidence import without_evidence
from driftguard.detection.steps.expectation import (
    effect_of,
    effect_of_factors,
    line,
)

DAYS_OF_TRAFFIC = 7


def cells_of(rows: Columns) -> Floats:
    """[T, CELLS] 1 in the cell of each cycle that the row lies in."""
    return np.hstack([np.eye(factor.cells)[factor.cell(rows)] for factor in FACTORS])


def with_reference_cells(profiles: Profiles, cells: Floats) -> Profiles:
    """With so many more requests of the reference periods in each cell [C, CELLS]."""
    parts = np.split(cells, np.cumsum([factor.cells for factor in FACTORS])[:-1], axis=1)
    return tuple(
        replace(profile, reference=profile.reference + part)
        for profile, part in zip(profiles, parts, strict=True)
    )


def cycles_begin(
    state: StreamState, row: Columns, requests: int, ignore: float
) -> tuple[StreamState, list[Finding]]:
    """Before a step that begins with this row, which so many requests of the stream came before.

    Where a profile comes into use or is given up, the evidence of the stream starts anew, as it was against
    other baselines, and so do the sums of the other cycles.
    """
    findings: list[Finding] = []
    for place, factor in enumerate(FACTORS):
        profile = state.profiles[place]
        number = factor.number(row.ended_ms)
        if not cycles_begun(profile.number, profile.strays, number)[0]:
            continue
        if factor is DAY and counts(profile.current, DAY).any():
            state = _with_traffic(state, profile.number, int(number[0]), requests)
        profile, changed = cycle_over(profile, factor, int(number[0]), ignore)
        state = _with_profile(state, place, profile)
        if changed.any():
            state = against_other_baselines(state, changed, place, int(row.ordinal[0]) - 1)
        findings += [_learned(state, factor, profile, int(code), row) for code in np.flatnonzero(changed)]
    return state, findings


def _with_traffic(state: StreamState, ended: int, begins: int, requests: int) -> StreamState:
    """The state that knows the traffic of the day that ended, with so many requests of the stream before the
    day that begins. The first day is no whole one, nor is one that began while days did not count."""
    begun, before, days = state.day_begun
    per_day = state.requests_per_day
    if begun == ended:
        days = min(days + 1, DAYS_OF_TRAFFIC)
        per_day += (requests - before - per_day) / days
    return replace(state, requests_per_day=per_day, day_begun=(begins, requests, days))


def against_other_baselines(
    state: StreamState, strata: NDArray[np.bool_], place: int, ordinal: int
) -> StreamState:
    """The state in which the profile of one of FACTORS has come into use or been given up in some strata [C];
    evidence counts from after this ordinal on, and so do the tests whether an open incident is over.

    What hours add to it is in the sums of the week until then, and the other way round: they begin anew.
    """
    changed, now = np.unique(state.segment_of_stratum[strata]), int(state.drafted_requests.sum())
    down, up = (
        incident.tested_anew(now) if incident and np.isin(changed, incident.segments).any() else incident
        for incident in state.incidents
    )
    state = replace(
        measured_anew(state, strata),
        ordinal=ordinal,
        incidents=(down, up),
        profiles=tuple(
            _uncounted(profile, strata & ~profile.used)
            if factor is not FACTORS[place] and {factor, FACTORS[place]} <= set(OF_TIME)
            else profile
            for factor, profile in zip(FACTORS, state.profiles, strict=True)
        ),
    )
    for direction in range(len(DIRECTIONS)):
        state = without_evidence(state, direction)
    return state


def _uncounted(profile: Profile, strata: NDArray[np.bool_]) -> Profile:
    """That has counted nothing of these strata [C] since their reference periods."""
    return replace(profile.without(strata), reference=profile.reference)


def _with_profile(state: StreamState, place: int, profile: Profile) -> StreamState:
    profiles = list(state.profiles)
    profiles[place] = profile
    return replace(state, profiles=tuple(profiles))


def _learned(state: StreamState, factor: Factor, profile: Profile, code: int, row: Columns) -> ProfileLearned:
    return ProfileLearned(
        segment=state.names[state.segment_of_stratum[code]],
        stratum=str(state.setting_of(code)),
        ordinal=int(row.ordinal[0]),
        ended_at=row.ended_at(0),
        factor=factor.name,
        cycles=int(profile.counted[code]),
        amplitude=float(profile.amplitude[code]),
    )


def rows_until_cycle_counts(state: StreamState, rows: Columns) -> int:
    """How many of the rows come before the end of a cycle that counts for some stratum."""
    return min(
        _until_counts(profile, factor, rows) for factor, profile in zip(FACTORS, state.profiles, strict=True)
    )


def _until_counts(profile: Profile, factor: Factor, rows: Columns) -> int:
    begun, _ = cycles_begun(profile.number, profile.strays, factor.number(rows.ended_ms))
    start, seen = 0, profile.current[..., 0]
    for place, _ in begun:
        if place - start + seen.sum() >= LEAST_REQUESTS:
            own = slice(start, place)
            cell = rows.stratum[own].astype(np.int64) * factor.cells + factor.cell(rows[own])
            seen = seen + np.bincount(cell, minlength=seen.size).reshape(seen.shape)
            if counts(seen[..., None], factor).any():
                return place
        start, seen = place, np.zeros_like(seen)
    return len(rows)


def in_cycles_under_way(state: StreamState, rows: Columns) -> NDArray[np.bool_]:
    """Which rows [T] lie in the cycles that are under way."""
    numbers = [factor.number(rows.ended_ms) for factor in OF_TIME]  # the cycles of the others are days too
    same = [number == profile.number for number, profile in zip(numbers, state.profiles, strict=False)]
    return np.asarray(np.logical_and.reduce(same))


def with_effects(state: StreamState, rows: Columns) -> Columns:
    """The rows with the effects of their factors."""
    if not any(profile.used.any() for profile in state.profiles):
        return rows
    return replace(rows, effect=effect_of_factors(state, rows))


def tally(state: StreamState, base: Baselines, rows: Columns) -> Profiles:
    """The state's profiles after their cycles have counted the rows that hold evidence.

    Once a profile is used, a segment with an open incident says nothing about it, unless it has moved.
    """
    evident = state.ready[rows.stratum] & (rows.fresh > 0.0)
    unexplained = rows.x - line(base, rows) - rows.effect
    profiles = []
    for factor, profile in zip(FACTORS, state.profiles, strict=True):
        told = evident & ~_disturbed(state, profile)[rows.stratum]
        if factor is ANSWER:
            told &= rows.log_length > 0.0
            if told.any():
                told &= ~length_of_acceptance(state.reference)[rows.stratum]
        elif factor is PROMPT:
            told &= rows.prompt_tokens >= 0
        cell = factor.cell(rows) if told.any() else np.zeros(len(rows), dtype=np.int64)
        residual = unexplained + effect_of(profile, factor, rows)
        number = factor.number(rows.ended_ms)
        profiles.append(tallied(profile, rows.stratum, number, cell, residual, told))
    return tuple(profiles)


def with_onset(state: StreamState, incident: OpenIncident, direction: int) -> StreamState:
    """The state in which this incident opens, or joins the one that is open. It forgets the day and the week
    so far, as the change lies within; but where an incident of this direction began a day or a week before,
    what is usual has moved, and is learned anew."""
    profiles = tuple(
        _with_onset(state, factor, profile, incident, state.onsets[:, direction])
        for factor, profile in zip(FACTORS, state.profiles, strict=True)
    )
    own, onsets = np.isin(state.segment_of_stratum, incident.segments), state.onsets.copy()
    onsets[own & state.ready, direction] = incident.change_point_ms  # of those known by then, in any batch
    return replace(state, profiles=profiles, onsets=onsets)


def _with_onset(
    state: StreamState, factor: Factor, profile: Profile, incident: OpenIncident, before_ms: Ints
) -> Profile:
    again = factor.begins_again(incident.change_point_ms, before_ms)
    profile = profile.learned_anew(again & np.isin(state.segment_of_stratum, incident.segments))
    forgotten = _changed(state, profile, incident)[:, None, None]
    return replace(profile, current=np.where(forgotten, 0.0, profile.current))


def _disturbed(state: StreamState, profile: Profile) -> NDArray[np.bool_]:
    """Strata [C] of which an incident is open."""
    open_now = [_changed(state, profile, incident) for incident in state.incidents if incident is not None]
    return np.asarray(np.logical_or.reduce([np.zeros_like(profile.used), *open_now]))


def _changed(state: StreamState, profile: Profile, incident: OpenIncident) -> NDArray[np.bool_]:
    """Strata [C] of it that are used as they are."""
    return profile.used & ~profile.moved & np.isin(state.segment_of_stratum, incident.segments)
