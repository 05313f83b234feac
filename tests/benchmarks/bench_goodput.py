"""How often does the watch over goodput raise a false alarm, and how soon a true one? How often is a fall
called over that lasts, how soon one that does not, and is a further one told meanwhile? How often is
speculation said to lose that does not, where few requests have their like on the other side, how soon one
that does? Prints five tables.

False alarms: STREAMS streams of ten days per row at A = LOW blocks, so that there would be many: "at most" is
what the guarantee allows, blocks / A. Delays: medians and tenths at A of 90 days, of a change after one day
without. One request every ten seconds; times have a Pareto tail without a mean, and the machine's speed
wanders. Ends: of a fall that begins after a day; five days of it, in which every end is false and the fall
is taken for open again at once; then the true end, or one half as much again at which it falls further.
Speculation against none: streams of two days at A = LOW_RIVALS blocks; requests without are faster by exactly
what they may be, on average where it wanders. Delays at A of 90 days, of a change after half a day in which
both were as fast. Nothing is tuned per row. `--only` runs one of the tables. Run it as

    python -m tests.benchmarks.bench_goodput [--streams 8] [--seed 50000] [--only rivals]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

import numpy as np

from driftguard.cost import goodput
from driftguard.records.documents.goodput import GoodputWatch, Watched
from tests.cost.goodput_runs import DAY, Stream, until_alarm
from tests.cost.rival_traffic import WINDOW, Rivals, RivalStream

LOW: Final = 300.0
DAYS: Final = 10.0
OPEN_DAYS: Final = 5.0
LOW_RIVALS: Final = 30.0
TWO_DAYS: Final = 576  # windows
HALF_A_DAY: Final = 144
AT_ONCE: Final = 24
QUIET: Final[Mapping[str, Mapping[str, Any]]] = {
    "mood .05, half an hour": {},
    "mood .15, half an hour": {"mood": 0.15},
    "mood .15, four hours": {"mood": 0.15, "mood_minutes": 240.0},
    "mood .10, a day": {"mood": 0.10, "mood_minutes": 1440.0},
    "load doubles and halves in a day": {"daily": 2.0},
    "the same, mood .10, twice as slow per twice the load": {"daily": 2.0, "mood": 0.1, "slope": 1.0},
    "a fifth of the requests stall, spread .4": {"stalls": 0.2, "noise": 0.4},
    "speculation as fast as none, a tenth without": {
        "without": 0.1,
        "per_draft": 0.0,
        "acceptance": 0.0,
        "mood": 0.1,
    },
}
CHANGES: Final[Mapping[str, tuple[Mapping[str, float], Mapping[str, Any]]]] = {
    "20% slower": ({"slower": 1.25}, {}),
    "30% slower": ({"slower": 1.43}, {}),
    "30% slower, mood .15": ({"slower": 1.43}, {"mood": 0.15}),
    "half as fast": ({"slower": 2.0}, {}),
    "speculation from +23% to -16%, a tenth without": (
        {"load": 14.0, "per_draft": 0.0212},
        {"without": 0.1, "load": 4.0, "acceptance": 0.85, "per_draft": 0.0129},
    ),
}
LEAST: Final = -math.log1p(-goodput.LEAST_GAIN)
AS_FAST: Final[Mapping[str, Rivals]] = {
    "20 with, 240 without": Rivals(without=240, faster=LEAST),
    "the same, gain of exactly 0": Rivals(without=240),
    "the same, times of those with spread .6": Rivals(without=240, faster=LEAST, noise_speculating=0.6),
    "20 with, 60 without": Rivals(faster=LEAST),
    "20 with, 20 without": Rivals(without=20, faster=LEAST),
    "27 with, 3 without": Rivals(speculating=27, without=3, faster=LEAST),
    "20 with, 60 without in bursts of tasks": Rivals(faster=LEAST, bursts=0.15),
    "20 with, 120 without, a restart every 100 minutes": Rivals(without=120, faster=LEAST, restarts=0.05),
    "20 with, 15 to 240 without in a day": Rivals(faster=LEAST, daily=4.0),
    "20 with, 60 without, gain wanders by .05 in an hour": Rivals(faster=LEAST, wander=0.05),
    "the same, by .10": Rivals(faster=LEAST, wander=0.1),
    "the same, by .10 in four hours": Rivals(faster=LEAST, wander=0.1, wander_minutes=240.0),
}
LOSING: Final[Mapping[str, Rivals]] = {
    "20 with, 240 without, 10% lost": Rivals(without=240, faster=0.105),
    "20 with, 60 without, 10% lost": Rivals(faster=0.105),
    "20 with, 20 without, 10% lost": Rivals(without=20, faster=0.105),
    "20 with, 20 without, 20% lost": Rivals(without=20, faster=0.223),
    "27 with, 3 without, 20% lost": Rivals(speculating=27, without=3, faster=0.223),
}


def _false_alarms(streams: int, seed: int) -> None:
    print(f"{'false alarms, A = 300 blocks':55} {'blocks':>7} {'slower':>7} {'loses':>7} {'at most':>8}")
    for name, machine in QUIET.items():
        alarms = [
            alarm for number in range(streams) for alarm in Stream(seed + number, LOW, **machine).run(DAYS)
        ]
        blocks = streams * DAYS * DAY / goodput.BLOCK_SECONDS
        kinds = [sum(alarm.kind == kind for alarm in alarms) for kind in ("slower", "speculation_loses")]
        print(f"{name:55} {blocks:7,.0f} {kinds[0]:7} {kinds[1]:7} {blocks / LOW:8.1f}", flush=True)


def _delays(streams: int, seed: int) -> None:
    level = goodput.alarm_level(90.0)
    print(f"\n{'minutes to the alarm, A of 90 days':55} {'found':>7} {'10%':>7} {'median':>7} {'90%':>7}")
    for name, (change, machine) in CHANGES.items():
        found = [until_alarm(seed + number, level, change, days=2.0, **machine) for number in range(streams)]
        delays = [(alarm.at - DAY) / 60.0 for alarm in found if alarm is not None]
        part = np.quantile(delays, (0.1, 0.5, 0.9)) if delays else [np.nan] * 3
        print(
            f"{name:55} {len(delays):3} of {streams} " + " ".join(f"{value:7.0f}" for value in part),
            flush=True,
        )


class _Open:
    """A stream with an open fall of this factor."""

    def __init__(self, seed: int, factor: float, machine: Mapping[str, Any]) -> None:
        self.stream = Stream(seed, goodput.alarm_level(90.0), **machine)
        self.opened = Watched(UUID(int=seed), "slower", slower=math.log(factor))
        self.stream.run(1.0)
        self.stream.machine.slower = factor
        self.stream.fold(0.05)
        self.open_again()

    def open_again(self) -> None:
        self.stream.watch = goodput.with_opened(self.stream.watch, self.opened)

    def false_ends(self, days: float) -> int:
        found, until = 0, self.stream.machine.clock + days * DAY
        while self.stream.machine.clock < until:
            self.stream.fold(900.0 / DAY)
            if goodput.is_over(self.stream.watch):
                found += 1
                self.open_again()
        return found

    def minutes_until(self, slower: float, is_so: Callable[[GoodputWatch], bool]) -> float:
        """From a change of all times to this factor on; infinite where it takes longer than three days."""
        self.stream.machine.slower = slower
        at = self.stream.machine.clock
        while not is_so(self.stream.watch):
            if self.stream.machine.clock > at + 3.0 * DAY:
                return math.inf
            self.stream.fold(5.0 * 60.0 / DAY)
        return (self.stream.machine.clock - at) / 60.0


def _ends(streams: int, seed: int) -> None:
    level = goodput.alarm_level(90.0)
    print(
        f"\n{'ends of a fall':36} {'false':>6} {'days':>5} {'10%':>6} {'median':>6} {'90%':>6} {'further':>8}"
    )
    for name, machine in list(QUIET.items())[:4]:
        for factor in (1.5, 2.0):
            false, ends, further = 0, [], []
            for number in range(streams):
                lasting = _Open(seed + number, factor, machine)
                false += lasting.false_ends(OPEN_DAYS)
                ends.append(lasting.minutes_until(1.0, goodput.is_over))
                deeper = _Open(seed + number, factor, machine)
                told = deeper.minutes_until(
                    1.5 * factor, lambda watch: goodput.fall_of(watch, level) is not None
                )
                further.append(told < DAY / 60.0)
            part = np.quantile(ends, (0.1, 0.5, 0.9))
            print(
                f"{name + f', {factor:g} times slower':36} {false:6} {streams * OPEN_DAYS:5.0f} "
                + " ".join(f"{value:6.0f}" for value in part)
                + f" {sum(further):3} of {streams}",
                flush=True,
            )


def _rivals(streams: int, seed: int) -> None:
    print(f"\n{'speculation said to lose, A = 30 blocks':55} {'said':>7} {'streams':>7} {'at most':>8}")
    for name, rivals in AS_FAST.items():
        said = [
            len(RivalStream(seed + number, LOW_RIVALS).statements(rivals, TWO_DAYS))
            for number in range(streams)
        ]
        most = streams * TWO_DAYS / (2.0 * goodput.BANDS * LOW_RIVALS)
        print(f"{name:55} {sum(said):7} {sum(map(bool, said)):7} {most:8.1f}", flush=True)
    print(f"\n{'minutes until it is said, A of 90 days':55} {'found':>7} {'10%':>7} {'median':>7} {'90%':>7}")
    for name, rivals in LOSING.items():
        delays = []
        for number in range(streams):
            stream = RivalStream(seed + number, goodput.alarm_level(90.0))
            stream.statements(replace(rivals, faster=0.0), HALF_A_DAY)
            first: list[int] = []
            for _ in range(TWO_DAYS // AT_ONCE):
                first = first or stream.statements(rivals, AT_ONCE)
            delays.append((first[0] - HALF_A_DAY) * WINDOW / 60.0 if first else math.inf)
        part = np.quantile(delays, (0.1, 0.5, 0.9), method="lower")
        found = sum(map(math.isfinite, delays))
        print(f"{name:55} {found:3} of {streams} " + " ".join(f"{value:7.0f}" for value in part), flush=True)


TABLES: Final[Mapping[str, Callable[[int, int], None]]] = {
    "false": _false_alarms,
    "delays": _delays,
    "ends": _ends,
    "rivals": _rivals,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seed", type=int, default=50_000)
    parser.add_argument("--only", choices=TABLES)
    asked = parser.parse_args()
    print(f"seeds {asked.seed} to {asked.seed + asked.streams - 1}")
    for name, table in TABLES.items():
        if asked.only in (None, name):
            table(asked.streams, asked.seed)


if __name__ == "__main__":
    main()
