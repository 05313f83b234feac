"""Everything a detector remembers about one stream, as columns over strata.

A state is a value: folding never changes one, it makes the next. The arrays with a first dimension C
run over the stream's strata (`strata.py`) in order of first appearance; LANES are the bets
(`bets.py`): ten that acceptance fell, then ten that it rose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from operator import attrgetter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.findings import BaselineReason, Direction, WhyBegun
from driftguard.detection.observations import ObservationBatch
from driftguard.detection.state.history import History
from driftguard.detection.statistics.baseline import FIRST_CHECK, SUMS
from driftguard.detection.statistics.bets import BETS, LANES, NOT_CUT
from driftguard.detection.statistics.factors import CELLS, NOT_BEGUN, Profiles, no_profiles
from driftguard.detection.statistics.level_shift import BINS, OF_BIN
from driftguard.detection.statistics.long_run_variance import OF_BLOCKS, SCALES
from driftguard.detection.statistics.sessions import OpenSessions
from driftguard.detection.statistics.strata import (
    NO_SETTING,
    SELECTION,
    Setting,
    assign,
    is_by_first,
    is_selected,
    is_window,
    settings_of,
    unpack,
    varying,
    why_new,
)
from driftguard.detection.statistics.turns import KEPT, LEVEL, OF_TURNS
from driftguard.detection.statistics.windows import LEARNED, WINDOW_REFERENCE
from driftguard.records.positions import Positions

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DIRECTIONS: tuple[Direction, Direction] = ("down", "up")
NOT_READY = -1
OPERATOR, LASTED = 1, 2  # why a level was accepted as normal
WAITING, RECOVERED, SILENT = 0, 1, 2  # outcomes of one recovery test (recovery.py)
ALONE = -1  # a segment that takes part in no common test
AT_ONCE, POSSIBLY, CERTAINLY = 0, 1, 2  # whether a change came gradually, as it was told
NEVER = 2**62  # above every count of observations
# Of a distance between before and after: requests, fresh^2, fresh x moved, moved^2, see recovery.py
UNTOLD: Floats = np.array([2.0, 2.0, 0.0, 0.0])
GROWN = SUMS + CELLS + LEVEL  # sums over requests, how many of each cell of each cycle, and of their turns


@dataclass(frozen=True, slots=True, eq=False)
class OpenIncident:
    """A change that was reported and is not over.

    D changed segments, strongest evidence first, then those that joined it. Each has one of the K recovery
    tests to itself. Those of an alarm that came from the stream as a whole also take part in a common one.
    """

    opened_ordinal: int
    change_point: int  # ordinal, of its alarm
    change_point_ms: int  # milliseconds since 1970 UTC
    evidence_since: int  # ordinal after which the evidence of its alarm counted
    earliest: int  # ordinal at which the interval of the change point begins
    told_gradual: int  # AT_ONCE, POSSIBLY or CERTAINLY
    next_look: int  # drafted observations of the stream at which it is asked again whether it came gradually
    segments: NDArray[np.uint8]  # [D]
    evidence: Floats  # [D] each segment's sum M_c at the alarm
    alarm_ordinal: Ints  # [D] at which the segment was named
    began: Ints  # [D] ordinal at which it changed: later than `change_point` where it joined
    test: Ints  # [D] index of its own recovery test
    common: Ints  # [D] index of the one that it takes part in, or ALONE
    halfway: Floats  # [K] of the distance between before and after, per request, as far as is sure; above 0
    wealth: Floats  # [K, BETS]
    seen: Ints  # [K] requests tested
    last_seen: Ints  # [K] count of the stream's drafted observations when last seen
    outcome: Ints  # [K] see recovery.py
    told: Floats  # [K, 4] what requests tell of that distance, as UNTOLD

    def joined_by(self, more: OpenIncident) -> OpenIncident:
        """With the segments of `more` and their tests."""
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(self, name), getattr(more, name)])
            for name in (*_OF_SEGMENTS, *_OF_TESTS)
        }
        tests = len(self.outcome)
        columns["test"] = np.concatenate([self.test, more.test + tests])
        shared = np.where(more.common == ALONE, ALONE, more.common + tests)
        columns["common"] = np.concatenate([self.common, shared])
        return replace(self, **columns)

    def of_segments(self, own: NDArray[np.bool_]) -> OpenIncident:
        """With these of its segments [D] only, and their tests."""
        tests = self.tests_of(own)
        columns = {name: getattr(self, name)[own] for name in _OF_SEGMENTS}
        columns |= {name: getattr(self, name)[tests] for name in _OF_TESTS}
        place = np.cumsum(tests) - 1
        common = self.common[own]
        columns |= {"test": place[self.test[own]], "common": np.where(common == ALONE, ALONE, place[common])}
        return replace(self, **columns)

    def tests_of(self, own: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Those [K] of these of its segments [D]."""
        return np.isin(np.arange(len(self.outcome)), np.concatenate([self.test[own], self.common[own]]))

    def without_common(self, tests: NDArray[np.bool_]) -> OpenIncident:
        """With segments that take no part any more in what of these tests [K] is a common one."""
        done = (self.common != ALONE) & tests[self.common]
        everything = np.ones(len(self.segments), dtype=np.bool_)
        return replace(self, common=np.where(done, ALONE, self.common)).of_segments(everything)

    def members(self, test: int) -> NDArray[np.bool_]:
        """Which of its segments [D] a test is of."""
        own: NDArray[np.bool_] = (self.test == test) | (self.common == test)
        return own

    def names(self, state: StreamState) -> tuple[str, ...]:
        """Of its segments."""
        return tuple(state.names[code] for code in self.segments.tolist())

    def since(self, segments: int) -> Ints:
        """The ordinal from which on each of the stream's segments [S] is changed, NEVER of the others."""
        began = np.full(segments, NEVER)
        began[self.segments] = self.began
        return began

    def since_in(self, segment: int) -> int:
        """The ordinal from which on one of its segments is changed."""
        return int(self.began[self.segments == segment][0])

    def tested_anew(self, now: int) -> OpenIncident:
        """With recovery tests that have not begun; `now` as in `untested`."""
        return replace(self, **untested(len(self.outcome), now))


