"""Which time is taken for whose: steps told at once, and steps told when the next one runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from driftguard_engine.adaptive_k.controller import DraftLengthController
from driftguard_engine.adaptive_k.plan import DraftingRow, DraftPlan, FixedK, Given


class Recorded(FixedK):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, float | None]] = []

    def learned(self, plan: DraftPlan, seconds: float | None, given: Mapping[str, Given]) -> None:
        self.told.append((plan.rows[0].request_id, seconds))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def rows(name: str) -> Sequence[DraftingRow]:
    return [DraftingRow(name, "v1", 4)]


GIVEN = {"a": Given(4, 1)}


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_step_told_at_once_took_from_its_plan_to_its_end(clock: Clock) -> None:
    policy = Recorded()
    steps = DraftLengthController(policy, clock)
    for name, idle, alone in (("first", 5.0, True), ("second", 100.0, True), ("with a prompt", 0.0, False)):
        clock.now += idle
        assert steps.begin(rows(name), alone=alone).counts == (4,)
        clock.now += 2.0
        steps.end(GIVEN, in_flight=False)
    assert policy.told == [("first", 2.0), ("second", 2.0), ("with a prompt", None)]


def test_a_step_that_was_kept_from_its_end_tells_no_time(clock: Clock) -> None:
    """Each step takes 2 s, and something else 10 s before the second ends."""
    policy = Recorded()
    steps = DraftLengthController(policy, clock)
    for name, kept in (("first", 0.0), ("second", 10.0), ("third", 0.0)):
        steps.begin(rows(name), alone=True)
        clock.now += 2.0 + kept
        if kept:
            steps.interrupted()
        steps.end(GIVEN, in_flight=False)
    assert policy.told == [("first", 2.0), ("second", None), ("third", 2.0)]


def test_a_step_told_one_later_took_from_the_end_of_the_one_before(clock: Clock) -> None:
    """Launched at 10, 12, 22 and 32; known at 21 (it took 11), 31 and 45."""
    policy = Recorded()
    steps = DraftLengthController(policy, clock)
    clock.now = 10.0
    steps.begin(rows("first"), alone=True)
    steps.end({}, in_flight=True)
    for name, launched, known in (("second", 12.0, 21.0), ("third", 22.0, 31.0)):
        clock.now = launched
        steps.begin(rows(name), alone=True)
        clock.now = known
        steps.end(GIVEN, in_flight=True)
    clock.now = 45.0
    assert steps.begin([], alone=True).counts == ()
    steps.end(GIVEN, in_flight=False)
    assert policy.told == [("first", 11.0), ("second", 10.0), ("third", 14.0)]


def test_a_step_that_nobody_waited_for_tells_no_time(clock: Clock) -> None:
    policy = Recorded()
    steps = DraftLengthController(policy, clock)
    steps.begin(rows("left"), alone=True)
    steps.end({}, in_flight=True)
    clock.now = 3600.0
    steps.begin(rows("next"), alone=True)
    steps.end({}, in_flight=True)
    clock.now += 1.0
    steps.begin([], alone=True)
    steps.end(GIVEN, in_flight=False)
    assert policy.told == [("next", 1.0)]


def test_after_a_failure_the_lost_steps_are_nobody_s(clock: Clock) -> None:
    policy = Recorded()
    steps = DraftLengthController(policy, clock)
    steps.begin(rows("lost"), alone=True)
    steps.reset()
    steps.begin(rows("next"), alone=True)
    clock.now += 3.0
    steps.end(GIVEN, in_flight=False)
    assert policy.told == [("next", 3.0)]
