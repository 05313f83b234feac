"""Does what is told of a change hold its onset, and is a change at once called gradual? Prints one table.

RUNS streams per row (`tests/detection/ramps.py`), A = 100,000, nothing tuned. "certain": part of the alarms
that call the change gradual; "open": part of those that call it so at the end of their incident, or of the
traffic; "ever": part of those that call it so at any time; "held": part of those whose interval of the onset
(of the change point, where no gradual change is told) holds the true one; "step": part of those whose
interval of the change point holds it; "heldopen": part of the intervals told after the alarm that hold it;
"alarm", "width": medians of the hours from onset to alarm, and of the interval of the onset. Run it as

    python -m tests.benchmarks.bench_ramps [--runs 100] [--seed 40000]
"""

from __future__ import annotations

import argparse

import numpy as np

from tests.detection.ramps import BEFORE, HOUR, Fall, Found, found

FALLS = (
    Fall(60, 0, 0.05),
    Fall(60, 0, 0.10, silent_nights=True),
    Fall(600, 0, 0.20),
    Fall(60, 0, 0.10, silent_nights=True, rare=True),
    Fall(200, 0, 0.20, silent_nights=True, rare=True),
    Fall(300, 1, 0.20),
    Fall(300, 6, 0.10, silent_nights=True),
    Fall(60, 24, 0.10, silent_nights=True),
    Fall(100, 72, 0.10, silent_nights=True, rare=True),
    Fall(300, 168, 0.10, silent_nights=True),
    Fall(40, 168, 0.10, silent_nights=True, rare=True),
)


def _row(fall: Fall, runs: list[Found]) -> str:
    widths = [
        (last - first).total_seconds() / HOUR
        for run in runs
        if run.alarm.gradual is not None
        for first, last in (run.alarm.gradual.interval,)
    ]
    step = [run.alarm.interval[0] <= BEFORE + 1 <= run.alarm.interval[1] for run in runs]
    held = [run.holds(later.gradual) for run in runs for later in run.later if later.gradual is not None]
    numbers = (
        np.mean([run.certain for run in runs]),
        np.mean([run.certain_by_now for run in runs]),
        np.mean([bool(run.told) for run in runs]),
        np.mean([run.held for run in runs]),
        np.mean(step),
        np.mean(held) if held else np.nan,
        np.median([(run.alarm.ended_at - run.onset) / HOUR for run in runs]),
        np.median(widths) if widths else 0.0,
    )
    ugly = ", silent nights" * fall.silent_nights + ", a rare segment" * fall.rare
    name = f"{fall.drop:.2f} in {fall.hours:g} h at {fall.rate:g} an hour{ugly}"
    return f"{name:72} {len(runs):5} " + " ".join(f"{number:8.2f}" for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=40_000)
    asked = parser.parse_args()
    print(f"seeds {asked.seed} to {asked.seed + asked.runs - 1}")
    print(
        f"{'fall':72} alarms "
        + " ".join(
            f"{name:>8}" for name in ("certain", "open", "ever", "held", "step", "heldopen", "alarm", "width")
        )
    )
    for fall in FALLS:
        runs = [run for number in range(asked.runs) if (run := found(fall, asked.seed + number))]
        print(_row(fall, runs), flush=True)


if __name__ == "__main__":
    main()
