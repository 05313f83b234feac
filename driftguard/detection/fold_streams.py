"""Folds the observations of many streams at once, to the same bits as `fold` one stream at a time.

Nearly all traffic is quiet: every stratum has its baseline, no incident is open, no day or week ends, no
block of requests joins a baseline, no dependence is measured, no alarm is raised. Streams whose whole batch
is quiet are folded side by side: what is a formula of one request runs once over the requests of all of them,
and what must run through requests one after the other takes one request of every stream at a time
(`bets.py`). Every other stream is folded by itself. Side by side, the states of many streams are one: their
strata one after the other, their observations too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.config import DetectorConfig
from driftguard.detection.findings import Finding
from driftguard.detection.fold import fold
from driftguard.detection.observations import ObservationBatch
from driftguard.detection.state.columns import Columns, columns_at, counts_of, sessions_before, windows_in
from driftguard.detection.state.history import COLUMNS, Piece
from driftguard.detection.state.stream_state import (
    Floats,
    Ints,
    StreamState,
    changed,
    known_strata,
    with_varying_k,
)
from driftguard.detection.statistics.baseline import baselines
from driftguard.detection.statistics.bets import Running, last_per_group
from driftguard.detection.statistics.factors import Profile
from driftguard.detection.statistics.sessions import (
    KNOWN,
    NO_SESSION,
    OpenSessions,
    session_keys,
)
from driftguard.detection.statistics.strata import NO_SETTING, settings_of
from driftguard.detection.statistics.windows import after_gap
from driftguard.detection.steps.cycles import in_cycles_under_way, tally, with_effects
from driftguard.detection.steps.evidence import (
    of_strata,
    of_streams,
    put_on_bets,
    run_evidence,
    watched_among,
)
from driftguard.detection.steps.expectation import predicted
from driftguard.detection.steps.reference_period import requests_until_joining, with_joining, with_turns

Result = tuple[StreamState, list[Finding]]

LARGEST_BATCH = 512  # observations of one stream: beyond, nothing is gained
TOGETHER_OBSERVATIONS = 8_192  # keeps what is computed at once in the processor's caches
TOGETHER_STRATA = 8_192


def fold_many(
    config: DetectorConfig, states: Sequence[StreamState], batches: Sequence[ObservationBatch]
) -> list[Result]:
    """What `fold` gives for each stream and its batch, in the same order. Raises ValueError as it does."""
    results: dict[int, Result] = {}
    for group in _groups(states, batches):
        own = [states[place] for place in group]
        after = _quiet(config, own, [batches[place] for place in group])
        results.update({place: (state, []) for place, state in zip(group, after, strict=True) if state})
    return [
        results[place] if place in results else fold(config, states[place], batches[place])
        for place in range(len(batches))
    ]


def _groups(states: Sequence[StreamState], batches: Sequence[ObservationBatch]) -> Iterator[list[int]]:
    """Places of streams that may be folded side by side: the same day and week are under way in all of
    them."""
    by_day: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, (state, batch) in enumerate(zip(states, batches, strict=True)):
        fits = 0 < len(batch) <= LARGEST_BATCH and len(state.ready_ordinal)
        if fits and state.incidents == (None, None) and batch.ordinal[0] > state.ordinal:
            by_day[tuple(profile.number for profile in state.profiles)].append(place)
    for places in by_day.values():
        group, observations, strata = [], 0, 0
        for place in places:
            group.append(place)
            observations += len(batches[place])
            strata += len(states[place].ready_ordinal)
            if observations >= TOGETHER_OBSERVATIONS or strata >= TOGETHER_STRATA:
                yield group
                group, observations, strata = [], 0, 0
        if group:
            yield group


def _quiet(
    config: DetectorConfig, states: list[StreamState], batches: Sequence[ObservationBatch]
) -> list[StreamState | None]:
    """The states after their batches; None where a batch is not quiet."""
    batches, varies, k_newest, k_changes = zip(*map(with_varying_k, states, batches), strict=True)
    side = side_by_side(states, batches)
    gap, last_ends = _after_gaps(side, states, batches)
    rows = _rows(side, states, np.concatenate(varies), (side.batch.judged_drafted > 0) & ~gap)
    quiet = _quiet_but_for_alarms(side, states, rows)
    rows = rows[np.flatnonzero(quiet[side.stream_of_stratum[rows.stratum]])]

    rows = with_effects(side.state, rows)
    stream = side.stream_of_stratum[rows.stratum]
    starts = np.searchsorted(stream, np.arange(len(states) + 1)).tolist()
    clock = _clock(side, stream, starts)
    earlier, sessions = _sessions(states, rows, clock, starts)
    base = baselines(
        side.state.reference, side.state.inflation, side.state.measured_at, side.state.of_windows
    )
    rows = predicted(side.state, base, config.ignore, rows, earlier)
    segment = side.segment_of_stratum[rows.stratum]
    begin = put_on_bets(segment, clock, side.begun, side.watched_segments[stream])
    run = run_evidence(side.state, side.stream_of_stratum, side.evidence, base, rows, clock, begin)
    threshold = np.array([config.threshold(state.requests_per_day) for state in states])
    quiet[stream[(run.totals >= threshold[stream]).any(axis=0)]] = False

    strata = of_strata(side.state).last_per_group(rows.stratum, run.of_stratum)
    together = replace(
        side.state,
        drafted_requests=side.state.drafted_requests
        + np.bincount(rows.stratum, minlength=len(side.state.ready_ordinal)),
        joining=with_joining(side.state, rows, earlier),
        stratum_evidence=strata.evidence,
        stratum_mean_start=strata.mean_start,
        profiles=tally(side.state, base, rows),
        turns=with_turns(side.state, rows, earlier),
    )
    of_stream = side.evidence.last_per_group(stream, run.of_stream)
    begun = last_per_group(side.begun, segment, clock)
    newest = _pieces(side, rows) if quiet.any() else None
    missed = np.add.reduceat(gap, side.starts, dtype=np.int64).tolist()
    named = np.bincount(stream[rows.session != NO_SESSION], minlength=len(states)).tolist()
    counts = counts_of(side.batch, side.starts)
    return [
        changed(
            state,
            counts[place].after(state)
            | side.own(together, place)
            | {
                "stream_evidence": of_stream.evidence[place].copy(),
                "stream_mean_start": of_stream.mean_start[place].copy(),
                "begun": begun[side.first_segment[place] : side.first_segment[place + 1]].copy(),
                "profiles": side.own_profiles(together, place, state),
                "sessions": sessions[place],
                "in_session": state.in_session + named[place],
                "history": state.history.followed_by_piece(
                    newest.part(starts[place], starts[place + 1]), config.history
                ),
                "k_newest": k_newest[place],
                "k_changes": k_changes[place],
                "last_window_ended_at": last_ends[place],
                "windows_after_gap": state.windows_after_gap + missed[place],
            },
        )
        if newest and quiet[place]
        else None
        for place, state in enumerate(states)
    ]


def _quiet_but_for_alarms(side: SideBySide, states: list[StreamState], rows: Columns) -> NDArray[np.bool_]:
    """Of which streams [G] no row ends a step of the fold, unless it raises an alarm."""
    stream = side.stream_of_stratum[rows.stratum]
    steady = side.state.ready[rows.stratum] & in_cycles_under_way(side.state, rows)
    full = np.bincount(rows.stratum, minlength=len(side.state.growing)) >= requests_until_joining(side.state)
    steady &= ~full[rows.stratum]
    drafted = np.bincount(stream, minlength=len(states))
    steady &= (drafted < np.array([state.until_measured for state in states]))[stream]
    quiet: NDArray[np.bool_] = np.bincount(stream, weights=steady, minlength=len(states)) == drafted
    return quiet & (drafted > 0)


def _clock(side: SideBySide, stream: NDArray[np.intp], starts: list[int]) -> Ints:
    """How many drafted requests the stream of each row has had up to it."""
    drafted = np.bincount(side.stream_of_stratum, side.state.drafted_requests, len(starts) - 1)
    clock: Ints = drafted.astype(np.int64)[stream] + 1 + np.arange(len(stream)) - np.array(starts)[stream]
    return clock


def _pieces(side: SideBySide, rows: Columns) -> Piece | None:
    """The rows as pieces of histories, in which a stratum is that of its own stream."""
    if len(rows) == 0:
        return None
    columns = {name: getattr(rows, name) for name in COLUMNS}
    first = np.array(side.first_stratum)[side.stream_of_stratum[rows.stratum]]
    return Piece.of({**columns, "stratum": rows.stratum - first})


def _after_gaps(
    side: SideBySide, states: list[StreamState], batches: Sequence[ObservationBatch]
) -> tuple[NDArray[np.bool_], list[float]]:
    """Which observations [N] are windows after a gap, and each stream's last end of a window."""
    gap = np.zeros(len(side.batch), dtype=np.bool_)
    last_ends = [state.last_window_ended_at for state in states]
    for place, (batch, start) in enumerate(zip(batches, side.starts.tolist(), strict=True)):
        if "window" in batch.kind:
            gap[start : start + len(batch)], last_ends[place] = after_gap(
                windows_in(batch), batch.started_at, batch.ended_at, last_ends[place]
            )
    return gap, last_ends


