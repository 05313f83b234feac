"""Canary probes: the same prompts before and after, so that the traffic cannot be what changed."""

from __future__ import annotations

import math
from collections import Counter
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
STABLE: Final = 0.75  # of the replays of a prompt are answered alike: batches change the last bits of logits
COLLAPSED_SHARE: Final = 1 / 3  # of position 1 before

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
    answers_compared: int  # prompts whose greedy answer was nearly always the same before
    lengths_changed: int  # prompts that the server counts as another number of tokens than each time before
    lengths_compared: int
    first_before: float | None  # acceptance at position 1, of sums; None where it is not told
    first_after: float | None
    longest: int | None  # prompt tokens of the longest prompt; None where it is not told
    most_cached: float  # the largest part of a prompt that came from the prefix cache, since the change

    @property
    def is_answered_differently(self) -> bool:
        """The target itself answers differently: no draft can do that."""
        enough = self.answers_compared >= MINIMUM_PROMPTS
        return enough and self.answers_changed >= ANSWERS_CHANGED * self.answers_compared

    @property
    def is_answered_alike(self) -> bool:
        """The target answers as before: it is not another one."""
        enough = self.answers_compared >= MINIMUM_PROMPTS
        return enough and self.answers_changed < ANSWERS_CHANGED * self.answers_compared

    @property
    def is_counted_differently(self) -> bool:
        """The same prompts have other lengths: another template or tokenizer is applied to them."""
        enough = self.lengths_compared >= MINIMUM_PROMPTS
        return enough and self.lengths_changed >= ANSWERS_CHANGED * self.lengths_compared

    @property
    def has_first_collapsed(self) -> bool:
        if self.first_before is None or self.first_after is None:
            return False
        return self.first_after <= COLLAPSED_SHARE * self.first_before


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
    now = _answers(after)
    compared = [name for name in both if name in stable]
    lengths0, lengths1 = _lengths(before), _lengths(after)
    counted = [name for name in both if len(lengths0[name]) == 1 and len(lengths1[name]) == 1]
    lengths = [one.prompt_tokens for one in after if one.prompt_tokens is not None]
    return ProbeChange(
        prompts=n,
        before=float(np.mean([x0[name] for name in both])),
        after=float(np.mean([x1[name] for name in both])),
        difference=interval(float(d.mean()), error, n - 1),
        p_value=sign_flip_p_value(-d if downward else d),
        answers_changed=sum(stable[name] not in now[name] for name in compared),
        answers_compared=len(compared),
        lengths_changed=sum(lengths0[name] != lengths1[name] for name in counted),
        lengths_compared=len(counted),
        first_before=_first(before),
        first_after=_first(after),
        longest=max(lengths, default=None),
        most_cached=max(map(_cached, after), default=0.0),
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
    """Of prompts that were answered in nearly the same way each time: their most common answer. One replay
    alone tells nothing about that."""
    found = {}
    for prompt, given in _answers(before).items():
        ((answer, times),) = Counter(given).most_common(1)
        if len(given) > 1 and times >= STABLE * len(given):
            found[prompt] = answer
    return found


def _answers(results: Iterable[ProbeResult]) -> dict[str, list[str]]:
    answers: dict[str, list[str]] = {}
    for one in results:
        answers.setdefault(one.prompt, []).append(one.answer)
    return answers


def _lengths(results: Iterable[ProbeResult]) -> dict[str, set[int]]:
    lengths: dict[str, set[int]] = {}
    for one in results:
        lengths.setdefault(one.prompt, set()).update(
            () if one.prompt_tokens is None else (one.prompt_tokens,)
        )
    return lengths


def _first(results: Iterable[ProbeResult]) -> float | None:
    told = [(one.first_drafted or 0, one.first_accepted) for one in results if one.first_accepted is not None]
    drafted = sum(pair[0] for pair in told)
    return sum(pair[1] for pair in told) / drafted if drafted else None


def _cached(one: ProbeResult) -> float:
    return (one.cached_tokens or 0) / one.prompt_tokens if one.prompt_tokens else 0.0
