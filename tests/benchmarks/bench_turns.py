"""Named sessions whose acceptance follows the turn: false alarms, and delays beside it. Prints one table.

"false": of streams of REQUESTS requests at A = 100,000 those with a false alarm; the last line says how many
may have one on the average. "found", "median", "longest": of a fall by DROP at request CHANGE of the streams
without a false alarm, those that are told, and after how many requests. Run it as

    python -m tests.benchmarks.bench_turns [--runs 40] [--seed 7000]
"""

from __future__ import annotations

import argparse
from typing import Any, Final

import numpy as np

from driftguard.detection import DetectorConfig, DriftOpened, StreamState, fold
from tests.detection.traffic import growing_sessions

REQUESTS: Final = 20_000
CHANGE, DROP, WITHIN = 16_000, 0.1, 1_000
BATCH: Final = 500

_ALIKE: Final = {"falls": 0.15, "turns": 50, "open_at_once": 8, "between": 0.0}
_USUAL: Final = {**_ALIKE, "between": 0.05}
ROWS: Final[dict[str, dict[str, Any]]] = {
    "falls by .15 in 50 turns": _USUAL,
    "falls by .08 in 50, all begin together": {**_ALIKE, "falls": 0.08, "open_at_once": 20},
    "falls by .10 in 30": {**_USUAL, "falls": 0.10, "turns": 30},
    "falls by .15 in 50, sessions do not differ": _ALIKE,
    "the same, some had begun before": {**_ALIKE, "some_begun": True},
    "falls by .15 at turn 25": {**_USUAL, "shape": lambda part: (part >= 0.5).astype(float)},
    "falls by .15 in the second half of 50": {
        **_USUAL,
        "shape": lambda part: np.maximum(0.0, 2.0 * part - 1.0),
    },
    "rises by .15 in 50": {**_USUAL, "falls": -0.15},
    "each in a way of its own, sd .10 in 50": {**_USUAL, "falls": 0.0, "slopes_differ": 0.1},
    "each wanders, by .02 a turn": {**_USUAL, "falls": 0.0, "wander": 0.02},
    "does not follow the turn": {**_USUAL, "falls": 0.0},
}


def first_alarm(seed: int, requests: int, **traffic: Any) -> int | None:
    """The place of the request at which the first alarm comes."""
    batch, state = growing_sessions(seed, requests, **traffic), StreamState()
    for begun in range(0, requests, BATCH):
        state, findings = fold(DetectorConfig(), state, batch[begun : begun + BATCH])
        if opened := [one.ordinal for one in findings if isinstance(one, DriftOpened)]:
            return opened[0]
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=7_000)
    asked = parser.parse_args()
    seeds = range(asked.seed, asked.seed + asked.runs)
    print(f"seeds {seeds[0]} to {seeds[-1]}")
    print(f"{'acceptance over the session':44} {'false':>9} {'found':>9} {'median':>7} {'longest':>8}")
    for name, traffic in ROWS.items():
        early = [seed for seed in seeds if first_alarm(seed, REQUESTS, **traffic)]
        alarms = [
            first_alarm(seed, CHANGE + WITHIN, drop=(CHANGE, DROP), **traffic)
            for seed in seeds
            if seed not in early
        ]
        delays = [at - CHANGE for at in alarms if at and at > CHANGE]
        told = f"{np.median(delays):7.0f} {max(delays):8}" if delays else f"{'-':>7} {'-':>8}"
        print(
            f"{name:44} {len(early):3} of {asked.runs:2} {len(delays):3} of {len(alarms):2} {told}",
            flush=True,
        )
    print(f"as stated, {REQUESTS / DetectorConfig().false_alarm_every:.2f} of the streams on the average")


if __name__ == "__main__":
    main()
