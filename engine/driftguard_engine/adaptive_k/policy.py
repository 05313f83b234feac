"""How many tokens each request drafts in the next step: the K that emits most tokens per second. No tensors.

    rate(K) = sum over rows of (1 + s_i1 + ... + s_iK) / seconds(rows, K)

s comes from what was accepted (`acceptance.py`), seconds from the steps' own times (`step_cost.py`). K = 0 is
a choice like any other, so speculation is switched off where it does not pay: with a poor draft, or in a
batch so large that verification costs more than it gives. The longest draft of the batch decides how long a
step takes, so K is chosen for the step first; a request whose tokens are accepted too rarely drafts fewer.

Only the K in use is measured, so a bounded share of the time (`EXPLORING_SHARE`) goes to steps with another
K; while speculation is off, to a few steps with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from driftguard_engine.adaptive_k.acceptance import RunningAcceptance
from driftguard_engine.adaptive_k.plan import REASONS, Decision, DraftingRow, DraftPlan, Given, Reason
from driftguard_engine.adaptive_k.step_cost import StepCost, bucket_of

EXPLORING_SHARE: Final = 0.01  # of the time that may be lost by steps with another K than the best
_LEARNING_STEPS: Final = 6
_HELD_STEPS: Final = 8  # for which a choice stays while the batch stays
_BETTER: Final = 1.02  # ratio of rates from which another K is chosen
_PAYS_AGAIN: Final = 1.05  # speedup from which speculation is switched on again
_STALE_STEPS: Final = 64
_CLOSE: Final = 0.9  # a K with this share of the rate in use is tried more often
_PROBING_STEPS: Final = 4
_LONGEST: Final = 4.0  # times the expected seconds; what a step took beyond that had another reason
_REMEMBERED_STEPS_OFF: Final = 32.0  # that acceptance before a probe weighs at most
_OWN_PART: Final = 0.5  # share of a draft token's time that is charged to its row; the rest to the step


@dataclass(slots=True)
class _Trial:
    """Steps with a K that is not the one in use."""

    k: int
    steps: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class _Forecast:
    """For K = 0, 1, ... in the present batch. tokens: per step, of all rows together."""

    seconds: list[float]
    tokens: list[float]

    def rate(self, k: int) -> float:
        return self.tokens[k] / self.seconds[k]

    @property
    def best(self) -> int:
        """Of the K > 0."""
        return max(range(1, len(self.tokens)), key=self.rate)

    @property
    def speedup(self) -> float:
        return self.rate(self.best) / self.rate(0)

    def time_of_row_token(self, k: int) -> float:
        """Seconds that one more draft token of one row adds, where all rows have K of them."""
        return max(0.0, self.seconds[k] - self.seconds[0]) / (k * self.tokens[0])


class AdaptiveK:
    """See the module. One thread calls `plan` and `learned`; any may read `decision` and `reasons`."""

    def __init__(self, largest_k: int) -> None:
        self._largest_k = largest_k
        self.decision = Decision(adaptive=True)
        self.reasons: Counter[Reason] = Counter(dict.fromkeys(REASONS, 0))
        self._begin(draft=None)

    def _begin(self, draft: str | None) -> None:
        """Forgets all that was measured: another draft has another cost and another acceptance."""
        self._draft = draft
        self._cost = StepCost()
        self._acceptance = RunningAcceptance(self._largest_k)
        self._k: int | None = None  # in use; None until chosen
        self._reason: Reason = "learning"
        self._bucket = 0  # of batch sizes, for which K was chosen
        self._held = 0  # steps for which K still stays
        self._limits: dict[str, int] = {}  # most draft tokens of requests that are accepted too rarely for K
        self._forecast: _Forecast | None = None
        self._expected: tuple[tuple[float, ...], float | None, float | None] = ((), None, None)
        self._trial: _Trial | None = None
        self._asked: dict[tuple[int, int], int] = {}  # (bucket, K) -> step at which measuring it began
        self._steps = 0
        self._budget = 0.0  # seconds that trials may lose
        self._lost = 0.0  # seconds that the newest trial lost, against the K in use
        self._learned_k = 0  # K of the newest step whose outcome is known

    def plan(self, rows: Sequence[DraftingRow]) -> DraftPlan:
        """What each row drafts in the next step."""
        largest = max((row.wanted for row in rows), default=0)
        if largest == 0:
            return self._told(DraftPlan(tuple(rows), (0,) * len(rows), 0, "not_asked"))
        newest = next(row.draft for row in reversed(rows) if row.wanted)
        if newest != self._draft:
            self._begin(newest)
        self._steps += 1
        changed = self._bucket != bucket_of(len(rows))
        if changed or self._trial is None or self._trial.steps == 0:
            self._bucket = bucket_of(len(rows))
            self._next(rows, largest, changed)
        return self._told(self._step(rows, largest))

    def _next(self, rows: Sequence[DraftingRow], largest: int, changed: bool) -> None:
        """Goes on with the K in use, chooses another one, or begins a trial."""
        self._trial = None
        self._held -= 1
        if self._held > 0 and not changed and self._k is not None:
            return
        self._held = _HELD_STEPS
        self._acceptance.update()
        self._acceptance.keep({row.request_id for row in rows})
        seconds = self._cost.seconds(len(rows), largest)
        self._forecast = None if seconds is None else _Forecast(seconds, self._tokens(rows, largest))
        if self._forecast is not None:
            self._expected = (
                tuple(self._forecast.seconds),
                self._forecast.speedup,
                self._acceptance.first_position,
            )
        passing = changed and self._forecast is not None  # this batch size may last for one step only
        unknown = None if passing else self._unknown(len(rows), largest)
        if unknown is not None:
            self._trial = _Trial(unknown, _LEARNING_STEPS, "learning")
        elif self._forecast is None:
            self._k, self._reason = largest, "learning"
        else:
            self._choose(self._forecast, rows, largest)
            if not passing:
                self._trial = self._due_trial(self._forecast, len(rows), largest)

    def _tokens(self, rows: Sequence[DraftingRow], largest: int) -> list[float]:
        """[largest + 1] expected of a step with K = 0, 1, ..., of all rows together."""
        sums = [float(len(rows))] + [0.0] * largest
        for row in rows:
            for position, survives in enumerate(self._acceptance.survival(row.request_id, row.wanted), 1):
                sums[position] += survives
        return list(accumulate(sums))

    def _unknown(self, rows: int, largest: int) -> int | None:
        """A K whose cost is to be measured first; one that was tried without a result has to wait."""
        known = [k for k in range(1, largest + 1) if self._cost.is_known(rows, k)]
        wanted = [0]
        if not known:
            wanted = [largest if self._forecast is None else self._forecast.best, 0]
        elif self._cost.smallest_known() in (None, self._bucket) and len(known) == 1:
            wanted = [0, 1]
        for k in wanted:
            asked = self._asked.get((self._bucket, k), -_STALE_STEPS)
            if not self._cost.is_known(rows, k) and self._steps - asked >= _STALE_STEPS:
                self._asked[self._bucket, k] = self._steps
                return k
        return None

    def _choose(self, forecast: _Forecast, rows: Sequence[DraftingRow], largest: int) -> None:
        best = forecast.best
        least = {None: 1.0, 0: _PAYS_AGAIN}.get(self._k, 1.0)
        if forecast.speedup < least:
            self._k, self._reason = 0, self._why_off(forecast)
        else:
            current = min(self._k or best, largest)
            better = forecast.rate(best) >= _BETTER * forecast.rate(current)
            self._k, self._reason = best if better else current, "best"
        self._limit(forecast, self._k or best, rows)

    def _why_off(self, forecast: _Forecast) -> Reason:
        smallest = self._cost.smallest_known()
        if smallest is None or smallest >= self._bucket:
            return "below_break_even"
        seconds = self._cost.seconds(smallest, len(forecast.tokens) - 1)
        if seconds is None:
            return "below_break_even"
        pays = _Forecast(seconds, forecast.tokens).speedup > 1.0
        return "high_concurrency" if pays else "below_break_even"

    def _limit(self, forecast: _Forecast, k: int, rows: Sequence[DraftingRow]) -> None:
        """Bounds a request's drafts to the tokens that are accepted often enough for the time they take."""
        worth = _OWN_PART * forecast.rate(k) * forecast.time_of_row_token(k)
        self._limits = {}
        for row in rows:
            survival = self._acceptance.survival(row.request_id, min(k, row.wanted))
            if survival and survival[-1] < worth:
                self._limits[row.request_id] = sum(each >= worth for each in survival)

    def _due_trial(self, forecast: _Forecast, rows: int, largest: int) -> _Trial | None:
        """A trial of the K measured longest ago, once the budget of seconds covers its expected loss."""
        in_use = self._k or 0
        if in_use == 0:
            k, steps, least = forecast.best, _PROBING_STEPS, self._lost
        else:
            others = {0, max(in_use - 1, 1), min(in_use + 1, largest)} - {in_use}
            k, steps, least = max(others, key=lambda each: self._cost.age(rows, each)), 1, 0.0
            close = forecast.rate(k) > _CLOSE * forecast.rate(in_use)
            if self._cost.age(rows, k) < (_HELD_STEPS if close else _STALE_STEPS):
                return None
        loss = steps * (forecast.seconds[k] - forecast.tokens[k] / forecast.rate(in_use))
        needed = max(loss, least, 0.0)
        still_pays = in_use == 0 and self._lost < 0.0
        if self._budget < needed and not still_pays:
            return None
        self._budget, self._lost = min(self._budget, 2.0 * needed), 0.0  # nothing is saved up for later
        if in_use == 0:
            self._acceptance.doubt(_REMEMBERED_STEPS_OFF)
        return _Trial(k, steps, "probing")

    def _step(self, rows: Sequence[DraftingRow], largest: int) -> DraftPlan:
        k, reason = self._k or 0, self._reason
        limits = self._limits
        if self._trial is not None:
            self._trial.steps -= 1
            k, reason = self._trial.k, self._trial.reason
            if reason == "learning" or self._k == 0:
                limits = {}
        wanted = tuple(min(k, row.wanted) for row in rows)
        seconds, rate = math.inf, None
        if reason == "probing" and self._forecast is not None:
            seconds, rate = self._forecast.seconds[k], self._forecast.rate(self._k or 0)
        if not limits or k == 0:
            return DraftPlan(tuple(rows), wanted, min(k, largest), reason, 0, seconds, rate)
        counts = tuple(
            min(most, limits.get(row.request_id, k)) for most, row in zip(wanted, rows, strict=True)
        )
        limited = sum(count < most for count, most in zip(counts, wanted, strict=True))
        return DraftPlan(tuple(rows), counts, max(counts), reason, limited, seconds, rate)

    def _told(self, plan: DraftPlan) -> DraftPlan:
        self.decision = Decision(True, len(plan.rows), plan.k, plan.reason, *self._expected)
        self.reasons[plan.reason] += len(plan.rows) - plan.limited
        if plan.limited:
            self.reasons["request_limit"] += plan.limited
        return plan

    def learned(self, plan: DraftPlan, seconds: float | None, given: Mapping[str, Given]) -> None:
        """The outcome of the step of `plan`.

        seconds: None where it did more than decode. given: of the requests that have not left since, by id.
        """
        if plan.k > 0 or plan.limited > 0:
            for row, count in zip(plan.rows, plan.counts, strict=True):
                outcome = given.get(row.request_id)
                if row.draft == self._draft and outcome is not None and outcome.most > 0:
                    self._acceptance.add(row.request_id, min(count, outcome.most), outcome.accepted)
        resumed = plan.k > 0 and self._learned_k == 0  # the draft model first reads what it has missed
        self._learned_k = plan.k
        if seconds is None:
            return
        if not resumed:
            self._cost.add(len(plan.rows), plan.k, seconds)
        if plan.rate is not None:
            emitted = sum(1 + outcome.accepted for outcome in given.values())
            lost = min(seconds, _LONGEST * plan.seconds) - emitted / plan.rate
            self._lost += lost
            self._budget -= lost
        else:
            self._budget += EXPLORING_SHARE * seconds
