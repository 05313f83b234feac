"""Microseconds per record of the detector, 8 segments per stream.

One stream, in batches of 1, 100 and 5,000; then 10,000 streams folded together, with 5, 20 and 100 records of
each, and the largest resident memory of the process that holds all their states, each with a full history
in memory of its own.

CPU time, which for one thread that only computes is the time on an idle core. Run it as
python -m tests.benchmarks.bench_detection_speed
"""

from __future__ import annotations

import math
import resource
import time
from dataclasses import replace

import numpy as np

from driftguard.detection import DetectorConfig, ObservationBatch, StreamState, fold, fold_many
from driftguard.detection.state.codec import decode_state, encode_state

SEGMENTS = [f"segment {number}" for number in range(8)]
MEANS = np.linspace(0.4, 0.85, len(SEGMENTS))
RECORDS = {1: 4_000, 100: 50_000, 5_000: 200_000}
WARM_UP = 40_000  # past every reference period and its growth
REPEATS = 3
CONFIG = DetectorConfig(false_alarm_every=1e7)  # about one false page in 90 days at a request a second
STREAMS = 10_000
DIFFERENT_STREAMS = 20
RECORDS_PER_STREAM = (5, 20, 100)
SECONDS_APART = 1.8
START = 1_700_006_400.0  # a midnight: all of what follows is one day


def traffic(
    rng: np.random.Generator, n: int, first_ordinal: int, *, apart: int = 1, ended_at: float = START
) -> ObservationBatch:
    """`apart`: how many records of the store come to one of the stream; `ended_at` of the first record."""
    code = rng.integers(0, len(SEGMENTS), n)
    mean = MEANS[code]
    precision = mean * (1.0 - mean) / 0.12**2 - 1.0
    drafted = rng.integers(20, 200, n)
    accepted = rng.binomial(drafted, rng.beta(mean * precision, (1.0 - mean) * precision))
    ordinals = first_ordinal + apart * np.arange(n)
    times = np.arange(n, dtype=np.float64) * SECONDS_APART + ended_at
    return ObservationBatch(ordinals, [SEGMENTS[index] for index in code], drafted, accepted, times)


def microseconds_per_record(state: StreamState, batch: ObservationBatch, size: int) -> float:
    begun = time.process_time()
    for start in range(0, len(batch), size):
        state, _ = fold(CONFIG, state, batch[start : start + size])
    return (time.process_time() - begun) / len(batch) * 1e6


def full_histories(rng: np.random.Generator) -> list[StreamState]:
    """10,000 states, each with arrays of its own."""
    stored = []
    for _ in range(DIFFERENT_STREAMS):
        batch = traffic(rng, WARM_UP, 1, apart=STREAMS)
        stored.append(encode_state(fold(CONFIG, StreamState(), batch)[0]))
    return [decode_state(stored[place % len(stored)]) for place in range(STREAMS)]


def new_records(rng: np.random.Generator, states: list[StreamState], size: int) -> list[ObservationBatch]:
    """`size` of each stream, within minutes of one another."""
    first = max(state.ordinal for state in states) + 1
    whole = traffic(rng, len(states) * size, first)
    times = np.arange(1, size + 1, dtype=np.float64) * SECONDS_APART
    times += max(state.last_ended_at for state in states)
    return [replace(whole[start : start + size], ended_at=times) for start in range(0, len(whole), size)]


def together(rng: np.random.Generator, states: list[StreamState], size: int) -> float:
    """CPU microseconds per record, best of several calls; `states` goes on with what they fold."""
    best = math.inf
    for _ in range(REPEATS):
        batches = new_records(rng, states, size)
        begun = time.process_time()
        folded = fold_many(CONFIG, states, batches)
        best = min(best, (time.process_time() - begun) / (size * len(states)) * 1e6)
        states[:] = [state for state, _ in folded]
    return best


def main() -> None:
    rng = np.random.default_rng(1)
    state, _ = fold(CONFIG, StreamState(), traffic(rng, WARM_UP, 1))
    print("one stream: batch  microseconds per record (best of 3, CPU time)")
    for size, records in RECORDS.items():
        first, ended_at = state.ordinal + 1, state.last_ended_at
        batch = traffic(rng, records, first, ended_at=ended_at)
        best = min(microseconds_per_record(state, batch, size) for _ in range(REPEATS))
        print(f"{size:17d}  {best:.2f}")
    print(f"state: {len(encode_state(state)) / 1000:.0f} kB with {len(state.history)} requests of history")
    states = full_histories(rng)
    print(f"{STREAMS} streams: records of each  microseconds per record  largest resident memory")
    for size in RECORDS_PER_STREAM:
        best = together(rng, states, size)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(f"{size:30d}  {best:.2f}  {memory / 1e9:.2f} GB", flush=True)


if __name__ == "__main__":
    main()
