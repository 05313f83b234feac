"""Steps between their plan and what they gave: how long each took. Plain Python, no tensors."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from driftguard_engine.adaptive_k.plan import Decision, DraftingRow, DraftPlan, FixedK, Given, Reason
from driftguard_engine.adaptive_k.policy import AdaptiveK


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: DraftPlan
    alone: bool
    at_seconds: float


class DraftLengthController:
    """Asks a policy for each step's drafts and tells it what they gave, at once or one step later.

    Where a step is launched while the one before it runs, it took from that one's end to its own.
    """

    def __init__(
        self, policy: AdaptiveK | FixedK, clock_seconds: Callable[[], float] = time.perf_counter
    ) -> None:
        self._policy = policy
        self._clock_seconds = clock_seconds
        self._launched: deque[_Launched] = deque()
        self._ended_at_seconds = 0.0  # of the newest step that is known

    @property
    def decision(self) -> Decision:
        """The newest one. Any thread may ask."""
        return self._policy.decision

    @property
    def reasons(self) -> Counter[Reason]:
        """Verifications, counted per request, by why they drafted so many. Any thread may ask."""
        return self._policy.reasons

    def begin(self, rows: Sequence[DraftingRow], *, alone: bool) -> DraftPlan:
        """alone: the step does nothing but decode. Without rows nothing is planned."""
        if not rows:
            return DraftPlan((), (), 0, "not_asked")
        at_seconds = self._clock_seconds()
        plan = self._policy.plan(rows)
        self._launched.append(_Launched(plan, alone, at_seconds))
        return plan

    def end(self, given: Mapping[str, Given], *, in_flight: bool) -> None:
        """given: of each request whose outcome has become known. in_flight: the newest step's has not."""
        now = self._clock_seconds()
        while len(self._launched) > in_flight:
            step = self._launched.popleft()
            seconds = now - max(step.at_seconds, self._ended_at_seconds)
            if given:  # else all requests have left, and nobody waited for the step's end
                self._policy.learned(step.plan, seconds if step.alone else None, given)
        self._ended_at_seconds = now

    def reset(self) -> None:
        """After a failure: what was launched is never known."""
        self._launched.clear()