_OF_SEGMENTS = ("segments", "evidence", "alarm_ordinal", "began")
_OF_TESTS = ("halfway", "wealth", "seen", "last_seen", "outcome", "told")


def untested(tests: int, now: int) -> dict[str, Any]:
    """Columns of an incident's tests that have not begun; `now`: the stream's drafted observations so far."""
    zero = np.zeros(tests, dtype=np.int64)
    return {
        "wealth": np.zeros((tests, BETS)),
        "seen": zero,
        "last_seen": zero + now,
        "outcome": zero + WAITING,
    }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StreamState:
    """One stream's detector. `StreamState()` starts one; `to_bytes` and `from_bytes` keep it."""

    ordinal: int = -1  # of the last observation folded
    requests: int = 0  # observations, with or without drafted tokens
    undrafted: int = 0
    undrafted_in_a_row: int = 0
    first_ended_at: float = 0.0  # earliest and latest end of any observation, seconds since 1970
    last_ended_at: float = 0.0
    requests_per_day: float = 0.0  # when the first segment became ready; then of whole days, see cycles.py
    steady_since: float = 0.0  # seconds since 1970: first segment ready, or the last incident ended
    k_newest: int = -1  # of a drafted request that told its K, see strata.py
    k_changes: int = 0
    names: tuple[str, ...] = ()  # [S] segments
    segment_of_stratum: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, dtype=np.uint8))  # [C]
    setting_of_stratum: Ints = field(default_factory=lambda: _ints(0))  # [C] packed, see strata.py
    drafted_requests: Ints = field(default_factory=lambda: _ints(0))  # [C]
    reference: Floats = field(default_factory=lambda: np.zeros((0, SUMS)))  # [C, SUMS]
    reference_size: Ints = field(default_factory=lambda: _ints(0))  # [C] requests at the next check
    reference_since: Floats = field(default_factory=lambda: np.zeros(0))  # [C] seconds since 1970
    learning: Ints = field(default_factory=lambda: _ints(0))  # [L] strata whose reference period is under way
    bins: Floats = field(default_factory=lambda: np.zeros((0, BINS, OF_BIN)))  # [L, ..] see level_shift.py
    ready_ordinal: Ints = field(default_factory=lambda: _ints(0))  # [C] or NOT_READY
    # [C, 2, GROWN] requests after it that may still join the reference period: see reference_period.py
    joining: Floats = field(default_factory=lambda: np.zeros((0, 2, GROWN)))
    growing: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))  # [C]
    stratum_evidence: Floats = field(default_factory=lambda: np.zeros((0, LANES)))  # [C, LANES] R_cj
    # [C, LANES] see bets.py
    stratum_mean_start: Floats = field(default_factory=lambda: np.zeros((0, LANES)))
    cut_off: Floats = field(default_factory=lambda: np.zeros((0, LANES)))  # [C, LANES] b_j, see bets.py
    stream_evidence: Floats = field(default_factory=lambda: np.zeros(LANES))  # [LANES] G_j
    stream_mean_start: Floats = field(default_factory=lambda: np.zeros(LANES))  # [LANES]
    begun: Ints = field(default_factory=lambda: _ints(0))  # [S] see evidence.py
    evidence_since: tuple[int, int] = (-1, -1)  # ordinal after which evidence counts: down, up
    # drafted requests from which on an alarm is looked at, where it was not confirmed before: confirmation.py
    next_alarm: tuple[int, int] = (0, 0)
    incidents: tuple[OpenIncident | None, OpenIncident | None] = (None, None)  # down, up
    # [C] a new level was accepted as normal, by whom (OPERATOR, LASTED): the baseline is (being) relearned
    accepted_anew: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, dtype=np.uint8))
    windows: Floats = field(default_factory=lambda: np.zeros((0, LEARNED)))  # [C, LEARNED] see windows.py
    last_window_ended_at: float = math.nan  # seconds since 1970
    windows_after_gap: int = 0  # counted, never evidence
    # sums over the windows that tell both, see windows.py
    running_requests: int = 0
    started_requests: int = 0
    # [C, SCALES, OF_BLOCKS] of how many observations [C], up to which ordinal [C]: see dependence.py
    blocks: Floats = field(default_factory=lambda: np.zeros((0, SCALES, OF_BLOCKS)))
    counted: Ints = field(default_factory=lambda: _ints(0))
    counted_until: Ints = field(default_factory=lambda: _ints(0))
    inflation: Floats = field(default_factory=lambda: np.zeros(0))  # [C] f of long_run_variance.py
    measured_at: Ints = field(default_factory=lambda: _ints(0))  # [C] drafted_requests when it was measured
    recoveries: Ints = field(default_factory=lambda: _ints(0))  # [C] incidents that it came back from
    next_measured: int = 0  # drafted observations of the stream at which it is measured next
    profiles: Profiles = field(default_factory=no_profiles)
    sessions: OpenSessions = field(default_factory=OpenSessions.empty)
    in_session: int = 0  # drafted requests that gave their session
    history: History = field(default_factory=History.empty)
    # number of the day under way, requests before it, whole days that requests_per_day knows: see cycles.py
    day_begun: tuple[int, int, int] = (NOT_BEGUN, 0, 0)
    # [R, 3] a stratum, and from which ordinal to which its level was another one, as told by incidents that
    # are over, or (from 0) something else was expected of it; as far as the history reaches
    past_changes: Ints = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))
    turns: Floats = field(default_factory=lambda: np.zeros((0, KEPT, OF_TURNS)))  # [C, ..] see turns.py
    # [C, 2] when the newest incident that named it began, by direction, in milliseconds since 1970: cycles.py
    onsets: Ints = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))

    @property
    def ready(self) -> NDArray[np.bool_]:
        ready: NDArray[np.bool_] = self.ready_ordinal != NOT_READY
        return ready

    @property
    def of_windows(self) -> NDArray[np.bool_]:
        return is_window(self.setting_of_stratum)

    @property
    def selection(self) -> Floats:
        """How far the mean may move because of what K selects [C], in standard deviations."""
        return np.where(is_selected(self.setting_of_stratum), SELECTION, 0.0)

    @property
    def until_measured(self) -> int:
        """How many more drafted observations it takes until the dependence is measured (dependence.py): never
        while no stratum has a baseline."""
        if not self.ready.any():
            return NEVER
        return max(self.next_measured - int(self.drafted_requests.sum()), 1)

    def positions_of(self, stratum: int) -> Positions:
        """Which its requests are judged by."""
        return "first" if is_by_first(self.setting_of_stratum)[stratum] else "all"

    def newest_baseline(self, segment: int) -> int | None:
        """The segment's stratum that became ready last."""
        same = np.flatnonzero(self.ready & (self.segment_of_stratum == segment))
        return int(same[self.ready_ordinal[same].argmax()]) if len(same) else None

    def setting_of(self, code: int) -> Setting:
        return unpack(int(self.setting_of_stratum[code]))

    def why_learned(self, code: int) -> WhyBegun:
        """Why stratum `code` has (or needs) a baseline of its own: against the segment's newest before."""
        if self.accepted_anew[code]:
            by_itself = self.accepted_anew[code] == LASTED
            return WhyBegun(BaselineReason.RISE_LASTED if by_itself else BaselineReason.ACCEPTED)
        return why_new(int(self.setting_of_stratum[code]), self._earlier_setting(code))

    def _earlier_setting(self, code: int) -> int | None:
        """Of the segment's newest baseline before that of stratum `code`."""
        before = self.ready & (self.segment_of_stratum == self.segment_of_stratum[code])
        if self.ready[code]:
            before &= self.ready_ordinal < self.ready_ordinal[code]
        earlier = np.flatnonzero(before)
        if not len(earlier):
            return None
        return int(self.setting_of_stratum[earlier[self.ready_ordinal[earlier].argmax()]])


