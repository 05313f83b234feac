from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from driftguard.detection import BaselineReady, DetectorConfig, Finding, StreamState, describe
from driftguard.errors import BadSettings
from tests.detection.traffic import START, constant, fold_all, requests


def ready(findings: list[Finding]) -> list[BaselineReady]:
    return [finding for finding in findings if isinstance(finding, BaselineReady)]


def test_size_follows_the_spread_and_the_smallest_drop_worth_finding() -> None:
    batch = requests(np.random.default_rng(1), np.full(4_000, 0.7))
    for drop in (0.05, 0.1):
        (found,) = ready(fold_all(batch, DetectorConfig(minimum_drop=drop))[1])
        wanted = (8 * found.standard_deviation / drop) ** 2
        assert wanted <= found.requests <= 1.5 * wanted + 100
        assert found.ordinal == found.requests  # the request that completed it


def test_constant_acceptance_still_needs_eight_over_the_drop() -> None:
    (found,) = ready(fold_all(constant(1.0, 300))[1])
    assert found.requests == 160
    assert found.standard_deviation == 0.0
    assert found.fall_below < 0.99 + 1e-9
    assert found.rise_above == 1.0


def test_baseline_is_the_mean_less_two_standard_errors_or_what_is_ignored() -> None:
    batch = requests(np.random.default_rng(2), np.full(4_000, 0.7))
    (found,) = ready(fold_all(batch)[1])
    error = found.standard_deviation / np.sqrt(found.requests)
    assert found.mean_per_request - found.fall_below == pytest.approx(max(2 * error, 0.01))
    assert found.rise_above - found.mean_per_request == pytest.approx(max(2 * error, 0.01))
    (careless,) = ready(fold_all(batch, DetectorConfig(ignore=0.04))[1])
    assert careless.mean_per_request - careless.fall_below == pytest.approx(0.04)


def test_acceptance_is_a_ratio_of_sums() -> None:
    batch = requests(np.random.default_rng(3), np.full(4_000, 0.6))
    (found,) = ready(fold_all(batch)[1])
    n = found.requests
    assert found.acceptance.rate == pytest.approx(batch.accepted[:n].sum() / batch.drafted[:n].sum())
    assert found.acceptance.low < 0.6 < found.acceptance.high


def test_segments_become_ready_each_in_its_own_time_and_say_what_they_need() -> None:
    rng = np.random.default_rng(4)
    names = ["busy" if rng.random() < 0.9 else "quiet" for _ in range(1_200)]
    state, findings = fold_all(requests(rng, np.full(1_200, 0.7), names))
    assert [found.segment for found in ready(findings)] == ["busy"]
    segments = {segment.segment: segment for segment in describe(DetectorConfig(), state).segments}
    busy, quiet = segments["busy"], segments["quiet"]
    assert (busy.verdict, busy.requests_needed) == ("steady", 0)
    assert quiet.verdict == "insufficient_data"
    assert quiet.requests_needed > 0
    assert quiet.baseline is None
    assert quiet.requests == names.count("quiet")


def test_a_stream_without_a_complete_reference_period_says_insufficient_data() -> None:
    state, findings = fold_all(constant(0.7, 99))
    summary = describe(DetectorConfig(), state)
    assert findings == []
    assert summary.verdict == "insufficient_data"
    assert summary.segments[0].requests_needed == 1
    assert describe(DetectorConfig(), StreamState()).verdict == "insufficient_data"


def test_false_alarm_setting_in_days_uses_the_streams_own_traffic() -> None:
    config = DetectorConfig(false_alarm_days=90.0)
    fast = requests(np.random.default_rng(5), np.full(1_000, 0.7), seconds_apart=2.0)
    (found,) = ready(fold_all(fast, config)[1])
    assert found.false_alarm_every == pytest.approx(90 * 43_200, rel=0.01)
    slow = requests(np.random.default_rng(5), np.full(1_000, 0.7), seconds_apart=3_600.0)
    state, findings = fold_all(slow, config)
    assert ready(findings)[0].false_alarm_every == 100_000.0
    assert describe(config, state).requests_per_day == pytest.approx(24, rel=0.01)


@pytest.mark.parametrize(("first", "then"), [(180.0, 17.28), (0.05, 60.0)])
def test_the_false_alarm_setting_in_days_follows_the_traffic_of_whole_days(first: float, then: float) -> None:
    """Started in a quiet hour; started with a burst of tests."""
    config = DetectorConfig(false_alarm_days=90.0)
    gaps = np.concatenate([np.full(600, first), np.full(round(3.0 * 86_400 / then), then)])
    batch = requests(np.random.default_rng(7), np.full(len(gaps), 0.7))
    state, _ = fold_all(replace(batch, ended_at=START + np.cumsum(gaps)), config)
    assert describe(config, state).false_alarm_every == pytest.approx(90.0 * 86_400 / then, rel=0.01)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("false_alarm_every", 1.0),
        ("false_alarm_every", float("nan")),
        ("minimum_drop", 0.0),
        ("ignore", -0.1),
        ("history", 3),
        ("false_alarm_days", float("inf")),
    ],
)
def test_impossible_settings_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(BadSettings, match=field):
        DetectorConfig(**{field: value})  # type: ignore[arg-type]
