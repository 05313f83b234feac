"""Servers of known step time and acceptance: what is recovered, which K is best, and what is not told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import msgspec
import numpy as np
import pytest

from driftguard.cost import Cost, Interval, TimedRequest, assess, payoff
from driftguard.cost.assessment import PARTLY_MEASURED, UNMEASURED
from driftguard.cost.best_action import Situation, actions, best_of
from tests.cost.traffic import Server

SERVER = Server()
GOOD = Server(accepts=(0.85, 0.8, 0.75, 0.7))
BAD = Server(accepts=(0.6, 0.5, 0.4, 0.3))
TIMES = (0.0, 1e-310, 1e-12, 1e-9, 1.0, 1.0, 1e4, 1e9, 1e160, 1e308)  # all of them legal


NOTHING = "do nothing: as fast as now"


def advice(cost: Cost) -> str:
    return best_of(actions(Situation(cost=cost))).sentence


def assessed(
    server: Server, *, seed: int, ks: dict[int, int], before: list[TimedRequest] | None = None
) -> Cost:
    """The cost with so many requests of each K; those without speculation come from elsewhere."""
    rng = np.random.default_rng(seed)
    now = [item for k, count in ks.items() if k > 0 for item in server.serve(rng, count, k, start=1e6)]
    found = assess(before or [], now, server.serve(rng, ks.get(0, 0), 0, start=1e6))
    assert found is not None
    return found


@pytest.mark.parametrize("first_from_steps", [False, True])
def test_the_time_of_a_step_is_recovered(first_from_steps: bool) -> None:
    server = Server(a=0.020, b=0.002, speculating=0.005, first_from_steps=first_from_steps)
    time = assessed(server, seed=1, ks={0: 200, 2: 200, 5: 200}).step_time
    assert time is not None
    assert time.seconds == pytest.approx(0.020, abs=3 * time.seconds_error)
    assert time.seconds_per_draft_token == pytest.approx(0.002, abs=3 * time.seconds_per_draft_token_error)
    assert time.seconds_of_speculating == pytest.approx(0.005, abs=0.001)
    assert (time.seconds_error, time.seconds_per_draft_token_error) < (0.0005, 0.0003)
    assert [(item.num_speculative_tokens, item.requests) for item in time.seen] == [
        (0, 200),
        (2, 200),
        (5, 200),
    ]


def test_the_best_k_is_the_one_that_gives_most_tokens_per_second() -> None:
    server = Server(a=0.020, b=0.004, accepts=(0.75, 0.6, 0.4, 0.3))
    cost = assessed(server, seed=2, ks={0: 300, 2: 300, 4: 900})
    truth = [server.tokens_per_second(k) for k in range(7)]
    assert cost.num_speculative_tokens == 4
    assert (cost.best, cost.sure) == (int(np.argmax(truth)), True)
    for choice in cost.choices:
        k = choice.num_speculative_tokens
        assert choice.tokens_per_second == pytest.approx(truth[k], rel=0.05)
        assert choice.gain.low <= truth[k] / truth[4] - 1.0 <= choice.gain.high
    assert advice(cost).startswith("set K to 2: 16% faster (")


def test_below_break_even_speculation_off_is_best_and_said_to_be() -> None:
    server = Server(a=0.020, b=0.004, accepts=(0.12,))
    cost = assessed(server, seed=3, ks={0: 100, 4: 300})
    assert (cost.best, cost.sure) == (0, True)
    even = cost.break_even_acceptance
    assert even is not None
    assert even.low <= (server.step_seconds(4) / server.step_seconds(0) - 1.0) / 4 <= even.high
    assert cost.acceptance_rate is not None
    assert cost.acceptance_rate < even.low
    assert advice(cost).startswith("switch speculation off: ")


def test_where_no_k_surely_beats_none_the_best_is_none_and_nobody_is_told() -> None:
    even = Server(a=0.020, b=0.010, accepts=(0.5,), noise=0.3)  # K = 1: 1.5 tokens in 30 ms
    cost = assessed(even, seed=4, ks={0: 30, 1: 60})
    assert (cost.best, cost.sure, advice(cost)) == (0, False, NOTHING)


def test_nothing_is_advised_where_the_k_in_use_is_the_best() -> None:
    cost = assessed(Server(accepts=(0.6,)), seed=5, ks={0: 100, 3: 300, 5: 100})
    assert (cost.best, cost.sure, advice(cost)) == (3, False, NOTHING)


def test_a_best_k_above_all_that_were_timed_is_called_a_trend() -> None:
    cost = assessed(Server(b=0.0005, accepts=(0.95,)), seed=6, ks={0: 100, 1: 100, 2: 400})
    assert cost.best == 4
    assert not next(item for item in cost.choices if item.num_speculative_tokens == 4).measured
    assert advice(cost).startswith("set K to 4: ")
    assert advice(cost).endswith(", predicted)")


def test_one_k_tells_the_loss_and_says_what_would_tell_more() -> None:
    before = GOOD.serve(np.random.default_rng(7), 400, 4)
    cost = assessed(BAD, seed=8, ks={4: 100}, before=before)
    assert cost.lost is not None
    assert cost.lost.low <= 1 - BAD.tokens_per_second(4) / GOOD.tokens_per_second(4) <= cost.lost.high
    assert (cost.step_time, cost.choices, cost.best, cost.sure) == (None, (), None, False)
    assert cost.break_even_acceptance is None
    assert any("only K = 4 was timed" in note and "without speculation" in note for note in cost.notes)


def test_without_requests_without_speculation_off_is_never_the_answer() -> None:
    cost = assessed(Server(accepts=(0.1,)), seed=9, ks={2: 200, 5: 200})
    assert [item.num_speculative_tokens for item in cost.choices] == [1, 2, 3, 4, 5, 6, 7]
    assert (cost.best, cost.break_even_acceptance) == (1, None)
    assert any("whether speculation pays is not known" in note for note in cost.notes)


def test_one_k_beside_none_is_sure_of_off_only() -> None:
    """Whether speculating has a cost of its own cannot be told, and here it has one."""
    server = Server(a=0.020, b=0.0, speculating=0.020, accepts=(0.7, 0.2))
    cost = assessed(server, seed=10, ks={0: 200, 4: 400})
    assert cost.best == 1  # as the straight line has it
    assert server.tokens_per_second(1) < server.tokens_per_second(4)
    assert not cost.sure
    assert any("straight line" in note for note in cost.notes)


def test_the_k_in_use_is_that_of_the_newest_requests() -> None:
    rng = np.random.default_rng(22)
    cost = assess([], SERVER.serve(rng, 1800, 4) + SERVER.serve(rng, 200, 6, start=1800.0), [])
    assert cost is not None
    assert cost.num_speculative_tokens == 6


def test_step_times_of_another_day_are_not_compared() -> None:
    """A week before the change, with another K, the machine was twice as fast."""
    rng = np.random.default_rng(23)
    faster = Server(a=0.010, b=0.001)
    before = faster.serve(rng, 200, 2)
    now = SERVER.serve(rng, 200, 4, start=7 * 86_400.0)
    cost = assess(before, now, SERVER.serve(rng, 50, 0, start=7 * 86_400.0))
    assert cost is not None
    assert cost.step_time is not None
    assert [item.num_speculative_tokens for item in cost.step_time.seen] == [0, 4]


def test_without_positions_all_are_taken_to_be_accepted_alike() -> None:
    rng = np.random.default_rng(11)
    now = SERVER.serve(rng, 400, 4, accepted_per_position=None)
    cost = assess([], now, SERVER.serve(rng, 100, 0))
    assert cost is not None
    for choice in cost.choices:
        assert choice.tokens_per_step == pytest.approx(
            SERVER.tokens_per_step(choice.num_speculative_tokens), rel=0.03
        )
    assert any("accepted_per_position" in note for note in cost.notes)


def test_beyond_the_measured_positions_the_last_goes_on() -> None:
    cost = assessed(GOOD, seed=12, ks={0: 100, 4: 400})
    assert [item.measured for item in cost.choices] == [True, False, False, False, True, False, False]
    assert cost.choices[6].tokens_per_step == pytest.approx(GOOD.tokens_per_step(6), rel=0.03)


def test_a_moved_mix_or_a_fuller_server_is_no_loss() -> None:
    rng = np.random.default_rng(13)
    slow = replace(SERVER, a=0.060)
    before = SERVER.serve(rng, 300, 4) + slow.serve(rng, 40, 4, concurrency=8)
    before += BAD.serve(rng, 40, 4, segment="german")
    now = SERVER.serve(rng, 30, 4) + slow.serve(rng, 200, 4, concurrency=7)
    now += BAD.serve(rng, 100, 4, segment="german")
    cost = assess(before, now, [])
    assert cost is not None
    assert cost.lost is not None
    assert cost.lost.low < 0.0 < cost.lost.high
    assert cost.lost.high - cost.lost.low < 0.15


def test_only_the_changed_segments_tell_the_loss() -> None:
    rng = np.random.default_rng(14)
    before = GOOD.serve(rng, 200, 4) + GOOD.serve(rng, 200, 4, segment="german")
    now = GOOD.serve(rng, 60, 4) + BAD.serve(rng, 60, 4, segment="german")
    cost = assess(before, now, [], changed=["german"])
    assert cost is not None
    assert cost.now.requests == 60
    assert cost.lost is not None
    assert cost.lost.low <= 1 - BAD.tokens_per_second(4) / GOOD.tokens_per_second(4) <= cost.lost.high


def test_step_times_are_compared_at_one_band_of_concurrency() -> None:
    """Requests without speculation at night and speculation by day: nothing is told of the best K."""
    rng = np.random.default_rng(15)
    cost = assess([], SERVER.serve(rng, 200, 4, concurrency=16), SERVER.serve(rng, 200, 0, concurrency=1))
    assert cost is not None
    assert (cost.step_time, cost.best) == (None, None)
    assert "seconds per step are those at a concurrency of 9 to 16" in cost.notes


def test_a_step_that_gets_faster_with_more_drafts_is_not_believed() -> None:
    rng = np.random.default_rng(16)
    slower = replace(SERVER, a=0.080)  # the requests without speculation ran while the machine was busy
    cost = assess([], SERVER.serve(rng, 200, 4), slower.serve(rng, 50, 0))
    assert cost is not None
    assert (cost.best, cost.choices) == (None, ())
    assert any("same hours" in note for note in cost.notes)


def test_requests_that_drafted_nothing_are_without_speculation_whatever_k_says() -> None:
    rng = np.random.default_rng(17)
    stopped = SERVER.serve(rng, 50, 0, num_speculative_tokens=4)
    cost = assess([], SERVER.serve(rng, 200, 4) + stopped, [])
    assert cost is not None
    assert cost.step_time is not None
    assert [item.num_speculative_tokens for item in cost.step_time.seen] == [0, 4]


def test_k_is_the_drafted_tokens_per_step_where_no_record_gives_it() -> None:
    rng = np.random.default_rng(18)
    cost = assess([], SERVER.serve(rng, 50, 3, num_speculative_tokens=None), [])
    assert cost is not None
    assert cost.num_speculative_tokens == 3


def test_a_stream_without_speculation_has_a_speed_and_no_best_k() -> None:
    cost = assess([], SERVER.serve(np.random.default_rng(19), 50, 0, steps=0, emitted=0), [])
    assert cost is not None
    assert cost.now.tokens_per_step == 1.0
    assert (cost.num_speculative_tokens, cost.best) == (None, None)


@pytest.mark.parametrize(
    "useless", ["few", "untimed", "zero", "single tokens", "absurdly fast", "absurdly slow"]
)
def test_too_little_tells_nothing(useless: str) -> None:
    rng = np.random.default_rng(20)
    now = {
        "few": SERVER.serve(rng, 9, 4),
        "untimed": SERVER.serve(rng, 50, 4, time_per_output_token_seconds=None),
        "zero": SERVER.serve(rng, 50, 4, time_per_output_token_seconds=0.0),
        "single tokens": SERVER.serve(rng, 50, 4, output_tokens=1),
        "absurdly fast": SERVER.serve(rng, 50, 4, time_per_output_token_seconds=1e-310),
        "absurdly slow": SERVER.serve(rng, 50, 4, time_per_output_token_seconds=1e160),
    }[useless]
    assert assess(SERVER.serve(rng, 50, 4), now, SERVER.serve(rng, 50, 0)) is None


@pytest.mark.parametrize(
    "constant", ["everywhere", "another one since the change", "one for each K and segment"]
)
def test_a_time_that_never_varies_shows_no_loss_and_no_best_k(constant: str) -> None:
    """A source that fills in a configured time: measured, a fall would cost nothing, or whatever was set."""
    rng = np.random.default_rng(22)
    before, now, without = GOOD.serve(rng, 200, 4), BAD.serve(rng, 50, 4), GOOD.serve(rng, 50, 0)
    sides = []
    for number, side in enumerate((before, now, without)):
        seconds = 0.02 + 0.005 * number * (constant != "everywhere")
        each = [item._replace(time_per_output_token_seconds=seconds) for item in side]
        if constant.startswith("one for each"):
            each += [item._replace(segment="rare", time_per_output_token_seconds=0.03) for item in each[:8]]
        sides.append(each)
    cost = assess(*sides, changed=("chat",))
    assert cost is not None
    assert (cost.lost, cost.before, cost.best, cost.break_even_acceptance) == (None, None, None, None)
    assert UNMEASURED in cost.notes
    assert cost.now.requests == 50
    assert cost.num_speculative_tokens == 4


def test_a_segment_whose_time_never_varies_says_nothing_beside_those_that_are_measured() -> None:
    rng = np.random.default_rng(23)
    filled_in = {"segment": "filled in", "time_per_output_token_seconds": 0.02}
    before, now = GOOD.serve(rng, 200, 4), BAD.serve(rng, 100, 4)
    alone = assess(before, now, [])
    beside = assess(
        [*before, *GOOD.serve(rng, 200, 4, **filled_in)], [*now, *BAD.serve(rng, 100, 4, **filled_in)], []
    )
    assert alone is not None
    assert beside is not None
    assert alone.lost is not None
    assert beside.lost == alone.lost
    assert PARTLY_MEASURED in beside.notes
    for note in (UNMEASURED, PARTLY_MEASURED):
        assert note not in alone.notes
    assert UNMEASURED not in beside.notes


@pytest.mark.parametrize("untimed", [40, 0])
def test_one_request_with_a_time_does_not_show_that_times_never_vary(untimed: int) -> None:
    """As of a vLLM, whose answers of one token have no time per token, and no draft; nor had a longer one."""
    rng = np.random.default_rng(24)
    short = SERVER.serve(rng, untimed, 0, output_tokens=1, time_per_output_token_seconds=None)
    cost = assess([], [*SERVER.serve(rng, 50, 4), *short, *SERVER.serve(rng, 1, 0)], [])
    assert cost is not None
    assert UNMEASURED not in cost.notes
    assert cost.now.requests == 51


def test_whatever_the_records_say_the_numbers_are_numbers() -> None:
    for seed in range(150):
        rng = np.random.default_rng(seed)
        parts = [[_any_request(rng) for _ in range(rng.integers(0, 60))] for _ in range(3)]
        cost = assess(*parts)
        for number in _numbers(cost):
            assert math.isfinite(number), f"seed {seed}: {cost}"
        for interval in _intervals(cost):
            assert interval.low <= interval.value <= interval.high, f"seed {seed}: {interval}"
        assert msgspec.convert(msgspec.to_builtins(cost), Cost | None) == cost


def test_the_intervals_hold_as_often_as_they_say() -> None:
    """At 95%: fewer than 88 of 100 happens with probability .002."""
    rng = np.random.default_rng(21)
    good, bad = (replace(server, noise=0.3, tokens=50) for server in (GOOD, BAD))
    truth = {
        "lost": 1.0 - bad.tokens_per_second(4) / good.tokens_per_second(4),
        "gain": bad.tokens_per_second(1) / bad.tokens_per_second(4) - 1.0,
        "off": bad.tokens_per_second(0) / bad.tokens_per_second(4) - 1.0,
    }
    hits = dict.fromkeys(truth, 0)
    for _ in range(100):
        now = bad.serve(rng, 40, 4)
        cost = assess(good.serve(rng, 80, 4), now, bad.serve(rng, 20, 0))
        assert cost is not None
        assert cost.lost is not None
        told = {"lost": cost.lost, "off": cost.choices[0].gain, "gain": cost.choices[1].gain}
        for name, interval in told.items():
            hits[name] += interval.low <= truth[name] <= interval.high
    assert min(hits.values()) >= 88, hits


def _any_request(rng: np.random.Generator) -> TimedRequest:
    """Legal by the schema, and odd in every way it allows."""
    steps = int(rng.integers(0, 5))
    k = int(rng.integers(0, 4))
    per_position = [int(count) for count in rng.integers(0, steps + 1, k)]
    accepted = sum(per_position)
    return TimedRequest(
        ended_at=float(rng.integers(0, 3)),
        segment=str(rng.integers(0, 2)),
        num_speculative_tokens=[None, k, 0, 5][rng.integers(0, 4)],
        concurrency=[None, 0, 1, 4][rng.integers(0, 4)],
        steps=steps,
        drafted=steps * k,
        accepted=accepted,
        emitted=int(rng.integers(0, accepted + steps + 1)),
        accepted_per_position=[None, per_position, [], per_position[:1]][rng.integers(0, 4)],
        output_tokens=[None, 0, 1, int(rng.integers(1, 40))][rng.integers(0, 4)],
        time_per_output_token_seconds=float(rng.choice(TIMES)) if rng.random() < 0.8 else None,
    )


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _numbers(getattr(value, field.name))


def _intervals(value: object) -> Iterator[Interval]:
    if isinstance(value, Interval):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _intervals(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _intervals(getattr(value, field.name))


# The same draft at the same acceptance, as in vllm#26504: a busy server computes every draft token.
QUIET = Server(a=0.020, b=0.0045, accepts=(0.86,))
BUSY = Server(a=0.020, b=0.0185, accepts=(0.86,))
SIXTEEN = {"concurrency": 16}


def at_two_loads(seed: int, *, busy_now: bool, without: int = 60) -> Cost:
    """A thousand requests on a quiet server and then 150 on a busy one, or the other way around."""
    rng = np.random.default_rng(seed)
    quiet_at, busy_at = (0.0, 2000.0) if busy_now else (2000.0, 0.0)
    quiet, busy = (1000, 150) if busy_now else (150, 1000)
    now = QUIET.serve(rng, quiet, 3, start=quiet_at) + BUSY.serve(rng, busy, 3, start=busy_at, **SIXTEEN)
    none = QUIET.serve(rng, 60, 0, start=quiet_at) + BUSY.serve(rng, without, 0, start=busy_at, **SIXTEEN)
    found = assess([], now, none)
    assert found is not None
    return found


def test_the_speedup_is_that_of_the_load_there_is_now() -> None:
    """Acceptance is .86 at both; what is right flips with the load."""
    for busy_now, server, load in ((True, BUSY, (9, 16)), (False, QUIET, (1, 1))):
        cost = at_two_loads(31, busy_now=busy_now)
        truth = server.tokens_per_second(3) / server.tokens_per_second(0)
        now = cost.speedup
        assert now is not None
        assert now.concurrency == load
        assert now.factor is not None
        assert now.factor.low <= truth <= now.factor.high
        assert (now.factor.high < 1.0) is busy_now
        assert (now.factor.low > 1.0) is not busy_now
        assert cost.acceptance_rate == pytest.approx(QUIET.tokens_per_step(3) / 3 - 1 / 3, abs=0.01)
        assert (cost.best == 0) is busy_now
        assert f"seconds per step are those at a concurrency of {'9 to 16' if busy_now else 1}" in cost.notes


def test_each_load_has_a_speedup_of_its_own() -> None:
    cost = at_two_loads(32, busy_now=True)
    assert [(load.concurrency, load.now) for load in cost.loads] == [((1, 1), False), ((9, 16), True)]
    for load, server in zip(cost.loads, (QUIET, BUSY), strict=True):
        assert load.factor is not None
        truth = server.tokens_per_second(3) / server.tokens_per_second(0)
        assert load.factor.value == pytest.approx(truth, rel=0.06)
        assert load.tokens_per_second == pytest.approx(server.tokens_per_second(3), rel=0.05)
        assert load.tokens_per_second_without == pytest.approx(server.tokens_per_second(0), rel=0.05)


def test_a_load_without_requests_without_speculation_has_no_speedup_and_says_what_is_missing() -> None:
    """What is known of the quiet server says nothing of the busy one."""
    cost = at_two_loads(33, busy_now=True, without=9)
    assert cost.speedup is not None
    assert cost.speedup.factor is None
    assert cost.speedup.missing is not None
    assert (
        "only 9 requests without speculation were timed at a concurrency of 9 to 16" in cost.speedup.missing
    )
    assert cost.loads[0].factor is not None


def test_a_speedup_where_the_load_is_not_told_says_so() -> None:
    rng = np.random.default_rng(34)
    untold = {"concurrency": None}
    cost = assess([], SERVER.serve(rng, 200, 4, **untold), SERVER.serve(rng, 50, 0, **untold))
    assert cost is not None
    assert cost.speedup is not None
    assert cost.speedup.concurrency is None
    assert cost.speedup.factor is not None


def test_no_speedup_is_told_from_times_that_were_not_measured_or_contradict_themselves() -> None:
    rng = np.random.default_rng(35)
    constant = {"time_per_output_token_seconds": 0.02}
    cost = assess([], SERVER.serve(rng, 200, 4, **constant), SERVER.serve(rng, 50, 0, **constant))
    assert cost is not None
    assert cost.speedup is None or cost.speedup.factor is None
    slower = replace(SERVER, a=0.080)
    cost = assess([], SERVER.serve(rng, 200, 4), slower.serve(rng, 50, 0))
    assert cost is not None
    assert cost.speedup is not None
    assert cost.speedup.factor is None
    assert cost.speedup.missing is not None


def test_the_interval_of_the_speedup_holds_as_often_as_it_says() -> None:
    """At 95%: fewer than 88 of 100 happens with probability .002."""
    rng = np.random.default_rng(36)
    noisy = replace(BUSY, noise=0.3, tokens=50)
    truth = noisy.tokens_per_second(3) / noisy.tokens_per_second(0)
    hits = 0
    for _ in range(100):
        cost = assess([], noisy.serve(rng, 60, 3, **SIXTEEN), noisy.serve(rng, 20, 0, **SIXTEEN))
        assert cost is not None
        assert cost.speedup is not None
        assert cost.speedup.factor is not None
        hits += cost.speedup.factor.low <= truth <= cost.speedup.factor.high
    assert hits >= 88, hits


def test_the_speedup_and_the_gain_of_speculation_off_are_one_number() -> None:
    """The verdict, the alert and the best action can then never contradict each other."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        server = replace(QUIET, b=0.020 * float(rng.uniform(0.1, 1.2)))
        cost = assessed(server, seed=seed, ks={0: 60, 2: 60 * (seed % 2), 4: 200})
        assert cost.speedup is not None
        factor, off = cost.speedup.factor, cost.choices[0].gain
        assert factor is not None
        inverse = (1.0 / factor.value, 1.0 / factor.high, 1.0 / factor.low)
        assert (1.0 + off.value, 1.0 + off.low, 1.0 + off.high) == pytest.approx(inverse), f"seed {seed}"
        assert (payoff(cost).state == "loses") is (off.low > 0.0), f"seed {seed}"


def test_what_is_missing_is_said_of_a_scraped_server_too_whose_user_sends_nothing() -> None:
    assert (
        payoff(None).missing
        == "fewer than ten of the newest requests or windows have time_per_output_token_seconds"
    )
