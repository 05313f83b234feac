"""Configuration and answer length change acceptance without any drift."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from driftguard.detection import (
    BaselineReady,
    DetectorConfig,
    DriftOpened,
    Finding,
    ObservationBatch,
    StreamState,
    describe,
    fold,
)
from driftguard.detection.findings import in_words
from driftguard.detection.state.codec import encode_state
from driftguard.detection.statistics.strata import settings_of, unpack, without_configuration
from tests.detection.traffic import fold_all, requests

CONFIG = DetectorConfig()


def opened(findings: list[Finding]) -> list[DriftOpened]:
    return [finding for finding in findings if isinstance(finding, DriftOpened)]


def ready(findings: list[Finding]) -> list[BaselineReady]:
    return [finding for finding in findings if isinstance(finding, BaselineReady)]


def with_settings(
    batch: ObservationBatch, k: NDArray[np.int64], temperature: NDArray[np.float64] | None = None
) -> ObservationBatch:
    n = len(batch)
    return replace(
        batch,
        num_speculative_tokens=k,
        acceptance_rule=["rejection"] * n,
        temperature=np.full(n, 0.7) if temperature is None else temperature,
    )


def changed_k(seed: int, after: int) -> ObservationBatch:
    """K rises from 3 to 5 after 1,500 requests, and acceptance falls with it, as it must."""
    rng = np.random.default_rng(seed)
    k = np.repeat([3, 5], [1_500, after])
    return with_settings(requests(rng, np.where(k == 3, 0.7, 0.55)), k)


def test_a_changed_k_begins_a_baseline_and_says_so() -> None:
    batch = changed_k(1, 1_500)
    during, _ = fold_all(batch[:1_600])
    summary = describe(CONFIG, during)
    (segment,) = summary.segments
    assert (summary.verdict, segment.verdict) == ("insufficient_data", "insufficient_data")
    assert segment.requests_needed > 0
    assert str(in_words(segment.learning)).endswith("num_speculative_tokens changed from 3 to 5")
    state, findings = fold_all(batch)
    assert opened(findings) == []
    first, second = ready(findings)
    assert (first.segment, first.why.text) == ("chat", "first baseline of the segment")
    assert (second.segment, second.why.text) == ("chat", "num_speculative_tokens changed from 3 to 5")
    assert "num_speculative_tokens 5" in second.stratum
    (segment,) = describe(CONFIG, state).segments
    assert (segment.verdict, segment.learning, segment.requests) == ("steady", None, 3_000)
    assert segment.baseline is not None
    assert segment.baseline.rate == pytest.approx(0.55, abs=0.03)


def test_a_fall_under_the_new_k_is_found_against_the_new_baseline() -> None:
    batch = changed_k(2, 1_500)
    state, _ = fold_all(batch)
    late = requests(np.random.default_rng(3), np.full(300, 0.4), first_ordinal=3_001)
    (found,) = opened(fold(CONFIG, state, with_settings(late, np.full(300, 5)))[1])
    assert found.segments[0].before.rate == pytest.approx(0.55, abs=0.03)
    assert found.change_point > 2_950


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"acceptance_rule": "greedy"}, "acceptance_rule changed from rejection to greedy"),
        ({"verification": "block"}, "verification changed from token to block"),
        ({"verification": "tree"}, "verification changed from token to tree"),
        ({"temperature": 0.0}, "temperature changed from (0.65, 0.75] to greedy"),
        ({"temperature": None}, "temperature changed from (0.65, 0.75] to unknown"),
        ({"temperature": 1.0}, "temperature changed from (0.65, 0.75] to (0.9, 1]"),
        ({"temperature": 1.6}, "temperature changed from (0.65, 0.75] to above 1.5"),
        ({"output_tokens": 100}, "length_known changed from no to yes"),
    ],
)
def test_other_settings_have_baselines_of_their_own(columns: dict[str, Any], reason: str) -> None:
    batch = requests(np.random.default_rng(4), np.repeat([0.7, 0.5], 1_200))
    given: dict[str, list[Any]] = {
        "acceptance_rule": ["rejection"] * 2_400,
        "verification": ["unknown"] * 1_000 + ["token"] * 1_400,  # a source that begins to tell it
        "temperature": [0.7] * 2_400,
    }
    for name, value in columns.items():
        given[name] = given.get(name, [None] * 2_400)[:1_200] + [value] * 1_200
    batch = ObservationBatch.of(
        batch.ordinal, batch.segment, batch.drafted, batch.accepted, batch.ended_at, **given
    )
    findings = fold_all(batch)[1]
    assert opened(findings) == []
    assert [finding.why.text for finding in ready(findings)] == ["first baseline of the segment", reason]


def test_temperatures_are_told_apart_as_far_as_a_diagnosis_compares_them_and_further() -> None:
    """And a setting that was packed before there were classes keeps its meaning."""
    told = [None, 0.0, 1e-9, 0.2, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 1.6, 1e9]
    n = len(told)
    batch = ObservationBatch.of(range(n), ["chat"] * n, [9] * n, [5] * n, [0.0] * n, temperature=told)
    settings = settings_of(batch, np.zeros(n, dtype=np.bool_)).tolist()
    classes = ["(0, 0.25]"] * 3 + ["(0.25, 0.5]", "(0.5, 0.65]", "(0.65, 0.75]"] + ["(0.75, 0.9]"] * 2
    classes += ["(0.9, 1]"] + ["(1, 1.5]"] * 2 + ["above 1.5"] * 2
    assert [unpack(setting).temperature for setting in settings] == ["unknown", "greedy", *classes]
    assert {without_configuration(setting) for setting in settings} == {settings[0]}
    assert unpack(settings[1] + 2) == replace(unpack(settings[0]), temperature="sampled")
    first = batch_by_first(batch)
    assert [unpack(setting).temperature for setting in first] == ["unknown", "greedy", *classes]
    assert {unpack(setting).positions for setting in first} == {"first"}


def batch_by_first(batch: ObservationBatch) -> list[int]:
    counts = np.ones(len(batch), dtype=np.int64)
    settings: list[int] = settings_of(
        replace(batch, first_drafted=counts, first_accepted=counts), counts == 0
    ).tolist()
    return settings


def test_a_mix_of_temperatures_that_shifts_is_no_drift() -> None:
    """Of .7 and 1, one class for a diagnosis: half of each, then nearly all 1, where acceptance is lower."""
    rng, n = np.random.default_rng(41), 6_000
    hot = rng.random(n) < np.where(np.arange(n) < 3_000, 0.5, 0.95)
    batch = with_settings(requests(rng, np.where(hot, 0.5, 0.65)), np.full(n, 3), np.where(hot, 1.0, 0.7))
    assert opened(fold_all(batch)[1]) == []
    blind = replace(batch, temperature=np.full(n, np.nan))
    assert opened(fold_all(blind)[1]) != []


def test_a_shift_between_strata_is_no_drift_and_a_fall_of_both_is_one_incident() -> None:
    """Half the traffic greedy at .8, half sampled at .6; then nearly all sampled; then both lose .2."""
    rng, n = np.random.default_rng(5), 9_000
    late = np.arange(n) >= 5_000
    greedy = rng.random(n) < np.where(late, 0.1, 0.5)
    fallen = np.arange(n) >= 8_000
    means = np.where(greedy, 0.8, 0.6) - 0.2 * fallen
    batch = with_settings(requests(rng, means), np.full(n, 3), np.where(greedy, 0.0, 1.0))
    calm, findings = fold_all(batch[:8_000])
    assert opened(findings) == []
    assert describe(CONFIG, calm).verdict == "steady"
    (found,) = opened(fold(CONFIG, calm, batch[8_000:])[1])
    (change,) = found.segments
    assert change.before.rate - change.after.rate == pytest.approx(0.2, abs=0.06)
    assert change.before.rate == pytest.approx(0.62, abs=0.03)  # in the mix after the change


def test_a_rare_stratum_does_not_keep_its_segment_from_being_watched() -> None:
    rng = np.random.default_rng(6)
    rare = rng.random(2_000) < 0.02
    means = np.where(np.arange(2_000) < 1_500, 0.7, 0.4)
    state, findings = fold_all(with_settings(requests(rng, means), np.where(rare, 9, 3)))
    assert len(ready(findings)) == 1
    assert len(opened(findings)) == 1
    assert describe(CONFIG, state).segments[0].verdict == "degraded"


def by_length(
    rng: np.random.Generator, shift: float, n: int, first: int, drop: float = 0.0
) -> ObservationBatch:
    """Log length is normal; acceptance falls with it (correlation about -.6)."""
    place = rng.normal(shift, 1.0, n)
    means = np.clip(0.6 - 0.09 * place - drop, 0.05, 0.95)
    batch = requests(rng, means, first_ordinal=first)
    return replace(batch, output_tokens=np.exp(np.log(200.0) + place).astype(np.int64) + 1)


@pytest.mark.parametrize("shift", [-1.0, 1.0])
def test_lengths_that_shift_alone_are_no_incident(shift: float) -> None:
    without_lengths = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        state, _ = fold_all(by_length(rng, 0.0, 1_500, 1))
        assert opened(fold(CONFIG, state, by_length(rng, shift, 5_000, 1_501))[1]) == []
        rng = np.random.default_rng(seed)
        blind = np.full(1_500, -1)
        state, _ = fold_all(replace(by_length(rng, 0.0, 1_500, 1), output_tokens=blind))
        late = by_length(rng, shift, 5_000, 1_501)
        without_lengths += len(
            opened(fold(CONFIG, state, replace(late, output_tokens=np.full(5_000, -1)))[1])
        )
    assert without_lengths >= 3  # the same traffic with lengths unknown looks like drift


def test_a_drop_is_found_while_lengths_shift_too() -> None:
    rng = np.random.default_rng(7)
    state, _ = fold_all(by_length(rng, 0.0, 1_500, 1))
    found = opened(fold(CONFIG, state, by_length(rng, 0.5, 400, 1_501, drop=0.1))[1])
    assert [finding.direction for finding in found] == ["down"]
    assert found[0].interval[0] <= 1_501 <= found[0].interval[1]


def test_beyond_the_limit_strata_share_other_and_lose_no_request() -> None:
    n = 1_300
    rng = np.random.default_rng(8)
    batch = with_settings(requests(rng, np.full(n, 0.7)), np.arange(n) % 1_000)
    state, _ = fold_all(batch)
    segments = {segment.segment: segment.requests for segment in describe(CONFIG, state).segments}
    assert len(state.setting_of_stratum) <= 512
    assert set(segments) == {"chat", "other"}
    assert sum(segments.values()) == n
    in_parts = StreamState()
    for place in range(0, n, 97):
        in_parts, _ = fold(CONFIG, in_parts, batch[place : place + 97])
    assert encode_state(in_parts) == encode_state(state)


def test_verification_is_in_the_setting_where_it_is_not_token_by_token() -> None:
    """And what was packed before there was the field is token by token."""
    told = ["unknown", "token", "greedy", "typical", "block", "tree"]
    n = len(told)
    batch = ObservationBatch.of(range(n), ["chat"] * n, [9] * n, [5] * n, [0.0] * n, verification=told)
    settings = settings_of(batch, np.zeros(n, dtype=np.bool_)).tolist()
    assert [unpack(setting).verification for setting in settings] == ["token"] * 4 + ["block", "tree"]
    assert len(set(settings)) == 3
    assert {without_configuration(setting) for setting in settings} == {settings[0]}
    assert str(unpack(settings[4])).endswith(", verification block")
