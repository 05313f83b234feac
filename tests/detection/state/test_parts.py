"""A state stored in parts is the same state, whatever was stored before and however its requests arrived."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from driftguard.detection import DetectorConfig, ObservationBatch, StreamState, UnreadableState, fold
from driftguard.detection.state.codec import StoredState, encode_state, from_parts, parts_of
from driftguard.detection.state.history import COMPACT_ROWS
from tests.detection.traffic import requests

NOTHING = range(0)


def traffic(n: int) -> ObservationBatch:
    batch = requests(np.random.default_rng(5), np.full(n, 0.7), ["a", "b"] * (n // 2))
    return replace(batch, ended_at=batch.ended_at - np.arange(n) % 7)  # not in order


def stored_after_each(
    config: DetectorConfig, batch: ObservationBatch, sizes: list[int], *, restart: bool
) -> tuple[StreamState, StoredState]:
    """The state after the batch, and what a store holds that was told the new parts after each cut."""
    state, start = StreamState(), 0
    pieces: dict[int, bytes] = {}
    for size in sizes:
        known = state.history.numbers
        state, _ = fold(config, state, batch[start : start + size])
        start += size
        parts = parts_of(state, known)
        pieces = {**pieces, **parts.pieces}
        pieces = {number: data for number, data in pieces.items() if number in state.history.numbers}
        stored = StoredState(parts.head, parts.history_rows, pieces)
        if restart:
            state = from_parts(stored)
    return state, stored


@pytest.mark.parametrize("history", [256, 1_000, 8_192])
def test_parts_give_the_state_again_and_do_not_depend_on_batches(history: int) -> None:
    config = DetectorConfig(history=history)
    batch = traffic(4_000)
    whole, expected = stored_after_each(config, batch, [4_000], restart=False)
    rng = np.random.default_rng(6)
    sizes = rng.choice([1, 3, 40, 511, 512, 900], 400).tolist()
    stops = np.minimum(np.cumsum(sizes), 4_000)
    sizes = np.diff(stops[: int(np.searchsorted(stops, 4_000)) + 1], prepend=0).tolist()
    for restart in (False, True):
        state, stored = stored_after_each(config, batch, sizes, restart=restart)
        assert encode_state(state) == encode_state(whole)
        assert encode_state(from_parts(stored)) == encode_state(whole)
        assert stored.head == expected.head
        both = stored.pieces.keys() & expected.pieces.keys()
        assert len(both) >= min(history - COMPACT_ROWS, len(batch)) // COMPACT_ROWS
        assert all(stored.pieces[number] == expected.pieces[number] for number in both)
        assert len(stored.pieces) * COMPACT_ROWS < history + 2 * COMPACT_ROWS


def test_a_request_rewrites_little_of_a_full_history() -> None:
    state, _ = fold(DetectorConfig(), StreamState(), traffic(10_000))
    after, _ = fold(DetectorConfig(), state, later(traffic(2), 20_000))
    parts = parts_of(after, state.history.numbers)
    assert parts.pieces == {}
    assert len(parts.head) < len(encode_state(after)) / 5


def later(batch: ObservationBatch, first: int) -> ObservationBatch:
    return replace(batch, ordinal=first + np.arange(len(batch)))


def test_a_state_stored_as_a_whole_is_read_and_stored_in_parts_from_then_on() -> None:
    batch = traffic(5_000)
    state, _ = fold(DetectorConfig(history=1_000), StreamState(), batch[:3_000])
    old = from_parts(StoredState(encode_state(state), None, {}))
    assert encode_state(old) == encode_state(state)
    parts = parts_of(old, NOTHING)
    assert encode_state(from_parts(parts)) == encode_state(state)
    for start in (state, old, from_parts(parts)):
        after, _ = fold(DetectorConfig(history=1_000), start, batch[3_000:])
        assert encode_state(after) == encode_state(
            fold(DetectorConfig(history=1_000), state, batch[3_000:])[0]
        )


def test_a_missing_or_damaged_part_is_told() -> None:
    state, _ = fold(DetectorConfig(), StreamState(), traffic(3_000))
    stored = parts_of(state, NOTHING)
    first, *_, last = sorted(stored.pieces)
    for number in (first, last):
        without = {other: data for other, data in stored.pieces.items() if other != number}
        with pytest.raises(UnreadableState, match="a part of its history is missing"):
            from_parts(replace(stored, pieces=without))
        damaged = bytearray(stored.pieces[number])
        damaged[50] ^= 1
        with pytest.raises(UnreadableState, match="damaged"):
            from_parts(replace(stored, pieces={**stored.pieces, number: bytes(damaged)}))
