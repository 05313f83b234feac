"""Many streams folded together: to the last bit what folding each by itself gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from driftguard.detection import (
    BaselineReady,
    BaselineSettled,
    DetectorConfig,
    DriftClosed,
    DriftOpened,
    DriftSeenGradual,
    DriftWidened,
    Finding,
    ObservationBatch,
    ProfileLearned,
    StreamState,
    fold,
    fold_streams,
)
from driftguard.detection.fold_streams import fold_many
from driftguard.detection.state.codec import encode_state
from tests.detection.test_same_result_however_batched import eventful, with_odd_columns
from tests.detection.traffic import requests

CONFIG = DetectorConfig(minimum_drop=0.1, false_alarm_every=1_000.0, history=1_000)
Traffic = Callable[[np.random.Generator, int], ObservationBatch]
N = 2_600


def steady(rng: np.random.Generator, n: int = N) -> ObservationBatch:
    return requests(rng, rng.choice([0.5, 0.8], n), ["a", "b"] * (n // 2))


def lengths(rng: np.random.Generator, n: int) -> ObservationBatch:
    return replace(steady(rng, n), output_tokens=rng.integers(1, 2_000, n))


def sessions(rng: np.random.Generator, n: int) -> ObservationBatch:
    """Conversations that take turns, more of them than are kept open, some requests outside of any."""
    numbers = rng.integers(0, 5, n) + np.arange(n) // 3
    return replace(lengths(rng, n), session=[f"s{number}" if number % 9 else None for number in numbers])


def blocks(rng: np.random.Generator, n: int) -> ObservationBatch:
    """Neighbours are alike, and no session says so."""
    return requests(rng, np.repeat(rng.choice([0.5, 0.7], n // 8 + 1), 8)[:n])


def windows(rng: np.random.Generator, n: int) -> ObservationBatch:
    """Windows of a counter among requests; some scrapes were missed."""
    batch = steady(rng, n)
    start = batch.ended_at - rng.choice([2.0, 0.5], n, p=[0.9, 0.1])
    batch.drafted[1::2] *= 1_000
    batch.accepted[1::2] *= 1_000
    return replace(batch, kind=["request", "window"] * (n // 2), started_at=start)


def undrafted(rng: np.random.Generator, n: int) -> ObservationBatch:
    batch = steady(rng, n)
    idle = rng.random(n) < 0.3
    idle[n // 2 : n // 2 + 200] = True
    batch.drafted[idle], batch.accepted[idle] = 0, 0
    return batch


def configured(rng: np.random.Generator, n: int) -> ObservationBatch:
    """K and temperature change, segments come up: new strata, and baselines that are learned late."""
    return replace(
        steady(rng, n),
        segment=[f"segment {number // 900 + number % 2}" for number in range(n)],
        num_speculative_tokens=np.arange(n) // 1_700,
        temperature=np.where(np.arange(n) > 2_000, 0.0, np.nan),
    )


def falling(rng: np.random.Generator, n: int) -> ObservationBatch:
    """A fall that ends, and another; one segment falls after the other."""
    when = np.arange(n) - 150 * (np.arange(n) % 2)
    changed = ((when > 900) & (when < 1_500)) | (when > 2_100)
    return requests(rng, np.where(changed, 0.45, 0.7), ["a", "b"] * (n // 2))


def declining(rng: np.random.Generator, n: int) -> ObservationBatch:
    return requests(rng, np.interp(np.arange(n), [600, n], [0.7, 0.2]), ["a"] * n)


def by_hour(rng: np.random.Generator, n: int) -> ObservationBatch:
    """Ten days in which acceptance follows the hour of day, some records late or of a wrong clock."""
    seconds = np.arange(n) * (10 * 86_400.0 / n)
    means = 0.6 + 0.15 * np.sin(seconds / 86_400.0 * 2.0 * np.pi)
    batch = requests(rng, means, ["a"] * n)
    late = rng.choice([0.0, 7_200.0, -1e6], n, p=[0.97, 0.02, 0.01])
    return replace(batch, ended_at=1.7e9 + seconds - late)


def eventful_one(rng: np.random.Generator, n: int) -> ObservationBatch:
    return eventful(n)


def odd(rng: np.random.Generator, n: int) -> ObservationBatch:
    return with_odd_columns(eventful(n))


KINDS: list[Traffic] = [
    steady,
    lengths,
    sessions,
    blocks,
    windows,
    undrafted,
    configured,
    falling,
    declining,
    by_hour,
    eventful_one,
    odd,
]


def cut(rng: np.random.Generator, batch: ObservationBatch) -> list[ObservationBatch]:
    """In parts of none, one, a few and hundreds."""
    sizes = rng.choice([0, 1, 7, 20, 60, 500], len(batch), p=[0.06, 0.14, 0.15, 0.2, 0.35, 0.1])
    stops = np.minimum(np.cumsum(sizes), len(batch))
    stops = stops[: int(np.searchsorted(stops, len(batch))) + 1]
    return [batch[start:stop] for start, stop in zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True)]


def streams(seed: int, n: int = N) -> list[list[ObservationBatch]]:
    rng = np.random.default_rng(seed)
    return [cut(rng, kind(rng, n)) for kind in KINDS for _ in range(2)]


def alone(parts: list[ObservationBatch]) -> tuple[list[bytes], list[list[Finding]]]:
    """The stream's state and findings after each part."""
    state, states, findings = StreamState(), [], []
    for part in parts:
        state, found = fold(CONFIG, state, part)
        states.append(encode_state(state))
        findings.append(found)
    return states, findings


