"""What is learned of traffic as it comes: silent nights and days, a clock that is set back by an hour, one
request in a hundred of another segment, restarts between batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from driftguard.detection import (
    BaselineReady,
    DetectorConfig,
    DriftClosed,
    DriftOpened,
    DriftSeenGradual,
    DriftWidened,
    Finding,
    ObservationBatch,
    StreamState,
    describe,
    fold,
    treat_as_usual,
)
from driftguard.detection.state.codec import decode_state, encode_state
from tests.detection.traffic import requests

Floats = NDArray[np.float64]
HOUR, DAY, WEEK = 3_600.0, 86_400.0, 604_800.0
THURSDAY = 1_699_488_000.0  # 2023-11-09 00:00 UTC
CONFIG = DetectorConfig()
RARE = 0.01


def moments(
    rng: np.random.Generator, days: float, per_day: float, silent: list[tuple[float, float]]
) -> Floats:
    """Seconds since THURSDAY, without those in the `silent` spans (days)."""
    at = np.sort(rng.random(int(days * per_day))) * days
    for begin, end in silent:
        at = at[(at < begin) | (at >= end)]
    return at * DAY


def set_back(at: Floats, days: list[float]) -> Floats:
    """The source's clock, which loses an hour at each of these times."""
    back = np.zeros(len(at))
    for day in days:
        back += at >= day * DAY
    return THURSDAY + at - HOUR * back


def with_rare(rng: np.random.Generator, means: Floats) -> tuple[list[str], Floats]:
    """One request in a hundred is of another segment, which accepts .3 less."""
    rare = rng.random(len(means)) < RARE
    return ["rare" if one else "chat" for one in rare], np.where(rare, means - 0.3, means)


def traffic(rng: np.random.Generator, at: Floats, means: Floats, back: list[float]) -> ObservationBatch:
    names, means = with_rare(rng, means)
    return replace(requests(rng, means, names), ended_at=set_back(at, back))


def restarted(
    batch: ObservationBatch, seed: int, state: StreamState | None = None
) -> tuple[StreamState, list[Finding]]:
    """Folded in thirty batches, with a restart after each; the same as at once."""
    cuts = sorted(np.random.default_rng(seed).choice(np.arange(1, len(batch)), 30, replace=False).tolist())
    begun = state = state or StreamState()
    findings: list[Finding] = []
    for start, stop in zip([0, *cuts], [*cuts, len(batch)], strict=True):
        state, found = fold(CONFIG, state, batch[start:stop])
        state = decode_state(encode_state(state))
        findings += found
    whole, found = fold(CONFIG, begun, batch)
    assert (encode_state(whole), found) == (encode_state(state), findings)
    return state, findings


def opened(findings: list[Finding]) -> list[DriftOpened]:
    return [each for each in findings if isinstance(each, DriftOpened)]


def follows(state: StreamState) -> dict[str, float]:
    return {one.factor: one.by for one in describe(CONFIG, state).segments[0].follows}


def test_a_daily_rhythm_is_no_incident_and_hides_none() -> None:
    found = 0
    for seed in range(3):
        rng = np.random.default_rng([701, seed])
        silent = [(5.2, 5.6), (7.0, 8.0), (9.9, 10.1)]
        at = moments(rng, 12.0, 1_000, silent)
        wave = 0.08 * np.sin(2.0 * np.pi * at / DAY)
        means = 0.7 + wave - 0.12 * (at >= 11.0 * DAY)
        batch = traffic(rng, at, means, [3.4, 8.5])
        state, findings = restarted(batch, seed)
        assert follows(state)["day"] > 0.04
        fell = int(np.searchsorted(at, 11.0 * DAY)) + 1
        learned = int(np.searchsorted(at, 3.5 * DAY))
        alarms = [each.ordinal for each in opened(findings) if each.ordinal > learned]
        assert all(ordinal >= fell for ordinal in alarms), (seed, alarms, fell)
        found += bool(alarms) and alarms[0] < fell + 500
    assert found == 3


def test_weekends_are_no_incident_after_two_and_a_fall_on_a_later_one_is() -> None:
    for seed, extra in ((1, 0.0), (2, 0.15)):
        rng = np.random.default_rng([702, seed])
        silent = [(day + 0.0, day + 0.3) for day in range(25)] + [(13.4, 13.6), (20.0, 20.8)]
        at = moments(rng, 25.0, 600, silent)
        weekend = (at % WEEK >= 2.0 * DAY) & (at % WEEK < 4.0 * DAY)  # weeks begin on Thursdays
        fell = at >= 23.4 * DAY
        means = 0.7 - 0.12 * weekend - extra * fell
        state, findings = restarted(traffic(rng, at, means, [10.5]), seed)
        since = int(np.searchsorted(at, 15.0 * DAY))
        late = [each for each in opened(findings) if each.direction == "down" and each.ordinal > since]
        if extra:
            (alarm,) = late
            assert alarm.ordinal > np.searchsorted(at, 23.4 * DAY)
        else:
            assert follows(state)["week"] > 0.03
            assert late == []