def _rows(
    side: SideBySide, states: list[StreamState], k_varies: NDArray[np.bool_], evident: NDArray[np.bool_]
) -> Columns:
    """The evident observations of streams in which none is of a new segment or stratum."""
    batch, ends = side.batch, [*side.starts[1:].tolist(), len(side.batch)]
    settings = np.where(evident, settings_of(batch, k_varies), NO_SETTING).tolist()
    codes: list[int] = []
    sessions = np.zeros(len(batch), dtype=np.uint64)
    for place, (state, start, end) in enumerate(zip(states, side.starts.tolist(), ends, strict=True)):
        own = known_strata(state, batch.segment[start:end], settings[start:end])
        if own is None:
            evident[start:end] = False
            own = [0] * (end - start)
        first = side.first_stratum[place]
        codes += [first + code for code in own]
        if any(batch.session[start:end]):
            sessions[start:end] = session_keys(batch.session[start:end], own)
    at = np.flatnonzero(evident)
    return columns_at(side.state, batch, at, np.array(codes, dtype=np.uint16)[at], sessions[at])


def _sessions(
    states: list[StreamState], rows: Columns, clock: Ints, starts: list[int]
) -> tuple[Floats, list[OpenSessions]]:
    """Each row's session as it was before it [T, KNOWN], and each stream's table after its rows."""
    earlier, after = np.zeros((len(rows), KNOWN)), [state.sessions for state in states]
    if not rows.session.any():
        return earlier, after
    for place, (start, end) in enumerate(pairwise(starts)):
        own = slice(start, end)
        if start < end:
            earlier[own], after[place] = sessions_before(after[place], rows[own], int(clock[start]))
    return earlier, after


