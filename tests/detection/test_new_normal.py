"""A rise that lasts becomes the norm, so that a fall from it is found; a fall that lasts never does."""

from __future__ import annotations

import numpy as np
import pytest

from driftguard.detection import (
    BaselineReady,
    DetectorConfig,
    DriftClosed,
    DriftOpened,
    ObservationBatch,
    StreamState,
    fold,
)
from driftguard.detection.state.codec import decode_state, encode_state
from driftguard.detection.steps.new_normal import LASTS_REQUESTS
from tests.detection.traffic import fold_all, requests

CONFIG = DetectorConfig()


@pytest.mark.slow
def test_a_fall_from_a_rise_that_lasted_is_an_incident() -> None:
    found = 0
    for seed in range(10):
        means = np.repeat([0.6, 0.75, 0.6], [3_000, 15_000, 2_000])
        findings = fold_all(requests(np.random.default_rng([91, seed]), means), CONFIG)[1]
        moves = [each for each in findings if isinstance(each, DriftOpened | DriftClosed)]
        moves = [each for each in moves if each.ordinal > 3_000]  # a false alarm before is not asked for here
        assert [each.direction for each in moves[:2]] == ["up", "up"]
        assert isinstance(moves[1], DriftClosed)
        assert moves[1].reason == "became_normal"
        assert moves[1].ordinal - moves[0].ordinal >= LASTS_REQUESTS
        (ready,) = [each for each in findings if isinstance(each, BaselineReady)][1:]
        assert ready.why.text == "the rise lasted"
        assert ready.mean_per_request == pytest.approx(0.75, abs=0.03)
        falls = [each for each in moves[2:] if isinstance(each, DriftOpened) and each.direction == "down"]
        found += bool(falls) and 18_000 < falls[0].ordinal < 18_200
    print(f"seeds [91, 0..9]: {found} of 10 falls found")
    assert found == 10


def test_a_rise_that_goes_back_before_it_lasted_is_a_recovery() -> None:
    means = np.repeat([0.6, 0.75, 0.6], [3_000, 2_000, 2_000])
    findings = fold_all(requests(np.random.default_rng(92), means), CONFIG)[1]
    moves = [each for each in findings if isinstance(each, DriftOpened | DriftClosed)]
    assert [each.direction for each in moves] == ["up", "up"]
    assert isinstance(moves[1], DriftClosed)
    assert moves[1].reason == "recovered"


def with_rare_segment(*parts: tuple[float, int]) -> ObservationBatch:
    """(mean of either segment, requests), of which one in 25 is of the rare one."""
    rng = np.random.default_rng(96)
    means = np.concatenate([np.full(n, mean) for mean, n in parts])
    return requests(rng, means, ["rare" if rare else "chat" for rare in rng.random(len(means)) < 0.04])


def test_a_rare_segment_keeps_no_other_from_its_new_norm() -> None:
    batch = with_rare_segment((0.6, 12_000), (0.75, 12_000), (0.6, 1_500))
    findings = fold_all(batch, CONFIG)[1]
    (norm,) = [each for each in findings if isinstance(each, DriftClosed) and each.reason == "became_normal"]
    assert [change.segment for change in norm.segments] == ["chat"]
    assert norm.left == ("rare",)
    falls = [each for each in findings if isinstance(each, DriftOpened) and each.direction == "down"]
    assert 24_000 < falls[0].ordinal < 24_200
    assert [change.segment for change in falls[0].segments] == ["chat"]


def test_a_rise_that_became_the_norm_in_part_does_not_depend_on_how_observations_are_batched() -> None:
    batch = with_rare_segment((0.6, 12_000), (0.75, 8_000))
    whole, findings = fold(CONFIG, StreamState(), batch)
    assert [each.left for each in findings if isinstance(each, DriftClosed)] == [("rare",)]
    state = StreamState()
    for start in range(0, len(batch), 377):
        state, _ = fold(CONFIG, decode_state(encode_state(state)), batch[start : start + 377])
    assert encode_state(state) == encode_state(whole)


def test_a_fall_that_lasts_stays_an_incident() -> None:
    means = np.repeat([0.7, 0.5], [3_000, 20_000])
    state, findings = fold_all(requests(np.random.default_rng(93), means), CONFIG)
    assert state.incidents[0] is not None
    assert not [each for each in findings if isinstance(each, DriftClosed)]


def test_a_state_does_not_depend_on_how_observations_are_batched() -> None:
    means = np.repeat([0.6, 0.75], [2_000, 8_000])
    batch = requests(np.random.default_rng(94), means)
    whole, findings = fold(CONFIG, StreamState(), batch)
    assert [each.reason for each in findings if isinstance(each, DriftClosed)] == ["became_normal"]
    state = StreamState()
    for start in range(0, len(batch), 377):
        state, _ = fold(CONFIG, decode_state(encode_state(state)), batch[start : start + 377])
    assert encode_state(state) == encode_state(whole)