def test_prompts_that_become_longer_are_no_incident_once_their_lengths_are_known() -> None:
    rng = np.random.default_rng([703])
    at = moments(rng, 8.0, 1_200, [(4.0, 4.5)])
    share = np.where(at < 5.0 * DAY, 0.3, 0.8)
    long = rng.random(len(at)) < share
    means = np.where(long, 0.55, 0.7)
    prompts = np.where(long, rng.integers(3_000, 8_000, len(at)), rng.integers(50, 400, len(at)))
    batch = replace(traffic(rng, at, means, [2.5]), prompt_tokens=prompts)
    state, findings = restarted(batch, 3)
    assert follows(state)["prompt"] > 0.04
    assert opened(findings) == []
    fallen = replace(
        traffic(rng, at[: len(at) // 8] + 8.0 * DAY, means[-(len(at) // 8) :] - 0.12, [2.5]),
        prompt_tokens=prompts[-(len(at) // 8) :],
        ordinal=np.arange(len(at) // 8) + len(at) + 1,
    )
    assert [each.direction for each in opened(restarted(fallen, 4, state)[1])] == ["down"]


def test_a_slow_fall_through_a_silent_night_and_a_clock_set_back_is_one_incident_and_gradual() -> None:
    told = 0
    for seed in range(3):
        rng = np.random.default_rng([704, seed])
        at = moments(rng, 10.0, 1_500, [(6.0, 6.4), (7.1, 7.4)])
        means = np.interp(at, [5.5 * DAY, 7.5 * DAY], [0.7, 0.55]).astype(np.float64)
        batch = traffic(rng, at, means, [6.8])
        state, findings = restarted(batch, seed)
        alarms = opened(findings)
        assert [each.direction for each in alarms] == ["down"]
        seen = [alarms[0].gradual, *(each.gradual for each in findings if isinstance(each, DriftSeenGradual))]
        certain = [each for each in seen if each is not None and each.certain]
        onset = THURSDAY + 5.5 * DAY
        for each in certain[-1:]:
            told += (
                each.interval[0].timestamp() <= onset + HOUR and each.interval[1].timestamp() >= onset - HOUR
            )
        assert state.incidents[0] is not None
    assert told >= 2


@pytest.mark.slow
def test_a_fall_in_the_reference_period_of_a_rare_segment_that_pauses_is_found_and_none_is_made_up() -> None:
    found = 0
    for seed in range(3):
        rng = np.random.default_rng([705, seed])
        at = moments(rng, 12.0, 7_500, [(3.0, 3.3), (6.0, 6.5)])
        for drop in (0.0, 0.2):
            names, means = with_rare(rng, np.full(len(at), 0.8))
            own = np.flatnonzero(np.array(names) == "rare")
            means[own[180:]] -= drop
            batch = replace(requests(rng, means, names), ended_at=set_back(at, [2.2, 5.1]))
            _, findings = restarted(batch, seed)
            alarms = opened(findings)
            if drop:
                found += [segment.segment for each in alarms for segment in each.segments] == ["rare"]
            else:
                assert alarms == [], seed
                assert {each.segment for each in findings if isinstance(each, BaselineReady)} == {
                    "chat",
                    "rare",
                }
    assert found == 3


def test_weekends_taken_as_usual_stay_so_after_a_silent_one_and_a_clock_set_back() -> None:
    rng = np.random.default_rng([706])
    at = moments(rng, 32.0, 400, [(19.0, 20.0)]) + 4.0 * DAY  # from a Monday on; the third Saturday is silent
    weekend = (at % WEEK >= 2.0 * DAY) & (at % WEEK < 4.0 * DAY)
    batch = traffic(rng, at, np.where(weekend, 0.58, 0.7), [14.0, 21.5])
    asked = int(np.searchsorted(at, 16.5 * DAY))  # on the second Saturday
    state, findings = restarted(batch[:asked], 1)
    assert state.incidents[0] is not None
    state = treat_as_usual(state, "down", "week")
    _, findings = restarted(batch[asked:], 2, state)
    assert [each for each in opened(findings) if each.direction == "down"] == []


def office_hours(rng: np.random.Generator, at: Floats, moved: float) -> Floats:
    """Means that are lower from nine to five, in UTC an hour earlier from that day on."""
    hour = (at + HOUR * (at >= moved * DAY)) % DAY / HOUR
    return 0.7 - 0.15 * np.clip(hour - 8.5, 0.0, 1.0) * np.clip(17.5 - hour, 0.0, 1.0)


def test_office_hours_an_hour_earlier_as_clocks_are_changed_are_learned_anew_in_three_days() -> None:
    rng = np.random.default_rng([707])
    at = moments(rng, 13.0, 3_000, [(4.0, 4.2)])
    batch = traffic(rng, at, office_hours(rng, at, 8.0), [])
    state, findings = restarted(batch, 1)
    days = [at[each.ordinal - 1] / DAY for each in opened(findings)]
    assert [day for day in days if 3.0 <= day < 8.0] == []
    assert [day for day in days if day >= 8.0] != []
    assert [day for day in days if day >= 11.0] == []
    assert follows(state)["day"] > 0.05


def office_hours_beside_a_rare_segment(
    seed: int, days: float, per_day: float, moved: float
) -> tuple[Floats, ObservationBatch]:
    """Seconds since THURSDAY, and the requests, one in twenty of another segment, which falls for good
    most of a day before the hours move."""
    rng = np.random.default_rng([seed])
    at = moments(rng, days, per_day, [])
    rare = rng.random(len(at)) < 0.05
    means = np.where(rare, 0.6 - 0.2 * (at >= (moved - 0.8) * DAY), office_hours(rng, at, moved))
    names = ["rare" if one else "chat" for one in rare]
    return at, replace(requests(rng, means, names), ended_at=THURSDAY + at)


def test_office_hours_that_move_are_learned_anew_while_a_rare_segment_is_not_back() -> None:
    at, batch = office_hours_beside_a_rare_segment(710, 14.0, 3_000, moved=8.0)
    state, findings = restarted(batch, 1)
    fall = next(each for each in opened(findings) if at[each.ordinal - 1] >= 7.2 * DAY)
    assert [change.segment for change in fall.segments] == ["rare"]
    joined = [at[each.ordinal - 1] / DAY for each in findings if isinstance(each, DriftWidened)]
    print(f"seed [710]: chat joined at days {np.round(joined, 2)}")
    assert [day for day in joined if 8.0 <= day < 11.0] != []
    assert [day for day in joined if day >= 11.0] == []
    degraded = [each.segment for each in describe(CONFIG, state).segments if each.verdict == "degraded"]
    assert degraded == ["rare"]


def test_a_rhythm_that_has_moved_is_taken_as_usual_by_its_first_whole_day() -> None:
    rng = np.random.default_rng([708])
    at = moments(rng, 12.0, 2_000, [])
    batch = traffic(rng, at, office_hours(rng, at, 7.0), [])
    asked = int(np.searchsorted(at, 9.0 * DAY))  # at the third fall of an hour
    state, _ = restarted(batch[:asked], 1)
    while state.incidents[0] is None:
        state, _ = fold(CONFIG, state, batch[asked : asked + 1])
        asked += 1
    assert at[asked] < 9.5 * DAY
    _, findings = restarted(batch[asked:], 2, treat_as_usual(state, "down", "day"))
    assert opened(findings) == []


def test_a_segment_that_is_back_is_taken_as_usual_with_those_that_are_not() -> None:
    at, batch = office_hours_beside_a_rare_segment(711, 12.0, 2_000, moved=7.0)
    asked = int(np.searchsorted(at, 9.2 * DAY))
    state, findings = restarted(batch[:asked], 1)
    over = [each for each in findings if isinstance(each, DriftClosed) and each.direction == "down"]
    assert at[over[-1].ordinal - 1] > 7.0 * DAY
    assert [change.segment for change in over[-1].segments] == ["chat"]
    assert over[-1].left == ("rare",)
    _, findings = restarted(batch[asked:], 2, treat_as_usual(state, "down", "day", ["rare", "chat"]))
    again = [each for each in findings if isinstance(each, DriftOpened | DriftWidened)]
    assert "chat" not in {change.segment for each in again for change in each.segments}


def test_what_is_usual_is_computed_without_a_warning_beside_a_segment_without_a_baseline() -> None:
    rng = np.random.default_rng([709])
    means = np.repeat([0.7, 0.4], [2_000, 200])
    batch = requests(rng, means, ["new" if place == 1_000 else "chat" for place in range(len(means))])
    state, _ = fold(CONFIG, StreamState(), batch)
    assert state.incidents[0] is not None
    assert not state.ready.all()
    with np.errstate(all="raise"):
        assert treat_as_usual(state, "down", "day").incidents[0] is None