def changed(state: StreamState, columns: dict[str, Any]) -> StreamState:
    """What `replace` gives, in a third of its time: for folds of thousands of states."""
    after = object.__new__(StreamState)
    values = dict(zip(_NAMES, _VALUES(state), strict=True)) | columns
    for put, value in zip(_PUTS, values.values(), strict=True):
        put(after, value)
    return after


_NAMES = [item.name for item in fields(StreamState)]
_VALUES = attrgetter(*_NAMES)
_PUTS = [getattr(StreamState, name).__set__ for name in _NAMES]


def known_strata(state: StreamState, segments: Sequence[str], settings: Sequence[int]) -> list[int] | None:
    """The stratum of each observation [N]; None where one has a segment or a stratum that is new."""
    of_segment = [state.names[segment] for segment in state.segment_of_stratum.tolist()]
    known = dict(zip(zip(of_segment, state.setting_of_stratum.tolist(), strict=True), count()))
    codes = list(map(known.get, zip(segments, settings, strict=True)))
    if None not in codes:
        return cast("list[int]", codes)
    names, strata, assigned = _assigned(state, segments, settings)
    new = len(names) > len(state.names) or len(strata) > len(state.ready_ordinal)
    return None if new else assigned


def _assigned(
    state: StreamState, segments: Sequence[str], settings: Sequence[int]
) -> tuple[list[str], list[tuple[int, int]], list[int]]:
    """The names and the strata (segment, setting) that the state knows after these observations [N], those
    it knew before first, and the stratum of each [N]."""
    names = list(state.names)
    strata = list(zip(state.segment_of_stratum.tolist(), state.setting_of_stratum.tolist(), strict=True))
    return names, strata, assign(names, strata, zip(segments, settings, strict=True))


