"""Streams that fall bit by bit, or at once, on ugly traffic: a rare segment, nights without a request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from driftguard.detection import (
    DetectorConfig,
    DriftClosed,
    DriftOpened,
    DriftSeenGradual,
    ObservationBatch,
    StreamState,
    fold,
)
from driftguard.records.documents.acceptance import Gradual
from tests.detection.traffic import BETWEEN_REQUESTS, START

HOUR, DAY = 3_600.0, 86_400.0
AWAKE = 16 * HOUR  # of each day, where nights are silent
BEFORE, AFTER = 3_000, 14_000  # requests
STEP = 500
CONFIG = DetectorConfig()


@dataclass(frozen=True, slots=True)
class Fall:
    """By `drop` in `hours` (0: at once), at `rate` an hour. `rare`: a tenth are of another segment."""

    rate: float
    hours: float
    drop: float
    silent_nights: bool = False
    rare: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The alarm of one run, and what was told of it while its incident was open. `onset`: when it began to
    fall, seconds since 1970 UTC."""

    alarm: DriftOpened
    onset: float
    later: tuple[DriftSeenGradual, ...]

    @property
    def certain(self) -> bool:
        return self.alarm.gradual is not None and self.alarm.gradual.certain

    @property
    def held(self) -> bool:
        """Does what is told hold the onset?"""
        first, last = self.alarm.interval
        if self.alarm.gradual is None:
            return first <= BEFORE + 1 <= last
        return self.holds(self.alarm.gradual)

    @property
    def told(self) -> list[Gradual]:
        """As which gradual change it was told, at the alarm and later."""
        all_told = [self.alarm.gradual, *(finding.gradual for finding in self.later)]
        return [told for told in all_told if told is not None and told.certain]

    @property
    def certain_by_now(self) -> bool:
        newest = self.later[-1].gradual if self.later else self.alarm.gradual
        return newest is not None and newest.certain

    def holds(self, told: Gradual) -> bool:
        begin, end = (at.timestamp() for at in told.interval)
        return begin - 0.001 <= self.onset <= end + 0.001


def simulate(fall: Fall, seed: int) -> tuple[ObservationBatch, float]:
    """(requests, onset) of a stream that falls after its first BEFORE requests."""
    rng = np.random.default_rng(seed)
    count = BEFORE + AFTER
    seconds = np.cumsum(rng.exponential(HOUR / fall.rate, count))
    if fall.silent_nights:
        seconds = seconds // AWAKE * DAY + seconds % AWAKE
    since = seconds - seconds[BEFORE]
    done = (since >= 0.0) * 1.0 if fall.hours == 0.0 else np.clip(since / (HOUR * fall.hours), 0.0, 1.0)
    mean = 0.65 - fall.drop * done
    precision = mean * (1.0 - mean) / BETWEEN_REQUESTS**2 - 1.0
    acceptance = rng.beta(mean * precision, (1.0 - mean) * precision)
    drafted = rng.integers(20, 200, count)
    rare = rng.random(count) < 0.1 if fall.rare else np.zeros(count, dtype=np.bool_)
    batch = ObservationBatch.of(
        np.arange(1, count + 1),
        ["rare" if own else "chat" for own in rare.tolist()],
        drafted,
        rng.binomial(drafted, acceptance),
        START + seconds,
    )
    return batch, START + float(seconds[BEFORE])


def found(fall: Fall, seed: int, *, until_over: bool = False) -> Found | None:
    """The first alarm, unless it is a false one before the fall, or there is none; and what was told of it
    until its incident ended, or the traffic, or, with `until_over`, until it was told that it is over."""
    batch, onset = simulate(fall, seed)
    state, alarm = StreamState(), None
    later: list[DriftSeenGradual] = []
    for place in range(0, len(batch), STEP):
        state, findings = fold(CONFIG, state, batch[place : place + STEP])
        for finding in findings:
            if alarm is None and isinstance(finding, DriftOpened):
                if finding.ordinal <= BEFORE:
                    return None
                alarm = finding
            elif alarm is not None and isinstance(finding, DriftSeenGradual | DriftClosed):
                if finding.direction != alarm.direction:
                    continue
                if isinstance(finding, DriftClosed):
                    if finding.left:
                        continue  # it goes on in other segments
                    return Found(alarm, onset, tuple(later))
                later.append(finding)
                if until_over and finding.gradual is not None and finding.gradual.over:
                    return Found(alarm, onset, tuple(later))
    return None if alarm is None else Found(alarm, onset, tuple(later))
