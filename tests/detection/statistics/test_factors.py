"""Acceptance that depends on the hour of day: learned after days, and a slow drift is still found."""

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
    ProfileLearned,
    StreamState,
    accept_new_normal,
    describe,
    fold,
)
from driftguard.detection.state.codec import decode_state, encode_state
from driftguard.detection.statistics.factors import (
    DAY,
    Profile,
    cycle_over,
    cycles_begun,
    taken_as_usual,
    tallied,
)
from tests.detection.traffic import fold_all, requests

pytestmark = pytest.mark.slow

Floats = NDArray[np.float64]

MIDNIGHT = 1_700_006_400.0  # UTC
SECONDS_PER_DAY = 86_400.0
PER_DAY = 1_000
AMPLITUDE = 0.08


def moments(rng: np.random.Generator, days: float, per_day: int = PER_DAY) -> Floats:
    """Days since the first midnight; four times as many requests around 14:00 as around 2:00."""
    at = np.sort(rng.random(int(1.6 * per_day * days)) * days)
    busy = 1.0 + 0.6 * np.cos(2.0 * np.pi * (at * 24.0 - 14.0) / 24.0)
    return at[rng.random(len(at)) < busy / 1.6]


def rhythm(at: Floats, amplitude: float = AMPLITUDE) -> Floats:
    return amplitude * np.sin(2.0 * np.pi * (at * 24.0 - 3.0) / 24.0)


def daily(rng: np.random.Generator, at: Floats, mean: Floats) -> ObservationBatch:
    return replace(requests(rng, mean), ended_at=MIDNIGHT + at * SECONDS_PER_DAY)


def opened(findings: list[Finding]) -> list[DriftOpened]:
    return [finding for finding in findings if isinstance(finding, DriftOpened)]


def ended(findings: list[Finding]) -> list[DriftClosed]:
    return [finding for finding in findings if isinstance(finding, DriftClosed)]


def by_factor(state: StreamState) -> dict[str, float]:
    return {one.factor: one.by for one in describe(DetectorConfig(), state).segments[0].follows}


def learned(findings: list[Finding]) -> list[ProfileLearned]:
    return [finding for finding in findings if isinstance(finding, ProfileLearned)]


def test_a_rhythm_is_learned_from_two_days_and_raises_no_alarm_from_then_on() -> None:
    for seed in range(4):
        rng = np.random.default_rng([91, seed])
        at = moments(rng, 15.0)
        state, findings = fold_all(daily(rng, at, 0.65 + rhythm(at)))
        (found,) = learned(findings)
        assert (found.segment, found.factor, found.cycles) == ("chat", "day", 2)
        assert found.amplitude == pytest.approx(AMPLITUDE, abs=0.03)
        assert at[found.ordinal - 1] < 3.0
        assert [alarm for alarm in opened(findings) if alarm.ordinal >= found.ordinal] == []
        assert by_factor(state) == {"day": pytest.approx(0.08, abs=0.02)}


@pytest.mark.parametrize("amplitude", [0.0, AMPLITUDE])
def test_a_decline_of_a_tenth_over_a_week_is_found(amplitude: float) -> None:
    for seed in range(4):
        rng = np.random.default_rng([92, seed])
        at = moments(rng, 15.0)
        decline = 0.1 * np.clip((at - 8.0) / 7.0, 0.0, 1.0)
        findings = fold_all(daily(rng, at, 0.65 + rhythm(at, amplitude) - decline))[1]
        assert len(learned(findings)) == (amplitude > 0.0)
        late = [alarm for alarm in opened(findings) if at[alarm.ordinal - 1] >= 8.0]
        assert {alarm.direction for alarm in late} == {"down"}
        assert at[late[-1].ordinal - 1] < 13.0
        assert max((end.ordinal for end in ended(findings)), default=0) < late[-1].ordinal  # and stays open