def with_varying_k(
    state: StreamState, batch: ObservationBatch
) -> tuple[ObservationBatch, NDArray[np.bool_], int, int]:
    """(batch, K varies [N], k_newest, k_changes): the batch without the K of requests that are judged by
    their first position because K varies; in which of the others K varies too; the state's two after it."""
    k = batch.num_speculative_tokens
    told = (k >= 0) & (batch.drafted > 0)
    if "window" in batch.kind:
        told &= np.array([kind == "request" for kind in batch.kind], dtype=np.bool_)
    varies = np.zeros(len(k), dtype=np.bool_)
    varies[told], newest, changes = varying(state.k_newest, state.k_changes, k[told])
    by_first = varies & (batch.first_drafted >= 0)
    if by_first.any():
        batch = replace(batch, num_speculative_tokens=np.where(by_first, -1, k))
    return batch, varies & ~by_first, newest, changes


def with_strata(
    state: StreamState, batch: ObservationBatch, evident: NDArray[np.bool_], k_varies: NDArray[np.bool_]
) -> tuple[StreamState, NDArray[np.uint16]]:
    """The state with a row for each new stratum of the `evident` observations, and their strata [N]."""
    settings = np.where(evident, settings_of(batch, k_varies), NO_SETTING).tolist()
    names, strata, of_each = _assigned(state, batch.segment, settings)
    codes = np.array(of_each, dtype=np.uint16)
    added = len(strata) - len(state.setting_of_stratum)
    if len(names) > len(state.names):
        begun = np.concatenate([state.begun, _ints(len(names) - len(state.names))])
        state = replace(state, names=tuple(names), begun=begun)
    if added == 0:
        return state, codes
    setting_of_stratum = np.array([setting for _, setting in strata], dtype=np.int64)
    sizes = np.where(is_window(setting_of_stratum[-added:]), WINDOW_REFERENCE, FIRST_CHECK)
    return replace(
        state,
        segment_of_stratum=np.array([segment for segment, _ in strata], dtype=np.uint8),
        setting_of_stratum=setting_of_stratum,
        drafted_requests=np.concatenate([state.drafted_requests, _ints(added)]),
        reference=np.concatenate([state.reference, np.zeros((added, SUMS))]),
        reference_size=np.concatenate([state.reference_size, sizes]),
        reference_since=np.concatenate([state.reference_since, np.zeros(added)]),
        ready_ordinal=np.concatenate([state.ready_ordinal, _ints(added) + NOT_READY]),
        joining=np.concatenate([state.joining, np.zeros((added, 2, GROWN))]),
        growing=np.concatenate([state.growing, np.zeros(added, dtype=np.bool_)]),
        stratum_evidence=np.concatenate([state.stratum_evidence, np.zeros((added, LANES))]),
        stratum_mean_start=np.concatenate([state.stratum_mean_start, np.zeros((added, LANES))]),
        cut_off=np.concatenate([state.cut_off, np.tile(NOT_CUT, (added, 1))]),
        accepted_anew=np.concatenate([state.accepted_anew, np.zeros(added, dtype=np.uint8)]),
        windows=np.concatenate([state.windows, np.zeros((added, LEARNED))]),
        blocks=np.concatenate([state.blocks, np.zeros((added, SCALES, OF_BLOCKS))]),
        counted=np.concatenate([state.counted, _ints(added)]),
        counted_until=np.concatenate([state.counted_until, _ints(added) - 1]),
        inflation=np.concatenate([state.inflation, np.ones(added)]),
        measured_at=np.concatenate([state.measured_at, _ints(added)]),
        recoveries=np.concatenate([state.recoveries, _ints(added)]),
        profiles=tuple(profile.followed_by(added) for profile in state.profiles),
        turns=np.concatenate([state.turns, np.zeros((added, KEPT, OF_TURNS))]),
        onsets=np.concatenate([state.onsets, np.zeros((added, 2), dtype=np.int64)]),
    ), codes


def _ints(length: int) -> Ints:
    return np.zeros(length, dtype=np.int64)
