"""States of an incident and the legal transitions between them. Pure.

open: nobody has seen it; acknowledged: a person has; mitigating: a retraining or a rollback is under way;
recovered_in_part: the promoted draft is better than the old one, and still worth telling below the level
before the fall; resolved: ended, and final. A new drift of the same stream is a new incident.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from driftguard.errors import BadInput, Conflict

State = Literal["open", "acknowledged", "mitigating", "recovered_in_part", "resolved"]
Severity = Literal["critical", "warning", "info"]
Direction = Literal["down", "up", "slower"]  # of acceptance; slower: of goodput

# After a failed mitigation it is open again, so that a person looks at it, or acknowledged if it was before.
LEGAL: Final[Mapping[str, tuple[State, ...]]] = {
    "open": ("acknowledged", "mitigating", "recovered_in_part", "resolved"),
    "acknowledged": ("mitigating", "recovered_in_part", "resolved"),
    "mitigating": ("open", "acknowledged", "recovered_in_part", "resolved"),
    "recovered_in_part": ("open", "acknowledged", "resolved"),
    "resolved": (),
}
CRITICAL_SLOWDOWN: Final = 0.20  # one fifth fewer tokens per second
PAGE_SLOWDOWN: Final = 0.02
GRAVITY: Final = ("info", "warning", "critical")


class IllegalTransition(Conflict):
    """The incident is already in the state that was asked for, or cannot get there from its own."""

    title = "Illegal transition"

    def __init__(self, from_state: str, to_state: str) -> None:
        legal = LEGAL.get(from_state, ())
        told = f"the incident is already {to_state}; nothing was changed"
        if from_state != to_state:
            told = (
                f"an incident that is {from_state} cannot become {to_state}; "
                f"from {from_state} the legal next states are: {', '.join(legal) or 'none'}"
            )
        super().__init__(told, from_state=from_state, to_state=to_state, legal=list(legal))


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of an incident's life; `from_state` is None when it opens."""

    from_state: State | None
    to_state: State
    reason: str
    at: datetime


def transition(from_state: State | None, to_state: State, reason: str, at: datetime) -> Transition:
    """The step from one state to another. Raises IllegalTransition, or BadInput for an empty reason.

    An incident begins as open: `from_state` None allows that and nothing else.
    """
    if not reason.strip():
        raise BadInput("reason: is empty; say why the incident changes", field="reason")
    legal = ("open",) if from_state is None else LEGAL[from_state]
    if to_state not in legal:
        raise IllegalTransition(from_state or "new", to_state)
    return Transition(from_state, to_state, reason.strip(), at)


def severity(direction: Direction, slowdown: float | None, page_slowdown: float = PAGE_SLOWDOWN) -> Severity:
    """`slowdown`: the part of the tokens per second lost, measured or by formula; None if unknown. "info"
    pages nobody: a rise, and a fall (of acceptance or goodput) that is known to cost less than
    `page_slowdown`."""
    if direction == "up":
        return "info"
    if slowdown is None:
        return "warning"
    if max(slowdown, 0.0) < page_slowdown:
        return "info"
    return "critical" if slowdown >= CRITICAL_SLOWDOWN else "warning"


def is_graver(one: str, other: str) -> bool:
    """Whether severity `one` is higher than `other`."""
    return GRAVITY.index(one) > GRAVITY.index(other)


def formula_slowdown(before: float, after: float, drafted_per_step: float) -> float:
    """Part of the tokens per second lost when the acceptance rate changes and a step takes as long as before.

    A step emits its accepted tokens and one of the target's own: 1 + rate x drafted tokens per step.
    """
    return 1.0 - (1.0 + after * drafted_per_step) / (1.0 + before * drafted_per_step)
