"""When a failed delivery is tried again: soon, unless the message itself is refused.

A page must not be late because its receiver is being rolled out (which answers 404), has its key changed
(401) or restarts: each of these ends within minutes, at an unknown time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from driftguard.masking import storable
from driftguard.outgoing.posting import Answer
from driftguard.store.notifications import LONGEST_WAIT

Kind = Literal["away", "misplaced", "refused"]

# The message cannot be read there: bad request, too large, not of a supported type, not processable.
_REFUSING: Final = frozenset({400, 413, 415, 422})
_AWAY: Final = frozenset({408, 425, 429})  # and every 5xx
# Seconds: the first wait, which doubles with every attempt, and the longest.
_WAITS: Final[dict[Kind, tuple[float, float]]] = {
    "away": (1.0, 60.0),
    "misplaced": (5.0, 120.0),
    "refused": (30.0, LONGEST_WAIT.total_seconds()),
}
_LONGEST_ASKED_SECONDS: Final = 120.0  # a longer Retry-After would delay a page too much
_MAX_REASON: Final = 300  # characters


@dataclass(frozen=True, slots=True)
class Failure:
    """One attempt that failed.

    `away`: no answer, or one that asks to try later. `misplaced`: the server that answers does not accept
    messages at this URL or with this key, or redirects. `refused`: the message itself is not accepted.
    """

    kind: Kind
    reason: str
    retry_after_seconds: float | None = None


def failure_of(answer: Answer) -> Failure | None:
    """None for any 2xx, which means delivered."""
    if answer.is_success:
        return None
    text = " ".join(storable(answer.text).split())[:_MAX_REASON]
    reason = ": ".join(part for part in (f"HTTP {answer.status}", text) if part)
    return Failure(_kind(answer.status), reason, answer.retry_after_seconds)


def _kind(status: int) -> Kind:
    if status in _REFUSING:
        return "refused"
    return "away" if status in _AWAY or status >= 500 else "misplaced"


def wait_seconds(failure: Failure, attempts: int, draw: float) -> float:
    """After `attempts` attempts, at least 1. `draw`: uniform in [0, 1), so that not all retry at the same
    time.

    The receiver's Retry-After is respected, up to two minutes.
    """
    first, longest = _WAITS[failure.kind]
    wait = min(first * 2.0 ** min(attempts - 1, 20), longest) * (1.0 - draw / 2.0)
    asked = min(failure.retry_after_seconds or 0.0, _LONGEST_ASKED_SECONDS)
    return max(wait, asked)
