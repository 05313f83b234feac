"""Streams through the watch over goodput, without a database: when it raises an alarm, and of what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from driftguard.cost import goodput
from driftguard.cost.times import concurrency_of
from driftguard.records.documents.goodput import GoodputKind, GoodputWatch
from tests.cost.goodput_traffic import Machine

DAY = 86_400.0
_AT_ONCE = 100  # requests between two looks


class Alarm(NamedTuple):
    at: float  # seconds from the beginning
    kind: GoodputKind
    lost: float  # part of the tokens per second, of "slower"
    since: float  # seconds from the beginning, where the fall is said to have begun


class Stream:
    """`level`: A. Every alarm begins the evidence anew."""

    def __init__(self, seed: int, level: float, **machine: Any) -> None:
        self.rng = np.random.default_rng(seed)
        self.machine = Machine(**machine)
        self.start = self.machine.clock
        self.level = level
        self.watch = GoodputWatch()
        self._seq = 0
        self._unread: list[goodput.Numbered] = []

    def run(self, days: float, **told: Any) -> list[Alarm]:
        """Alarms of the next so many days. `told`: what all requests tell."""
        until, alarms = self.machine.clock + days * DAY, []
        while self.machine.clock < until:
            self._look(**told)
            if (alarm := self._alarm()) is not None:
                alarms.append(alarm)
                self.watch = goodput.closed(self.watch)
        return alarms

    def fold(self, days: float) -> None:
        """The next so many days, whatever the alarms are."""
        until = self.machine.clock + days * DAY
        while self.machine.clock < until:
            self._look()

    def _look(self, **told: Any) -> None:
        for request in self.machine.serve(self.rng, _AT_ONCE, **told):
            self._seq += 1
            self._unread.append(goodput.Numbered(self._seq, request))
        self.watch = goodput.fold(self.watch, self._unread)
        self._unread = [item for item in self._unread if item.seq > self.watch.seq]

    def _alarm(self) -> Alarm | None:
        now = self.machine.clock - self.start
        if (fall := goodput.fall_of(self.watch, self.level)) is not None:
            return Alarm(now, "slower", fall.lost, fall.blocks[0].first_at - self.start)
        bands = [concurrency_of(item.band) for item in self.watch.rivalries]
        if any(goodput.losing_in(self.watch, self.level, band) for band in bands):
            return Alarm(now, "speculation_loses", 0.0, now)
        return None


def until_alarm(
    seed: int, level: float, change: Mapping[str, float], *, days: float, **machine: Any
) -> Alarm | None:
    """The first alarm in so many days after a day without the change; None where there is none."""
    stream = Stream(seed, level, **machine)
    stream.run(1.0)
    for name, value in change.items():
        setattr(stream.machine, name, value)
    alarms = stream.run(days)
    return alarms[0] if alarms else None
