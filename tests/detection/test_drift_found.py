"""What an operator relies on, in simulated traffic with known changes. Seeds fixed; nothing timed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from driftguard.detection import (
    DetectorConfig,
    DriftClosed,
    DriftOpened,
    Finding,
    ObservationBatch,
    StreamState,
    describe,
    end_incident,
    fold,
)
from tests.detection.traffic import constant, fold_all, normal, requests, wandering_mix

NAMES = ["summarise", "translate", "code", "chat"]
MEANS = np.array([0.75, 0.45, 0.8, 0.65])
CONFIG = DetectorConfig()
LEARNED = 3_000  # requests: the stream is no longer young


def opened(findings: list[Finding]) -> list[DriftOpened]:
    return [finding for finding in findings if isinstance(finding, DriftOpened)]


def ended(findings: list[Finding]) -> list[DriftClosed]:
    return [finding for finding in findings if isinstance(finding, DriftClosed)]


def one_segment(seed: int, *parts: tuple[float, int]) -> list[Finding]:
    means = np.concatenate([np.full(n, mean) for mean, n in parts])
    return fold_all(requests(np.random.default_rng(seed), means))[1]


def even_mix(rng: np.random.Generator, n: int) -> tuple[list[str], NDArray[np.int64]]:
    code = rng.integers(0, len(NAMES), n)
    return [NAMES[index] for index in code], code


def test_no_alarm_while_only_the_mix_wanders() -> None:
    rng = np.random.default_rng(21)
    names, code = wandering_mix(rng, 200_000, NAMES)
    batch = requests(rng, MEANS[code], names)
    config = DetectorConfig(false_alarm_every=1e7)
    state, findings = fold_all(batch, config)
    assert opened(findings) == []
    assert describe(config, state).verdict == "steady"
    weeks = np.add.reduceat(batch.accepted / batch.drafted, np.arange(0, len(batch), 2_000)) / 2_000
    assert weeks.max() - weeks.min() > 0.1  # the aggregate moved by more than a real incident would


def test_a_shift_of_the_mix_alone_is_no_incident() -> None:
    rng = np.random.default_rng(22)
    names, code = even_mix(rng, 4_000)
    late = rng.choice([1, 1, 1, 0, 2, 3], 10_000)  # mostly the segment that always accepted least
    means = np.concatenate([MEANS[code], MEANS[late]])
    findings = fold_all(requests(rng, means, names + [NAMES[index] for index in late]))[1]
    assert opened(findings) == []


@pytest.mark.parametrize(("drop", "most"), [(0.1, 100), (0.2, 40)])
def test_a_drop_is_found_soon_and_its_moment_named(drop: float, most: int) -> None:
    delays, held = [], 0
    for seed in range(20):
        findings = one_segment(seed, (0.7, LEARNED), (0.7 - drop, 600))
        found = [alarm for alarm in opened(findings) if alarm.ordinal > LEARNED]
        assert [finding.direction for finding in found] == ["down"]
        assert [change.segment for change in found[0].segments] == ["chat"]
        delays.append(found[0].ordinal - LEARNED)
        held += found[0].interval[0] <= LEARNED + 1 <= found[0].interval[1]
        assert found[0].interval[0] <= found[0].change_point <= found[0].interval[1]
    assert np.median(delays) <= most
    assert held >= 16  # 95% intervals of 20 runs


def test_before_and_after_are_told_with_intervals() -> None:
    (found,) = opened(one_segment(31, (0.7, 1_500), (0.4, 600)))
    (change,) = found.segments
    assert change.before.low < 0.7 < change.before.high
    assert change.after.low < 0.4 < change.after.high
    assert change.after.requests == found.requests_to_alarm
    assert found.evidence >= found.false_alarm_every == 100_000.0
    assert found.change_point_at == pytest.approx(1_700_000_000 + found.change_point)


def test_a_drop_in_one_small_segment_is_found_and_only_that_is_named() -> None:
    rng = np.random.default_rng(23)
    n, start = 24_000, 20_000
    code = rng.choice(4, n, p=[0.4, 0.3, 0.25, 0.05])
    means = np.where((code == 3) & (np.arange(n) >= start), MEANS[code] - 0.25, MEANS[code])
    found = opened(fold_all(requests(rng, means, [NAMES[index] for index in code]))[1])
    assert [change.segment for change in found[0].segments] == ["chat"]
    assert found[0].scope == "segments"
    requests_of_chat = int((code[start : found[0].ordinal] == 3).sum())
    assert requests_of_chat <= 60
    assert found[0].interval[0] <= start + 1 <= found[0].interval[1]


def test_a_segment_that_hardly_moved_is_not_listed_beside_the_one_that_fell() -> None:
    """At a high A their common sum crosses first; the other one has too little evidence to be blamed."""
    config = DetectorConfig(false_alarm_every=5e7, minimum_drop=0.08)

    def sent(rng: np.random.Generator, n: int, first: float, second: float, ordinal: int) -> ObservationBatch:
        code = rng.integers(0, 2, n)
        means = np.where(code == 0, first, second)
        return requests(rng, means, [NAMES[index] for index in code], first_ordinal=ordinal)

    learned, _ = fold_all(sent(np.random.default_rng(1_000), 4_000, 0.5, 0.5, 1), config)
    listed = []
    for seed in range(120):
        fallen = sent(np.random.default_rng(1_001 + seed), 600, 0.4, 0.48, 4_001)
        found = opened(fold_all(fallen, config, learned)[1])
        if found and found[0].scope == "stream":
            listed.append([change.segment for change in found[0].segments])
    assert len(listed) >= 5
    assert all(names[0] == NAMES[0] for names in listed)
    assert sum(len(names) > 1 for names in listed) <= len(listed) // 2


def test_a_fall_of_all_segments_is_one_incident_of_the_stream() -> None:
    rng = np.random.default_rng(24)
    names, code = even_mix(rng, 6_000)
    means = np.where(np.arange(6_000) >= 5_000, MEANS[code] - 0.12, MEANS[code])
    found = opened(fold_all(requests(rng, means, names))[1])
    assert len(found) == 1
    assert found[0].ordinal - 5_000 < 120  # no segment alone could have told so soon
    assert found[0].scope == "stream"
    assert len(found[0].segments) >= 3
    assert found[0].before.rate - found[0].after.rate == pytest.approx(0.12, abs=0.08)


def test_a_fall_of_all_segments_is_told_where_nothing_is_known_of_the_lengths_of_one() -> None:
    """As where its answers became a thousand times longer: none of its requests tells anything."""
    rng = np.random.default_rng(26)
    names, code = even_mix(rng, 6_000)
    fallen = np.arange(6_000) >= 5_000
    batch = requests(rng, np.where(fallen, MEANS[code] - 0.12, MEANS[code]), names)
    length = np.where(fallen & (code == 0), 1e6, rng.integers(100, 1_000, 6_000))
    with np.errstate(all="raise", under="ignore"):
        found = opened(fold_all(replace(batch, output_tokens=length.astype(np.int64)))[1])
    assert found[0].scope == "stream"
    assert NAMES[0] not in [change.segment for change in found[0].segments]


def test_a_rise_is_reported_as_up_and_does_not_hide_a_later_fall() -> None:
    findings = one_segment(25, (0.6, 1_500), (0.85, 400), (0.4, 400))
    assert [finding.direction for finding in opened(findings)] == ["up", "down"]


def test_recovery_ends_the_incident_and_a_second_fall_opens_another() -> None:
    findings = one_segment(26, (0.7, 1_500), (0.5, 1_000), (0.7, 1_500), (0.5, 500))
    first, second = opened(findings)
    (end,) = ended(findings)
    assert 2_500 < end.ordinal < 3_000
    assert (end.reason, end.opened_ordinal, end.change_point) == (
        "recovered",
        first.ordinal,
        first.change_point,
    )
    assert end.segments[0].after.rate == pytest.approx(0.7, abs=0.05)
    assert second.ordinal > 4_000
    assert second.interval[0] > end.ordinal


def test_an_incident_stays_open_while_acceptance_stays_low() -> None:
    for seed in range(5):
        findings = one_segment(seed, (0.7, 1_500), (0.6, 30_000))
        assert len(opened(findings)) == 1
        assert ended(findings) == []


@pytest.mark.parametrize(("share", "fallen"), [(0.4, 0.3), (0.1, 0.3), (0.5, 0.0)])
def test_a_fall_of_some_requests_stays_open_while_the_others_accept_as_before(
    share: float, fallen: float
) -> None:
    """They fall from .8, far beyond what the worst requests accepted before: few raise the alarm."""
    for seed in (34, 35, 36):
        rng = np.random.default_rng(seed)
        broken = (rng.random(6_000) < share) & (np.arange(6_000) >= LEARNED)
        batch = normal(rng, np.where(broken, fallen, 0.8), 0.05)
        findings = fold_all(batch)[1]
        assert len(opened(findings)) == 1, seed
        assert ended(findings) == [], seed


@pytest.mark.parametrize("fallen_for", [1, 2, 4])
def test_a_fall_of_a_few_requests_is_over_soon(fallen_for: int) -> None:
    """So few that the lower bound of what they tell of the distance is none."""
    rng = np.random.default_rng(37)
    mean = np.full(6_000, 0.8)
    mean[LEARNED : LEARNED + fallen_for] = 0.05
    findings = fold_all(normal(rng, mean, 0.05))[1]
    assert len(ended(findings)) == len(opened(findings))
    assert all(finding.ordinal < LEARNED + 1_500 for finding in ended(findings))


def test_an_improvement_by_less_than_half_is_no_recovery() -> None:
    findings = one_segment(27, (0.7, 1_500), (0.4, 500), (0.5, 10_000))
    assert ended(findings) == []


def test_a_changed_segment_without_traffic_no_longer_holds_the_incident_open() -> None:
    rng, config = np.random.default_rng(28), DetectorConfig(history=1_000)
    names = ["gone" if rng.random() < 0.5 else "stays" for _ in range(2_500)] + ["stays"] * 1_500
    means = np.array([0.3 if name == "gone" and place > 2_000 else 0.7 for place, name in enumerate(names)])
    findings = fold_all(requests(rng, means, names), config)[1]
    assert [change.segment for change in opened(findings)[0].segments] == ["gone"]
    (end,) = ended(findings)
    assert end.reason == "no_traffic"
    last_gone = len(names) - 1 - names[::-1].index("gone")
    assert end.ordinal == last_gone + 1 + 1_000


def test_a_smaller_history_set_during_an_incident_is_taken_up() -> None:
    rng = np.random.default_rng(33)
    means = np.concatenate([np.full(1_000, 0.7), np.full(600, 0.3)])
    batch = requests(rng, means, ["gone"] * 1_600)
    state, _ = fold_all(batch)
    later = requests(rng, np.full(2_000, 0.7), ["stays"] * 2_000, first_ordinal=1_601)
    state, _ = fold(CONFIG, state, later[:1_500])
    findings = fold(DetectorConfig(history=1_000), state, later[1_500:])[1]
    assert [end.reason for end in ended(findings)] == ["no_traffic"]


def test_constant_acceptance_that_falls_is_found() -> None:
    state, _ = fold_all(constant(0.8, 400))
    found = opened(fold(CONFIG, state, constant(0.72, 100, first_ordinal=401))[1])
    assert [finding.direction for finding in found] == ["down"]
    assert abs(found[0].change_point - 401) <= 2


def test_requests_without_drafted_tokens_are_counted_and_prove_nothing() -> None:
    batch = requests(np.random.default_rng(29), np.full(2_000, 0.7))
    state, _ = fold_all(batch[:1_500])
    idle = batch[1_500:]
    idle.drafted[:] = 0
    idle.accepted[:] = 0
    after, findings = fold(CONFIG, state, idle)
    assert findings == []
    summary = describe(CONFIG, after)
    assert (summary.requests, summary.undrafted, summary.ordinal) == (2_000, 500, 2_000)
    assert summary.verdict == "drafting_stopped"
    assert after.stream_evidence.tolist() == state.stream_evidence.tolist()


def test_status_follows_the_incident() -> None:
    rng = np.random.default_rng(30)
    names, code = even_mix(rng, 6_000)
    means = np.where((code == 0) & (np.arange(6_000) >= 4_000), 0.45, MEANS[code])
    batch = requests(rng, means, names)
    calm, _ = fold_all(batch[:4_000])
    assert describe(CONFIG, calm).verdict == "steady"
    state, findings = fold(CONFIG, calm, batch[4_000:])
    summary = describe(CONFIG, state)
    assert summary.verdict == "degraded"
    assert summary.change_point == opened(findings)[0].change_point
    assert summary.since == pytest.approx(opened(findings)[0].change_point_at)
    verdicts = {segment.segment: segment.verdict for segment in summary.segments}
    assert verdicts.pop("summarise") == "degraded"
    assert set(verdicts.values()) <= {"steady", "off_baseline"}  # by chance their newest requests lie off
    recent = next(segment.recent for segment in summary.segments if segment.segment == "summarise")
    assert recent is not None
    assert recent.low < 0.45 < recent.high


def test_an_incident_resolved_by_hand_can_open_again() -> None:
    rng = np.random.default_rng(31)
    means = np.concatenate([np.full(1_500, 0.7), np.full(1_000, 0.5)])
    batch = requests(rng, means)
    state, findings = fold_all(batch[:2_000])
    assert len(opened(findings)) == 1
    resolved = end_incident(state, "down")
    assert describe(CONFIG, resolved).verdict == "steady"
    (again,) = opened(fold(CONFIG, resolved, batch[2_000:])[1])
    assert again.change_point > 2_000


def test_a_new_stream_has_a_baseline_of_its_own() -> None:
    rng = np.random.default_rng(32)
    fold_all(requests(rng, np.full(1_500, 0.8)))
    assert opened(fold_all(requests(rng, np.full(1_500, 0.5)), state=StreamState())[1]) == []