@pytest.mark.parametrize("amplitude", [0.0, AMPLITUDE])
def test_a_sudden_drop_is_found_within_some_more_requests_than_without_a_rhythm(amplitude: float) -> None:
    delays, held = [], 0
    for seed in range(8):
        rng = np.random.default_rng([93, seed])
        at = moments(rng, 9.5)
        begun = int(np.searchsorted(at, 8.3)) + 1
        findings = fold_all(daily(rng, at, 0.65 + rhythm(at, amplitude) - 0.1 * (at >= 8.3)))[1]
        late = [alarm for alarm in opened(findings) if alarm.ordinal >= begun]
        assert [alarm.direction for alarm in late] == ["down"]
        assert late[0].before.rate == pytest.approx(
            0.65 + rhythm(at, amplitude)[late[0].change_point - 1], abs=0.04
        )
        delays.append(late[0].ordinal - begun + 1)
        held += late[0].interval[0] <= begun <= late[0].interval[1]
    assert np.median(delays) <= (75 if amplitude == 0.0 else 120)
    assert held >= 6


def test_without_a_rhythm_none_is_learned() -> None:
    for seed in range(6):
        rng = np.random.default_rng([94, seed])
        at = moments(rng, 20.0)
        decline = 0.1 / 7.0 * at * (seed % 2)  # every other stream declines all the time
        assert learned(fold_all(daily(rng, at, 0.8 - decline))[1]) == []


def windows(at: Floats, x: Floats) -> ObservationBatch:
    """Of five minutes each, which end at these days."""
    ended = MIDNIGHT + at * SECONDS_PER_DAY
    return ObservationBatch.of(
        np.arange(1, len(at) + 1),
        ["default"] * len(at),
        np.full(len(at), 20_000),
        np.rint(20_000 * x).astype(np.int64),
        ended,
        kind=["window"] * len(at),
        started_at=ended - 300.0,
    )


def test_windows_of_a_counter_have_a_rhythm_too() -> None:
    rng = np.random.default_rng(95)
    at = np.arange(1, 12 * 288 + 1) / 288.0
    x = 0.6 + rhythm(at) - 0.1 * (at >= 11.0) + rng.normal(0.0, 0.012, len(at))
    findings = fold_all(windows(at, x))[1]
    (found,) = learned(findings)
    late = [alarm for alarm in opened(findings) if alarm.ordinal >= found.ordinal]
    assert [alarm.direction for alarm in late] == ["down"]
    assert 11 * 288 <= late[0].ordinal < 11 * 288 + 12


