"""Canary probes: the same prompts before and after, so that the traffic cannot be what changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from driftguard.diagnosis.comparisons import EXCLUDED_SHARE, LEVEL, Difference, interval
from driftguard.diagnosis.evidence import ProbeResult

MINIMUM_PROMPTS: Final = 8  # 2^-7 is the first one-sided p-value below 1%; one more to spare
EXACT_UP_TO: Final = 14  # prompts whose sign flips are all tried
FLIPS: Final = 9_999
RELEVANT_SHARE: Final = 0.25  # of the traffic's move: less is no explanation of it
ANSWERS_CHANGED: Final = 0.5  # of the prompts

Behaviour = Literal["moved", "moved_less", "steady", "unclear", "too_few"]


@dataclass(frozen=True, slots=True)
class ProbeChange:
    """Acceptance of the prompts replayed on both sides. `p_value` is one-sided: a move as the traffic's."""

    prompts: int
    before: float  # mean over prompts
    after: float
    difference: Difference
    p_value: float
    answers_changed: int  # prompts whose greedy answer was one before and is another now
    answers_compared: int  # prompts whose greedy answer was the same each time before

    @property
    def is_answered_differently(self) -> bool:
        """The target itself answers differently: no draft can do that."""
        enough = self.answers_compared >= MINIMUM_PROMPTS
        return enough and self.answers_changed >= ANSWERS_CHANGED * self.answers_compared


def compare(
    before: Sequence[ProbeResult], after: Sequence[ProbeResult], *, downward: bool
) -> ProbeChange | None:
    """None where no prompt was replayed on both sides.

    Per prompt x = sum(accepted) / sum(drafted) over its replays, d = x_after - x_before; statistic mean d.
    Test: sign flips, p = P(mean of +-d at least as far in the traffic's direction); exact by enumeration up
    to 14 prompts, else 9,999 seeded flips (level kept, Phipson and Smyth 2010). Interval: paired t at 99%.
    Assumption: were nothing changed, before and after would be exchangeable within each prompt, and prompts
    independent. Greedy replays of a healthy server repeat themselves, so a steady server has d near zero.
    """
    x0, x1 = _by_prompt(before), _by_prompt(after)
    both = sorted(x0.keys() & x1.keys())
    if not both:
        return None
    d = np.array([x1[name] - x0[name] for name in both])
    n = len(d)
    error = float(d.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    stable = _stable_answers(before)
    now = {one.prompt: one.answer for one in after}
    compared = [name for name in both if name in stable]
    return ProbeChange(
        prompts=n,
        before=float(np.mean([x0[name] for name in both])),
        after=float(np.mean([x1[name] for name in both])),
        difference=interval(float(d.mean()), error, n - 1),
        p_value=sign_flip_p_value(-d if downward else d),
        answers_changed=sum(now[name] != stable[name] for name in compared),
        answers_compared=len(compared),
    )


def behaviour(change: ProbeChange, traffic_move: float) -> Behaviour:
    """Did the probes move with the traffic (`traffic_move` is its signed change of acceptance)?

    Steady means that the interval includes 0 and excludes half of the traffic's move. "moved_less": it
    excludes both, so that the probes moved, but by less than half of the traffic or the other way.
    """
    if change.prompts < MINIMUM_PROMPTS:
        return "too_few"
    size, sign = abs(traffic_move), math.copysign(1.0, traffic_move)
    along = sign * change.difference.change
    if change.p_value <= LEVEL and along >= RELEVANT_SHARE * size:
        return "moved"
    low, high = change.difference.low, change.difference.high
    farthest = high if sign > 0 else -low
    if farthest >= EXCLUDED_SHARE * size:
        return "unclear"
    return "steady" if low <= 0.0 <= high else "moved_less"


def sign_flip_p_value(d: NDArray[np.float64]) -> float:
    """P(mean of randomly signed d >= mean d): one-sided, at least 1 / 2^n or 1 / 10,000."""
    n = len(d)
    observed = d.sum()
    slack = 1e-12 * max(float(np.abs(d).sum()), 1.0)  # sums in another order differ in the last bits
    if n <= EXACT_UP_TO:
        signs = 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float(np.mean(signs @ d >= observed - slack))
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(FLIPS, n))
    return float((1 + np.sum(signs @ d >= observed - slack)) / (FLIPS + 1))


def _by_prompt(results: Iterable[ProbeResult]) -> dict[str, float]:
    sums: dict[str, tuple[int, int]] = {}
    for one in results:
        drafted, accepted = sums.get(one.prompt, (0, 0))
        sums[one.prompt] = drafted + one.drafted, accepted + one.accepted
    return {prompt: accepted / drafted for prompt, (drafted, accepted) in sums.items() if drafted}


def _stable_answers(before: Iterable[ProbeResult]) -> dict[str, str]:
    """Prompts whose answer was the same each time. One replay alone tells nothing about that."""
    answers: dict[str, list[str]] = {}
    for one in before:
        answers.setdefault(one.prompt, []).append(one.answer)
    return {prompt: given[0] for prompt, given in answers.items() if len(given) > 1 and len(set(given)) == 1}