@pytest.mark.slow
def test_streams_folded_together_are_bit_for_bit_what_each_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fold_streams, "TOGETHER_OBSERVATIONS", 300)  # several groups in each call
    parts = streams(seed=1)
    expected = [alone(own) for own in parts]
    states = [StreamState() for _ in parts]
    seen: set[type] = set()
    for turn in range(max(map(len, parts))):
        sending = [place for place, own in enumerate(parts) if turn < len(own)]
        folded = fold_many(
            CONFIG, [states[place] for place in sending], [parts[place][turn] for place in sending]
        )
        for place, (state, findings) in zip(sending, folded, strict=True):
            states[place] = state
            assert encode_state(state) == expected[place][0][turn], (place, turn)
            assert findings == expected[place][1][turn], (place, turn)
            seen.update(map(type, findings))
    assert seen == {
        BaselineReady,
        BaselineSettled,
        DriftOpened,
        DriftSeenGradual,
        DriftWidened,
        DriftClosed,
        ProfileLearned,
    }


def test_most_streams_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the test above could pass although every stream is folded by itself."""
    rng = np.random.default_rng(3)
    kinds = (steady, lengths, sessions, blocks, windows, undrafted)
    batches = [kind(rng, N) for kind in kinds]
    config = replace(CONFIG, false_alarm_every=1e6)
    states = [fold(config, StreamState(), batch[:2_440])[0] for batch in batches]
    singly: list[int] = []

    def counted_fold(
        config: DetectorConfig, state: StreamState, batch: ObservationBatch
    ) -> tuple[StreamState, list[Finding]]:
        singly.append(len(batch))
        return fold(config, state, batch)

    assert all(state.ready.all() and state.incidents == (None, None) for state in states)
    assert states[3].inflation.max() > 1.0
    assert sum(bool(state.growing.any()) for state in states) >= 2
    monkeypatch.setattr(fold_streams, "fold", counted_fold)
    fold_many(config, states, [batch[2_440:2_460] for batch in batches])
    assert singly == []


def test_the_old_states_stay_as_they_were_and_a_record_is_never_folded_twice() -> None:
    rng = np.random.default_rng(4)
    batches = [steady(rng), sessions(rng, N)]
    states = [fold(CONFIG, StreamState(), batch[:2_000])[0] for batch in batches]
    before = [encode_state(state) for state in states]
    fold_many(CONFIG, states, [batch[2_000:2_030] for batch in batches])
    assert [encode_state(state) for state in states] == before
    with pytest.raises(ValueError, match="does not follow 2000"):
        fold_many(CONFIG, states, [batch[1_990:2_030] for batch in batches])


def test_no_streams() -> None:
    assert fold_many(CONFIG, [], []) == []


def test_the_last_stream_may_have_fewer_strata_than_another() -> None:
    rng = np.random.default_rng(20)
    wide = requests(rng, np.full(2_401, 0.7), [f"s{number % 4}" for number in range(2_401)])
    narrow = requests(rng, np.full(801, 0.7), ["a"] * 801)
    batches = [wide[2_400:], narrow[800:]]
    states = [fold(CONFIG, StreamState(), wide[:2_400])[0], fold(CONFIG, StreamState(), narrow[:800])[0]]
    together = fold_many(CONFIG, states, batches)
    apart = [fold(CONFIG, state, batch) for state, batch in zip(states, batches, strict=True)]
    assert [encode_state(state) for state, _ in together] == [encode_state(state) for state, _ in apart]
