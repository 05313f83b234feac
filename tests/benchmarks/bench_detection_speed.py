"""Microseconds per record of the detector: one stream, 8 segments, batches of 1, 100 and 5,000.

CPU time, which for one thread that only computes is the time on an idle core. Run it as
python -m tests.benchmarks.bench_detection_speed
"""

from __future__ import annotations

import time

import numpy as np

from driftguard.detection import DetectorConfig, ObservationBatch, StreamState, fold

SEGMENTS = [f"segment {number}" for number in range(8)]
MEANS = np.linspace(0.4, 0.85, len(SEGMENTS))
RECORDS = {1: 4_000, 100: 50_000, 5_000: 200_000}
WARM_UP = 8_000  # past every reference period
REPEATS = 3


def traffic(rng: np.random.Generator, n: int, first_ordinal: int) -> ObservationBatch:
    code = rng.integers(0, len(SEGMENTS), n)
    mean = MEANS[code]
    precision = mean * (1.0 - mean) / 0.12**2 - 1.0
    drafted = rng.integers(20, 200, n)
    accepted = rng.binomial(drafted, rng.beta(mean * precision, (1.0 - mean) * precision))
    ordinals = np.arange(first_ordinal, first_ordinal + n)
    return ObservationBatch(
        ordinals, [SEGMENTS[index] for index in code], drafted, accepted, np.linspace(1.7e9, 1.8e9, n)
    )


def microseconds_per_record(state: StreamState, batch: ObservationBatch, size: int) -> float:
    config = DetectorConfig()
    begun = time.process_time()
    for start in range(0, len(batch), size):
        state, _ = fold(config, state, batch[start : start + size])
    return (time.process_time() - begun) / len(batch) * 1e6


def main() -> None:
    rng = np.random.default_rng(1)
    state, _ = fold(DetectorConfig(), StreamState(), traffic(rng, WARM_UP, 1))
    print("batch  microseconds per record (best of 3, CPU time)")
    for size, records in RECORDS.items():
        batch = traffic(rng, records, WARM_UP + 1)
        best = min(microseconds_per_record(state, batch, size) for _ in range(REPEATS))
        print(f"{size:5d}  {best:.2f}")
    print(f"state: {len(state.to_bytes()) / 1000:.0f} kB with {len(state.history)} requests of history")


if __name__ == "__main__":
    main()