def test_the_hour_is_not_counted_again_as_the_conversation_of_the_hour() -> None:
    """What earlier requests of a conversation accepted in the same hour says nothing about itself."""
    rng = np.random.default_rng(96)
    at = moments(rng, 12.0, 1_500)
    own = rng.normal(0.0, 0.06, len(at) // 10 + 1)[np.arange(len(at)) // 10]
    batch = daily(rng, at, np.clip(0.65 + rhythm(at) + own, 0.2, 0.95))
    batch = replace(batch, session=[f"s{number // 10}" for number in range(len(at))])
    findings = fold_all(batch)[1]
    (found,) = learned(findings)
    assert [alarm for alarm in opened(findings) if alarm.ordinal >= found.ordinal] == []


def test_a_day_with_an_incident_does_not_change_a_rhythm_that_is_used() -> None:
    rng = np.random.default_rng(97)
    at = moments(rng, 14.0)
    fallen = 0.25 * ((at >= 6.4) & (at < 6.9))
    calm, findings = fold_all(daily(rng, at, 0.65 + rhythm(at) - fallen))
    (found,) = learned(findings)
    assert [alarm.direction for alarm in opened(findings) if alarm.ordinal >= found.ordinal] == ["down"]
    hours = (np.arange(24) + 0.5) / 24
    apart = calm.profiles[0].effect[0] - rhythm(hours)
    assert np.abs(apart - apart.mean()).max() < 0.035


def test_one_wrong_clock_does_not_keep_a_rhythm_from_being_learned() -> None:
    rng = np.random.default_rng(98)
    at = moments(rng, 6.0)
    batch = daily(rng, at, 0.65 + rhythm(at))
    batch.ended_at[[900, 2_500]] += 3_650 * SECONDS_PER_DAY
    assert len(learned(fold_all(batch)[1])) == 1


def test_an_accepted_new_normal_begins_without_a_rhythm() -> None:
    rng = np.random.default_rng(99)
    at = moments(rng, 10.0)
    batch = daily(rng, at, 0.65 + rhythm(at) - 0.2 * (at >= 9.0))
    state, _ = fold_all(batch)
    assert describe(DetectorConfig(), state).verdict == "degraded"
    assert state.profiles[0].used.tolist() == [True]
    for anew in accept_new_normal(state, "down").profiles:
        assert not any(column.any() for column in (anew.used, anew.effect, anew.totals))


def test_days_that_miss_hours_are_put_together() -> None:
    """Each day has another level and 12 of the hours; the effects come out up to a constant."""
    rng, strata = np.random.default_rng(100), np.zeros(2_400, dtype=np.uint16)
    true, rhythms = rng.normal(0.0, 0.05, DAY.cells), Profile.none(DAY.cells, 1)
    rhythms = replace(rhythms, reference=np.ones((1, DAY.cells)))
    for day in range(8):
        hour = (np.repeat(np.arange(12), 200) + 6 * day) % DAY.cells
        residual = 0.1 * day + true[hour] + rng.normal(0.0, 0.03, 2_400)
        rhythms, _ = cycle_over(rhythms, DAY, day, 0.01)
        told = np.ones(2_400, dtype=np.bool_)
        rhythms = tallied(rhythms, strata, np.full(2_400, day), hour, residual, told)
    rhythms, _ = cycle_over(rhythms, DAY, 8, 0.01)
    assert rhythms.used.tolist() == [True]
    assert rhythms.effect[0] == pytest.approx(true - true.mean(), abs=0.015)
    assert rhythms.counted.tolist() == [8]


def eventful() -> ObservationBatch:
    """Two segments of conversations with rhythms, late records, a wrong clock, a drop, idle records."""
    rng = np.random.default_rng(101)
    at = moments(rng, 7.0, 1_600)
    n = len(at)
    code = rng.integers(0, 2, n)
    mean = 0.65 + rhythm(at) * np.where(code == 0, 1.0, -0.6) - 0.2 * ((code == 0) & (at > 5.5))
    batch = daily(rng, at, mean)
    ended, late = batch.ended_at.copy(), rng.random(n) < 0.02
    ended[late] -= rng.choice([3_600.0, 40_000.0, 3 * SECONDS_PER_DAY], int(late.sum()))
    ended[[1_000, 5_000]] += 400 * SECONDS_PER_DAY
    idle = rng.random(n) < 0.03
    return replace(
        batch,
        ended_at=ended,
        segment=[f"segment {number}" for number in code],
        session=[f"s{number // 6}" if number % 5 else None for number in range(n)],
        drafted=np.where(idle, 0, batch.drafted),
        accepted=np.where(idle, 0, batch.accepted),
    )


def test_the_result_does_not_depend_on_batches_or_restarts() -> None:
    batch, config = eventful(), DetectorConfig(false_alarm_every=10_000.0)
    whole, found = fold_all(batch, config)
    assert len(learned(found)) == 2
    assert opened(found)
    rng, n = np.random.default_rng(102), len(batch)
    begins = np.flatnonzero(np.diff(batch.ended_at // SECONDS_PER_DAY)) + 1  # every day's first and last
    cuts = {*rng.choice(n, 60, replace=False).tolist(), *begins.tolist(), *(begins + 1).tolist()}
    state, findings = StreamState(), []
    for start, stop in zip([0, *sorted(cuts - {0, n})], [*sorted(cuts - {0, n}), n], strict=True):
        state, more = fold(config, decode_state(encode_state(state)), batch[start:stop])
        findings += more
    assert findings == found
    assert encode_state(state) == encode_state(whole)


def test_days_of_other_hours_give_the_rhythm_up_and_say_so() -> None:
    rng, rhythms, told = np.random.default_rng(103), Profile.none(DAY.cells, 2), []
    for day in range(10):
        rhythms, changed = cycle_over(rhythms, DAY, day, 0.01)
        told.append(changed.tolist())
        hour = np.repeat(np.arange(12) + (12 if day >= 5 else 0), 50)
        stratum = (np.arange(600) % 2).astype(np.uint16)
        residual = 0.02 * (hour % 12) * (stratum == 0) + rng.normal(0.0, 0.05, 600)
        rhythms = tallied(rhythms, stratum, np.full(600, day), hour, residual, np.ones(600, dtype=np.bool_))
    assert [day for day, changed in enumerate(told) if changed[0]] == [2, 7, 8]  # used, given up, used
    assert not any(changed[1] for changed in told)


def with_day(
    rng: np.random.Generator, profile: Profile, number: int, hours: range, by: float = 0.02
) -> Profile:
    """After a day of ten requests in each of these hours, with a slight rhythm; the next one begins."""
    hour = np.repeat(np.array(hours), 10)
    residual = by * np.sin(hour / 4.0) + rng.normal(0.0, 0.1, len(hour))
    told, strata = np.ones(len(hour), dtype=np.bool_), np.zeros(len(hour), dtype=np.uint16)
    profile = tallied(profile, strata, np.full(len(hour), number), hour, residual, told)
    return cycle_over(profile, DAY, number + 1, 0.01)[0]


def taken(profile: Profile) -> Profile:
    return taken_as_usual(profile, DAY, np.ones(1, dtype=np.bool_), np.full(1, 0.01))


def test_what_was_taken_as_usual_after_two_days_stays_in_use_whichever_of_three_is_set_aside() -> None:
    given_up = 0
    for seed in range(12):
        rng = np.random.default_rng([106, seed])
        profile = replace(Profile.none(DAY.cells, 1), reference=np.ones((1, DAY.cells)))
        for number in (0, 1):
            profile = with_day(rng, profile, number, range(24))
        profile = with_day(rng, taken(profile), 2, range(24))
        given_up += not profile.used[0]
    assert given_up == 0


def test_a_day_of_other_hours_does_not_take_the_place_of_all_others_in_what_is_taken_as_usual() -> None:
    rng, profile = np.random.default_rng(107), Profile.none(DAY.cells, 1)
    profile = replace(profile, reference=np.ones((1, DAY.cells)))
    for number, hours in enumerate((range(12), range(12, 24), range(12), range(12))):
        profile = with_day(rng, profile, number, hours, by=0.05)
    assert not profile.used[0]
    effect = taken(profile).effect[0]
    assert np.ptp(effect[:12]) > 0.005
    assert np.ptp(effect[12:]) == 0.0  # which one day alone has seen, and nothing tells its level


def by_row(day: int, strays: int, days: NDArray[np.int64]) -> tuple[list[tuple[int, int]], int]:
    begun = []
    for place, other in enumerate(days.tolist()):
        if other == day:
            strays = 0
        elif other == day + 1 or strays == 99:
            day, strays = other, 0
            begun.append((place, day))
        else:
            strays += 1
    return begun, strays


def test_another_day_begins_where_row_by_row_it_would() -> None:
    rng = np.random.default_rng(104)
    for _ in range(200):
        lengths = rng.choice([1, 2, 60, 99, 100, 130], 8)
        days = np.repeat(5 + rng.integers(-1, 3, 8), lengths)
        assert cycles_begun(5, 40, days) == by_row(5, 40, days)


def weekly(
    rng: np.random.Generator, days: float, per_day: int, *, begins_at: float = 0.0, hours_west: float = 0.0
) -> tuple[Floats, Floats]:
    """Days since Monday 0:00 UTC from `begins_at` on, and 1 at each that is a weekend some hours west."""
    at = begins_at + np.sort(rng.random(int(per_day * days))) * days
    return at, ((at - hours_west / 24.0) % 7.0 >= 5.0).astype(np.float64)


MONDAY = MIDNIGHT + 6 * SECONDS_PER_DAY


def of_week(rng: np.random.Generator, at: Floats, mean: Floats) -> ObservationBatch:
    return replace(requests(rng, mean), ended_at=MONDAY + at * SECONDS_PER_DAY)


@pytest.mark.parametrize(("per_day", "hours_west"), [(600, 0.0), (600, 8.0), (5_000, -5.5)])
def test_weekends_are_learned_from_two_weeks_and_raise_no_alarm_from_then_on(
    per_day: int, hours_west: float
) -> None:
    for seed in range(4):
        rng = np.random.default_rng([105, seed])
        at, weekend = weekly(rng, 42.0, per_day, begins_at=2.0 * seed, hours_west=hours_west)
        state, findings = fold_all(of_week(rng, at, 0.65 - 0.05 * weekend))
        by_week = [found for found in learned(findings) if found.factor == "week"]
        assert len(by_week) == 1
        assert at[by_week[0].ordinal - 1] - at[0] < 22.0
        late = [alarm for alarm in opened(findings) if alarm.ordinal >= by_week[0].ordinal]
        assert late == []
        assert by_factor(state) == {"week": pytest.approx(0.025, abs=0.01)}


def test_a_fall_at_a_weekend_that_is_learned_is_found() -> None:
    for seed in range(4):
        rng = np.random.default_rng([106, seed])
        at, weekend = weekly(rng, 35.0, 1_000)
        fallen = at >= 33.3  # the fifth Saturday, 7:12
        findings = fold_all(of_week(rng, at, 0.65 - 0.05 * weekend - 0.1 * fallen))[1]
        (late,) = [alarm for alarm in opened(findings) if at[alarm.ordinal - 1] >= 28.0]
        assert late.direction == "down"
        assert 33.3 <= at[late.ordinal - 1] < 33.5


def prompts(rng: np.random.Generator, at: Floats) -> tuple[ObservationBatch, Floats]:
    """Long prompts accept less, cached ones more; their shares wander from day to day."""
    n = len(at)
    long = rng.random(n) < 0.5 + 0.35 * np.sin(2.0 * np.pi * at / 3.7)
    cached = long & (rng.random(n) < 0.5 + 0.4 * np.sin(2.0 * np.pi * at / 5.3))
    mean = 0.65 - 0.1 * long + 0.06 * cached
    tokens = np.where(long, rng.integers(4_000, 8_000, n), rng.integers(20, 400, n))
    batch = daily(rng, at, mean)
    return replace(batch, prompt_tokens=tokens, cached_tokens=np.where(cached, tokens * 3 // 4, 0)), mean


def test_a_mix_of_prompts_that_wanders_is_no_change_once_it_is_learned() -> None:
    for seed in range(3):
        rng = np.random.default_rng([107, seed])
        at = moments(rng, 14.0)
        batch, _ = prompts(rng, at)
        state, findings = fold_all(batch)
        assert by_factor(state) == {"prompt": pytest.approx(0.05, abs=0.015)}
        found = [one for one in learned(findings) if one.factor == "prompt"]
        assert at[found[0].ordinal - 1] < 5.0
        assert [alarm for alarm in opened(findings) if alarm.ordinal >= found[-1].ordinal] == []


def test_long_prompts_that_collapse_are_found_although_prompts_are_allowed_for() -> None:
    for seed in range(3):
        rng = np.random.default_rng([108, seed])
        at = moments(rng, 12.0)
        batch, mean = prompts(rng, at)
        fallen = np.where((at >= 10.2) & (batch.prompt_tokens > 1_000), 0.25, 0.0)
        worse = replace(
            daily(rng, at, mean - fallen),
            prompt_tokens=batch.prompt_tokens,
            cached_tokens=batch.cached_tokens,
        )
        findings = fold_all(worse)[1]
        late = [alarm for alarm in opened(findings) if at[alarm.ordinal - 1] >= 10.2]
        assert [alarm.direction for alarm in late] == ["down"]
        assert at[late[0].ordinal - 1] < 10.5


def test_a_step_in_the_length_of_answers_is_learned_where_a_line_does_not_fit() -> None:
    rng = np.random.default_rng(109)
    at = moments(rng, 8.0)
    length = np.exp(rng.normal(4.5 + 1.2 * np.sin(2.0 * np.pi * at / 2.9), 1.0)).astype(np.int64) + 1
    mean = 0.65 - 0.12 * (length >= 256).astype(np.float64)
    state, findings = fold_all(replace(daily(rng, at, mean), output_tokens=length))
    assert "answer" in by_factor(state)
    last = [one for one in learned(findings) if one.factor == "answer"][-1]
    assert [alarm for alarm in opened(findings) if alarm.ordinal >= last.ordinal] == []


def test_a_length_that_follows_from_acceptance_explains_nothing_in_steps_either() -> None:
    """Requests of equally many steps: what they emit is what was accepted, and one token a step more."""
    rng = np.random.default_rng(110)
    at = moments(rng, 7.0)
    batch = daily(rng, at, 0.65 - 0.1 * (at >= 5.3).astype(np.float64))
    drafted = np.full(len(at), 120)
    accepted = rng.binomial(drafted, np.clip(batch.accepted / batch.drafted, 0.0, 1.0))
    batch = replace(batch, drafted=drafted, accepted=accepted, output_tokens=accepted + 30)
    state, findings = fold_all(batch)
    assert by_factor(state) == {}
    assert [at[alarm.ordinal - 1] >= 5.3 for alarm in opened(findings)] == [True]


@pytest.mark.parametrize("again", [2, 3])
def test_a_repaired_fault_is_not_the_rhythm_of_hours_that_one_day_alone_has_seen(again: int) -> None:
    for seed in range(4):
        rng = np.random.default_rng([96, seed])
        at = moments(rng, again + 1.0)
        at = at[at >= 0.2]  # the baseline is ready in the afternoon of the first day
        mean = np.full(len(at), 0.75)
        mean[(at % 1.0 >= 0.125) & (at % 1.0 < 0.46) & np.isin(at // 1.0, [1, again])] -= 0.2
        findings = fold_all(daily(rng, at, mean))[1]
        assert learned(findings) == []
        assert [int(at[alarm.ordinal - 1]) for alarm in opened(findings)] == [1, again]


@pytest.mark.parametrize("seed", range(4))
def test_a_fault_while_a_rhythm_is_learned_does_not_hide_those_of_the_weeks_that_follow(seed: int) -> None:
    rng = np.random.default_rng([98, seed])
    at = 0.9 + np.arange(1, 12 * 288 + 1) / 288.0
    faults = [2.3, 6.4, 9.7, 11.5]
    x = 0.65 + rhythm(at, 0.06) + rng.normal(0.0, 0.01, len(at))
    for fault in faults:
        x[(at >= fault) & (at < fault + 0.3)] -= 0.15
    findings = fold_all(windows(at, x))[1]
    (found,) = learned(findings)
    assert at[found.ordinal - 1] == pytest.approx(4.0, abs=0.01)
    told = [float(at[alarm.ordinal - 1]) for alarm in opened(findings) if alarm.ordinal > found.ordinal]
    assert told == pytest.approx(faults[1:], abs=0.05)


def test_the_first_fault_after_an_alarm_for_a_rhythm_does_not_hide_those_that_follow() -> None:
    rng = np.random.default_rng([97, 0])
    at = moments(rng, 6.0, 3_000)
    faults = [2.25, 3.6, 4.4, 5.65]
    mean = 0.65 + rhythm(at, 0.06)
    for fault in faults:
        mean[(at >= fault) & (at < fault + 0.2)] -= 0.15
    findings = fold_all(daily(rng, at, mean))[1]
    (found,) = learned(findings)
    alarms = [float(at[alarm.ordinal - 1]) for alarm in opened(findings)]
    assert alarms[0] < at[found.ordinal - 1] < faults[0]  # the first is for the rhythm
    assert alarms[1:] == pytest.approx(faults, abs=0.03)
    over = [float(at[end.ordinal - 1]) for end in ended(findings)]
    assert over[1:] == pytest.approx([fault + 0.2 for fault in faults], abs=0.1)
