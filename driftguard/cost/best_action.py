"""What to do about a stream now: every action in one order, what each gains, and the one that is best.

    speculation off, another K, roll back, retrain, restart, nothing

Off and another K are measured, from the stream's own times at the load there is now (`assessment.py`).
Rolling back is measured where the old draft served the same segments (`rollback_gain`); else, where the
diagnosis calls for it, it is taken to give back all that was lost. A new draft or a restart can give back at
most that too; how much of it is known only afterwards. A restart is taken to give back all, and a new draft
half: what the detector calls recovered (the gate refuses a draft that is no better, so not less than
nothing).

The best has the largest gain of those that are sure: measured with an interval above 0, or called for by a
diagnosis that is not of low confidence. A new draft is never best while speculation off is faster: off holds
at once and is undone at once, and the draft has to beat it, not what is in service. Among equals, the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from driftguard.cost.payoff import load_text
from driftguard.cost.times import LEVEL, student
from driftguard.records.documents.cost import Choice, Cost, Interval
from driftguard.records.documents.diagnosis import Confidence
from driftguard.records.documents.retraining_run import Watch

ActionKind = Literal["speculation_off", "another_k", "roll_back", "retrain", "restart", "nothing"]
Basis = Literal["measured", "predicted", "expected", "unknown"]

IN_ORDER: Final[tuple[ActionKind, ...]] = (
    "speculation_off",
    "another_k",
    "roll_back",
    "retrain",
    "restart",
    "nothing",
)
LEAST_GAIN: Final = 0.02  # of the tokens per second: for less nobody restarts a server
MENDED_BY_ROLLBACK: Final = ("draft_wrong",)
MENDED_BY_RESTART: Final = ("machine", "engine_state")  # causes
HALF: Final = 0.5  # of the way back, from which on the detector calls a segment recovered
_GATED: Final = "if the new draft gets half of the way back; the gate measures it before it serves"
_LEAST_REQUESTS: Final = 30  # of a segment with the draft in service, to compare it with the old one


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of a stream when it is asked what to do.

    cost: as last measured; None where it is not known, or too old. lost: part of the tokens per second, of an
    open fall; None where there is none or it is not known. cause, confidence, retrain: of its diagnosis.
    training: a new draft is being trained; watched: the version of one that was, and is in service now, while
    cost and rollback are of the draft before it.
    rollback_to: the draft before; rollback_gain: of the tokens per
    second, None where it was not measured. rollback_by_hand: it was not put into service here.
    """

    cost: Cost | None = None
    lost: Interval | None = None
    cause: str | None = None
    confidence: Confidence = "low"
    retrain: bool = False
    training: bool = False
    watched: str | None = None
    rollback_to: str | None = None
    rollback_gain: Interval | None = None
    rollback_by_hand: bool = False


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that could be done. gain: part of the tokens per second, against doing nothing; None where it
    is not known, and `reason` says why. sure: it may be the best. num_speculative_tokens: of another K.
    draft_version: to roll back to. under_way: it is being done. by_hand: the sidecar cannot do it."""

    kind: ActionKind
    text: str  # in the imperative, without what it gains
    gain: Interval | None
    basis: Basis
    reason: str
    sure: bool = False
    best: bool = False
    num_speculative_tokens: int | None = None
    draft_version: str | None = None
    under_way: bool = False
    by_hand: bool = False

    @property
    def sentence(self) -> str:
        """For example: switch speculation off: 34% faster (31% to 37%)."""
        if self.kind == "nothing":
            return "do nothing: as fast as now"
        return f"{self.text}: {gain_words(self.gain, self.basis)}" if self.gain else self.text


def actions(situation: Situation) -> tuple[Action, ...]:
    """All of IN_ORDER; exactly one is the best."""
    found = (
        *_of_what_serves(situation),
        _retrain(situation),
        _restart(situation),
        Action("nothing", "do nothing", Interval(0.0, 0.0, 0.0), "measured", "", sure=True),
    )
    best = _best(found)
    return tuple(replace(action, best=action.kind == best) for action in found)


def best_of(found: Sequence[Action]) -> Action:
    return next(action for action in found if action.best)


def _best(found: Sequence[Action]) -> ActionKind:
    by_kind = {action.kind: action for action in found}
    off_is_faster = by_kind["speculation_off"].sure
    sure = [action for action in found if action.sure and not (action.kind == "retrain" and off_is_faster)]
    return max(sure, key=lambda action: (_value(action), -IN_ORDER.index(action.kind))).kind


def _value(action: Action) -> float:
    """What is called for although its gain is not known comes before nothing, and after all that is known."""
    return action.gain.value if action.gain is not None else LEAST_GAIN / 2.0


def _of_what_serves(situation: Situation) -> tuple[Action, Action, Action]:
    """All that was measured of an incident was measured with its own draft: it is not told as what a change
    gains now that another draft serves."""
    if situation.watched is None:
        return _off(situation), _another_k(situation), _roll_back(situation)
    reason = f"draft {situation.watched} serves now: the page of its stream says what this would gain"
    return (
        Action("speculation_off", "switch speculation off", None, "unknown", reason),
        Action("another_k", "set another K", None, "unknown", reason),
        Action("roll_back", "roll back", None, "unknown", reason),
    )


def _off(situation: Situation) -> Action:
    text = "switch speculation off"
    cost = situation.cost
    choice = _choice(cost, 0)
    if cost is None or choice is None:
        missing = cost.speedup.missing if cost is not None and cost.speedup is not None else None
        reason = missing or "no request without speculation was timed at the load there is now"
        return Action("speculation_off", text, None, "unknown", reason)
    where = load_text(cost.speedup.concurrency) if cost.speedup is not None else ""
    return Action(
        "speculation_off",
        text,
        choice.gain,
        "measured",
        f"timed with and without speculation {where}".rstrip(),
        sure=choice.gain.low > 0.0,
    )


def _another_k(situation: Situation) -> Action:
    cost = situation.cost
    others = [
        choice
        for choice in (cost.choices if cost else ())
        if choice.num_speculative_tokens not in (0, cost.num_speculative_tokens if cost else None)
    ]
    if cost is None or not others:
        reason = "requests of at least two K, or of one K and without speculation, must be timed"
        return Action("another_k", "set another K", None, "unknown", reason)
    found = max(others, key=lambda choice: choice.tokens_per_second)
    k = found.num_speculative_tokens
    sure = cost.best == k and cost.sure and found.gain.value >= LEAST_GAIN
    trend = "" if found.measured else ", which none of the timed requests had: if the trend goes on"
    return Action(
        "another_k",
        f"set K to {k}",
        found.gain,
        "measured" if found.measured else "predicted",
        f"K is {cost.num_speculative_tokens} now{trend}",
        sure=sure,
        num_speculative_tokens=k,
    )


def _roll_back(situation: Situation) -> Action:
    version, gain = situation.rollback_to, situation.rollback_gain
    if version is None:
        reason = "the draft in service was not promoted here: there is none to return to"
        return Action("roll_back", "roll back", None, "unknown", reason)
    found = Action(
        "roll_back",
        f"roll back to draft {version}",
        gain,
        "unknown",
        "the old draft was not measured on the segments that there are now",
        draft_version=version,
        by_hand=situation.rollback_by_hand,
    )
    is_called_for = situation.cause in MENDED_BY_ROLLBACK and situation.confidence != "low"
    if gain is not None:
        reason = "what the old draft accepted in the same segments, by formula"
        sure = gain.low > 0.0 or (is_called_for and gain.value > 0.0)
        return replace(found, basis="measured", reason=reason, sure=sure)
    if not is_called_for:
        return found
    expected = _back(situation.lost, 1.0)
    if expected is None:
        return replace(found, reason="what was lost is not known", sure=True)
    reason = "if the draft before gives back all that was lost"
    return replace(found, gain=expected, basis="expected", reason=reason, sure=expected.value > 0.0)


def _retrain(situation: Situation) -> Action:
    under_way = situation.training or situation.watched is not None
    text = "wait for the new draft that is being trained" if situation.training else "retrain the draft"
    if situation.watched is not None:
        text = f"wait while the new draft {situation.watched} is being watched"
    gain = _back(situation.lost, HALF)
    found = Action("retrain", text, gain, "expected", _GATED, under_way=under_way)
    if not situation.retrain or situation.cause in MENDED_BY_ROLLBACK:
        reason = (
            "no diagnosis calls for a new draft"
            if situation.cause is None
            else "the likely cause is none that a new draft mends, or its confidence is low"
        )
        return replace(found, gain=None, basis="unknown", reason=reason)
    if gain is None:
        return replace(found, basis="unknown", reason="what was lost is not known", sure=True)
    return replace(found, sure=gain.value > 0.0)


def _restart(situation: Situation) -> Action:
    gain = _back(situation.lost, 1.0)
    reason = "if the restart gives back all that was lost"
    found = Action("restart", "restart the server", gain, "expected", reason)
    if situation.cause not in MENDED_BY_RESTART or situation.confidence == "low":
        reason = "the likely cause is none that a restart mends, or its confidence is low"
        return replace(found, gain=None, basis="unknown", reason=reason)
    if gain is None:
        return replace(found, basis="unknown", reason="what was lost is not known", sure=True)
    return replace(found, sure=gain.value > 0.0)


def _choice(cost: Cost | None, k: int) -> Choice | None:
    """Choices are of the load there is now."""
    found = (choice for choice in (cost.choices if cost else ()) if choice.num_speculative_tokens == k)
    return next(found, None)


def _back(lost: Interval | None, part: float) -> Interval | None:
    """Gain of a part of the way back to the level before a loss, from nothing to all of it."""
    if lost is None:
        return None
    if lost.value <= 0.0:
        return Interval(0.0, 0.0, 0.0)
    whole = [1.0 / (1.0 - min(value, 0.99)) - 1.0 for value in (lost.value, max(lost.high, lost.value))]
    return Interval(part * whole[0], 0.0, whole[1])


def rollback_gain(watch: Watch | None, drafted_per_step: float | None) -> Interval | None:
    """Of the tokens per second, by what the old draft and the one in service accepted in the same segments.

    A step emits 1 + rate x (drafted tokens per step), and takes as long with either draft. Rates are taken in
    the mix of segments since the promotion, errors as independent. None where too few requests tell, as where
    K varies and the first draft tokens alone were compared.
    """
    segments = watch.segments if watch else ()
    parts = [part for part in segments if part.requests >= _LEAST_REQUESTS and not part.old.by_first]
    requests = sum(part.requests for part in parts)
    if not requests or not drafted_per_step:
        return None
    old = new = error = 0.0
    for part in parts:
        weight = part.requests / requests
        old += weight * part.old.mean
        new += weight * (part.acceptance or 0.0)
        error += weight**2 * (part.old.standard_error**2 + part.old.variance / part.requests)
    half = student(requests - 1, LEVEL) * error**0.5
    gains = [
        (1.0 + max(old + shift, 0.0) * drafted_per_step) / (1.0 + new * drafted_per_step) - 1.0
        for shift in (0.0, -half, half)
    ]
    return Interval(*gains)


def gain_words(gain: Interval, basis: Basis) -> str:
    """For example: 34% faster (31% to 37%); about 18% faster (up to 37%), expected."""
    word = "faster" if gain.value >= 0.0 else "slower"
    value = f"{abs(gain.value):.0%} {word}"
    if basis == "expected":
        return f"about {value} expected, up to {gain.high:.0%}"
    told = f"{value} ({gain.low:.0%} to {gain.high:.0%}"
    return f"{told}, predicted)" if basis == "predicted" else f"{told})"
