"""The one best action, against a simulation in which every action is really taken and its speed is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from driftguard.cost import Cost, Interval, assess
from driftguard.cost.best_action import (
    IN_ORDER,
    LEAST_GAIN,
    Action,
    ActionKind,
    Situation,
    actions,
    best_of,
    rollback_gain,
)
from driftguard.records.documents.diagnosis import Confidence
from driftguard.records.documents.retraining_run import OldLevel
from driftguard.retraining.promotion import watch
from tests.cost.traffic import Server

SEEDS = range(100)
GOOD = Server(a=0.020, b=0.003, accepts=(0.88,))
FALLEN = replace(GOOD, accepts=(0.35,))


@dataclass(frozen=True)
class World:
    """A server after a fall, what a repair would lead to, and what DriftGuard is told of both."""

    outcomes: dict[ActionKind, float]  # tokens per second, really
    found: tuple[Action, ...]

    @property
    def best(self) -> Action:
        return best_of(self.found)


def world(seed: int) -> World:
    """Drawn: the speed of a step, K, acceptance before and after, the cause, how far a repair leads."""
    rng = np.random.default_rng(seed)
    a, k = float(rng.uniform(0.010, 0.030)), int(rng.integers(2, 7))
    before = Server(
        a=a,
        b=a * float(rng.choice([0.05, 0.15, 0.4])),
        speculating=a * float(rng.choice([0.0, 0.1])),
        accepts=tuple(float(part) for part in rng.uniform(0.7, 0.92, 3)),
    )
    fall = float(rng.choice([0.3, 0.5, 0.8, 0.95]))
    now = replace(before, accepts=tuple(part * fall for part in before.accepts))
    cause = str(rng.choice(["query_drift", "machine", "unknown"]))
    way_back = float(rng.uniform(0.3, 0.9)) if cause == "query_drift" else 0.0
    other = 1 if rng.random() < 0.5 else k - 1
    counts = ((k, 600), (other, 200))
    speculating = [item for each, count in counts for item in now.serve(rng, count, each, start=2000.0)]
    newest = now.serve(rng, 100, k, start=3000.0)
    cost = assess(before.serve(rng, 400, k), speculating + newest, now.serve(rng, 200, 0, start=2500.0))
    assert cost is not None
    lost = cost.lost if cost.lost is not None and cost.lost.low > 0.0 else None
    found = actions(
        Situation(
            cost=cost,
            lost=lost,
            cause=cause,
            confidence="low" if cause == "unknown" else "medium",
            retrain=cause == "query_drift",
        )
    )
    speeds = [now.tokens_per_second(each) for each in range(k + 3)]
    # Both drafts decode at the K in use; a new draft leads a part of the way back, a restart all of it.
    back = speeds[k] + way_back * (before.tokens_per_second(k) - speeds[k])
    outcomes: dict[ActionKind, float] = {
        "speculation_off": speeds[0],
        "roll_back": 0.0,
        "retrain": back,
        "restart": before.tokens_per_second(k) if cause == "machine" else speeds[k],
        "nothing": speeds[k],
    }
    chosen = next(action for action in found if action.kind == "another_k")
    assert chosen.num_speculative_tokens is not None
    outcomes["another_k"] = speeds[chosen.num_speculative_tokens]
    return World(outcomes, found)


def is_measured(one: World, kind: ActionKind) -> bool:
    return next(action for action in one.found if action.kind == kind).basis == "measured"


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    return [world(seed) for seed in SEEDS]


@pytest.mark.slow
def test_the_best_is_the_best_of_all_that_can_be_done_in_simulation(worlds: list[World]) -> None:
    """By what each action really gives. Where speculation loses, a draft that has yet to be trained is no
    choice: what holds at once is. A gain below LEAST_GAIN is not worth an action, and its loss is allowed.
    A K that was never timed is no measured choice; where it is the best all the same, it counts."""
    missed = []
    for seed, one in zip(SEEDS, worlds, strict=True):
        choices = dict(one.outcomes)
        if choices["speculation_off"] > choices["nothing"] * (1.0 + LEAST_GAIN):
            del choices["retrain"]
        if one.best.kind != "another_k" and not is_measured(one, "another_k"):
            del choices["another_k"]
        regret = 1.0 - choices.get(one.best.kind, 0.0) / max(choices.values())
        if regret > LEAST_GAIN:
            missed.append((seed, one.best.kind, max(choices, key=choices.__getitem__), round(regret, 3)))
    kinds = Counter(one.best.kind for one in worlds)
    assert len(missed) <= 0.05 * len(worlds), f"{missed}; recommended: {kinds}"
    # The simulation has all sides: every action but a rollback is right somewhere.
    assert min(kinds[kind] for kind in IN_ORDER if kind != "roll_back") >= 3, kinds


def test_a_new_draft_is_never_best_where_speculation_off_is_faster(worlds: list[World]) -> None:
    faster = [one for one in worlds if one.outcomes["speculation_off"] > one.outcomes["nothing"] * 1.02]
    assert len(faster) >= 10
    assert [one.best.kind for one in faster if one.best.kind == "retrain"] == []


def test_each_gain_that_is_called_measured_holds_what_the_action_gives(worlds: list[World]) -> None:
    """Intervals of 95%: of so many, fewer than nine in ten has a probability below .001."""
    inside = []
    for one in worlds:
        for action in one.found:
            if action.kind in ("speculation_off", "another_k") and action.basis == "measured":
                assert action.gain is not None
                gain = one.outcomes[action.kind] / one.outcomes["nothing"] - 1.0
                inside.append(action.gain.low <= gain <= action.gain.high)
    assert len(inside) >= 100
    assert np.mean(inside) >= 0.9


def cost_of(server: Server, seed: int = 1, *, ks: dict[int, int] | None = None) -> Cost:
    rng = np.random.default_rng(seed)
    counts = ks or {0: 100, 4: 300}
    without = server.serve(rng, counts.get(0, 0), 0, start=1000.0)
    now = [item for k, count in counts.items() if k for item in server.serve(rng, count, k, start=1000.0)]
    found = assess(GOOD.serve(rng, 300, 4), now, without)
    assert found is not None
    return found


def kinds(situation: Situation) -> dict[ActionKind, Action]:
    found = actions(situation)
    assert tuple(action.kind for action in found) == IN_ORDER
    assert sum(action.best for action in found) == 1
    return {action.kind: action for action in found}


DRIFT = Situation(cause="query_drift", confidence="high", retrain=True, lost=Interval(0.4, 0.35, 0.45))


def test_off_comes_before_a_new_draft_even_of_a_certain_cause() -> None:
    """Half of the way back would be 33% more tokens, off is 15%: but off holds at once."""
    cost = cost_of(replace(FALLEN, accepts=(0.27,), b=0.0045))
    found = kinds(replace(DRIFT, cost=cost))
    assert found["speculation_off"].best
    assert found["speculation_off"].gain is not None
    assert found["speculation_off"].gain.low > 0.0
    assert found["retrain"].gain is not None
    assert "faster (" in found["speculation_off"].sentence
    assert found["speculation_off"].reason.endswith("at 1 request at once")


def test_a_new_draft_is_best_where_speculation_still_pays_and_the_cause_calls_for_it() -> None:
    found = kinds(replace(DRIFT, cost=cost_of(replace(FALLEN, accepts=(0.6,)))))
    assert found["retrain"].best
    gain = found["retrain"].gain
    assert gain is not None
    assert (gain.value, gain.low, gain.high) == pytest.approx((0.5 * (1 / 0.6 - 1), 0.0, 1 / 0.55 - 1))
    assert found["retrain"].sentence == "retrain the draft: about 33% faster expected, up to 82%"
    low = kinds(
        replace(DRIFT, cost=cost_of(replace(FALLEN, accepts=(0.6,))), confidence="low", retrain=False)
    )
    assert low["nothing"].best
    assert "confidence is low" in low["retrain"].reason


def test_what_was_measured_with_the_draft_before_is_not_best_once_a_new_one_serves() -> None:
    cost = cost_of(replace(FALLEN, accepts=(0.27,), b=0.0045))
    assert kinds(replace(DRIFT, cost=cost))["speculation_off"].best
    found = kinds(replace(DRIFT, cost=cost, watched="v2"))
    assert found["retrain"].best
    assert found["retrain"].text == "wait while the new draft v2 is being watched"
    for kind in ("speculation_off", "another_k", "roll_back"):
        assert found[kind].gain is None
        assert found[kind].reason.startswith("draft v2 serves now")


def test_a_restart_is_best_for_a_machine_that_decayed_but_not_at_low_confidence() -> None:
    machine = Situation(cause="machine", confidence="medium", lost=Interval(0.2, 0.15, 0.25))
    assert kinds(machine)["restart"].best
    assert kinds(replace(machine, confidence="low"))["nothing"].best


def test_what_is_not_known_says_what_is_missing_and_is_never_best() -> None:
    found = kinds(Situation())
    assert found["nothing"].best
    for kind in IN_ORDER[:-1]:
        assert found[kind].gain is None
        assert found[kind].reason
    one_k = kinds(Situation(cost=cost_of(FALLEN, ks={4: 300})))
    assert "no request without speculation was timed at a concurrency of 1" in one_k["speculation_off"].reason


def test_a_cause_whose_cost_is_not_known_still_has_its_action() -> None:
    assert kinds(replace(DRIFT, lost=None))["retrain"].best
    assert kinds(Situation(cause="machine", confidence="high"))["restart"].best


LOST = Interval(0.2, 0.15, 0.25)
UNSURE, WORSE, BETTER = Interval(0.1, -0.05, 0.2), Interval(-0.1, -0.2, -0.05), Interval(0.1, 0.05, 0.2)


@pytest.mark.parametrize(
    ("cause", "confidence", "to", "gain", "lost", "best"),
    [
        ("draft_wrong", "medium", "v1", None, LOST, "roll_back"),
        ("draft_wrong", "high", "v1", None, None, "roll_back"),
        ("draft_wrong", "medium", "v1", UNSURE, LOST, "roll_back"),
        ("draft_wrong", "medium", "v1", WORSE, LOST, "nothing"),  # measured: the old one was no better
        ("draft_wrong", "low", "v1", None, LOST, "nothing"),
        ("draft_wrong", "high", None, None, LOST, "nothing"),
        ("query_drift", "medium", "v1", None, LOST, "retrain"),
        ("query_drift", "medium", "v1", BETTER, None, "roll_back"),
        ("machine", "medium", "v1", None, LOST, "restart"),
        ("unknown", "low", "v1", UNSURE, LOST, "nothing"),
    ],
)
def test_a_wrong_draft_is_rolled_back_where_there_is_one_to_return_to_and_never_retrained(
    cause: str,
    confidence: Confidence,
    to: str | None,
    gain: Interval | None,
    lost: Interval | None,
    best: ActionKind,
) -> None:
    for retrain in {cause == "query_drift", cause in ("query_drift", "draft_wrong")}:
        found = kinds(
            Situation(
                cause=cause,
                confidence=confidence,
                rollback_to=to,
                rollback_gain=gain,
                lost=lost,
                retrain=retrain,
            )
        )
        assert [kind for kind, action in found.items() if action.best] == [best]


def watched(seed: int, old: float, new: float, requests: int = 200) -> Iterator[tuple[str, int, int]]:
    rng = np.random.default_rng(seed)
    del old
    yield from (("code", 100, int(rng.binomial(100, new))) for _ in range(requests))


@pytest.mark.parametrize(("new", "best"), [(0.45, "roll_back"), (0.62, "nothing")])
def test_a_rollback_is_best_where_the_old_draft_accepted_surely_more(new: float, best: str) -> None:
    level = OldLevel("code", changed=True, requests=300, mean=0.6, variance=0.01, standard_error=0.006)
    state = watch.start([level], 0.05, ())
    # The watch itself ends at its verdict; here it only counts.
    for one in watched(3, 0.6, new):
        state = watch.fold(state, [one])
    gain = rollback_gain(state, 4.0)
    assert gain is not None
    truth = (1 + 4 * 0.6) / (1 + 4 * new) - 1
    assert gain.low <= truth <= gain.high or state.verdict == "worse"
    found = kinds(Situation(rollback_to="v1", rollback_gain=gain))
    assert found[best].best  # type: ignore[index]
    assert found["roll_back"].text == "roll back to draft v1"


def test_a_rollback_of_too_few_requests_or_an_unknown_k_has_no_gain() -> None:
    level = OldLevel("code", changed=True, requests=300, mean=0.6, variance=0.01, standard_error=0.006)
    state = watch.fold(watch.start([level], 0.05, ()), list(watched(4, 0.6, 0.5, requests=29)))
    assert rollback_gain(state, 4.0) is None
    assert rollback_gain(watch.fold(watch.start([level], 0.05, ()), list(watched(4, 0.6, 0.6))), None) is None
    assert rollback_gain(None, 4.0) is None
