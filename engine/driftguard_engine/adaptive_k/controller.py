"""Measures how long each step takes, from its plan to its outcome. Plain Python, no tensors."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from driftguard_engine.adaptive_k.plan import Decision, DraftingRow, DraftPlan, FixedK, Given, Reason
from driftguard_engine.adaptive_k.policy import AdaptiveK


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: DraftPlan
    alone: bool
    at_seconds: float


class DraftLengthController:
    """Asks a policy for the plan of each step, and reports the outcome to it, at once or one step later.

    A step that is launched while the one before runs is timed from the end of that one.
    """

    def __init__(
        self, policy: AdaptiveK | FixedK, clock_seconds: Callable[[], float] = time.perf_counter
    ) -> None:
        self._policy = policy
        self._clock_seconds = clock_seconds
        self._launched: deque[_Launched] = deque()
        self._ended_at_seconds = 0.0  # of the newest step whose outcome is known

    @property
    def decision(self) -> Decision:
        """The newest one. Any thread may ask."""
        return self._policy.decision

    @property
    def reasons(self) -> Counter[Reason]:
        """Verifications, counted per request, by why they drafted so many. Any thread may ask."""
        return self._policy.reasons

    def begin(self, rows: Sequence[DraftingRow], *, alone: bool) -> DraftPlan:
        """The plan of the next step; empty without rows. alone: the step does nothing but decode."""
        if not rows:
            return DraftPlan((), (), 0, "not_asked")
        at_seconds = self._clock_seconds()
        plan = self._policy.plan(rows)
        self._launched.append(_Launched(plan, alone, at_seconds))
        return plan

    def end(self, given: Mapping[str, Given], *, in_flight: bool) -> None:
        """given: the outcomes now known, by request. in_flight: that of the newest step is not."""
        now = self._clock_seconds()
        while len(self._launched) > in_flight:
            step = self._launched.popleft()
            seconds = now - max(step.at_seconds, self._ended_at_seconds)
            if given:  # else all requests have left, and nobody waited for the step's end
                self._policy.learned(step.plan, seconds if step.alone else None, given)
        self._ended_at_seconds = now

    def interrupted(self) -> None:
        """Something else has delayed the steps in flight, so that their time tells nothing."""
        self._launched = deque(replace(step, alone=False) for step in self._launched)

    def reset(self) -> None:
        """After a failure: gives up the steps in flight, whose outcome will never be known."""
        self._launched.clear()