_OF_STRATUM = (  # columns of a state over its strata that a fold of watched strata reads or writes
    "segment_of_stratum",
    "setting_of_stratum",
    "drafted_requests",
    "reference",
    "ready_ordinal",
    "joining",
    "growing",
    "cut_off",
    "stratum_evidence",
    "stratum_mean_start",
    "windows",
    "inflation",
    "measured_at",
    "turns",
)
_WRITTEN = ("drafted_requests", "joining", "stratum_evidence", "stratum_mean_start", "turns")


@dataclass(frozen=True, slots=True, eq=False)
class SideBySide:
    """G streams. `state` has their C strata, and of each of them nothing that is not in _OF_STRATUM or in its
    profiles; the columns of `batch` [N] are those of their batches, one after the other."""

    state: StreamState
    first_stratum: list[int]  # [G + 1]
    stream_of_stratum: NDArray[np.intp]  # [C]
    first_segment: NDArray[np.int64]  # [G + 1]
    begun: NDArray[np.int64]  # of each stream's segments, one after the other
    evidence: Running  # [G, LANES] of each stream
    batch: ObservationBatch
    starts: NDArray[np.int64]  # [G] where each batch begins

    def own(self, together: StreamState, place: int) -> dict[str, Any]:
        """What a fold of watched strata has written, of the stream at this place: copies, which keep nothing
        of the other streams in memory."""
        strata = slice(*self.first_stratum[place : place + 2])
        return {
            name: after[strata].copy()
            for name in _WRITTEN
            if (after := getattr(together, name)) is not getattr(self.state, name)
        }

    @property
    def segment_of_stratum(self) -> NDArray[np.int64]:
        """[C] of the streams' segments one after the other."""
        return self.first_segment[self.stream_of_stratum] + self.state.segment_of_stratum

    @property
    def watched_segments(self) -> NDArray[np.int64]:
        """How many segments of each stream have a stratum with a baseline [G]."""
        segments = int(self.first_segment[-1])
        watched = watched_among(segments, self.segment_of_stratum, self.state.ready)
        return np.add.reduceat(watched, self.first_segment[:-1], dtype=np.int64)

    def own_profiles(self, together: StreamState, place: int, before: StreamState) -> tuple[Profile, ...]:
        strata = slice(*self.first_stratum[place : place + 2])
        return tuple(
            profile.with_current(after.current[strata].copy(), strays=0)
            for profile, after in zip(before.profiles, together.profiles, strict=True)
        )


def side_by_side(states: Sequence[StreamState], batches: Sequence[ObservationBatch]) -> SideBySide:
    """Of streams in which the same day and week are under way."""
    strata = np.array([len(state.ready_ordinal) for state in states])
    requests = np.array([len(batch) for batch in batches])
    streams = np.arange(len(states))
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(state, name) for state in states]) for name in _OF_STRATUM
    }
    return SideBySide(
        state=StreamState(
            **columns, profiles=tuple(map(_profile, zip(*(state.profiles for state in states), strict=True)))
        ),
        first_stratum=[0, *np.cumsum(strata).tolist()],
        stream_of_stratum=np.repeat(streams, strata),
        first_segment=np.concatenate([[0], np.cumsum([len(state.names) for state in states])]),
        begun=np.concatenate([state.begun for state in states]),
        evidence=of_streams(states),
        batch=joined(batches),
        starts=np.cumsum(requests) - requests,
    )


def _profile(parts: Sequence[Profile]) -> Profile:
    """Without what only the end of a cycle asks for."""

    def column(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])

    none, used = Profile.none(parts[0].cells), column("used")
    return replace(
        none,
        number=parts[0].number,
        current=column("current"),
        used=used,
        effect=column("effect") if used.any() else none.effect,
        variance=column("variance") if used.any() else none.variance,
    )


def joined(batches: Sequence[ObservationBatch]) -> ObservationBatch:
    """One after the other. Each of them was checked; ordinals increase within each only."""
    columns: dict[str, Any] = {}
    for item in fields(ObservationBatch):
        parts = [getattr(batch, item.name) for batch in batches]
        is_array = isinstance(parts[0], np.ndarray)
        columns[item.name] = np.concatenate(parts) if is_array else list(chain.from_iterable(parts))
    return ObservationBatch.unchecked(columns)
