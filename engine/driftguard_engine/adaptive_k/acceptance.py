"""How likely each request's next draft tokens are to be accepted, from what was accepted so far. No tensors.

    c_j   probability that position j is accepted where j - 1 was, of all requests of the draft
    r_i   request i: accepted / expected by c, counted where position j was reached, shrunken towards 1
    s_ij  = product over l <= j of min(r_i c_l, .99): request i keeps at least j draft tokens

A step reaches position j where it was to draft j tokens and accepted the j - 1 before. Where the draft then
offers no token, the position counts as rejected: nothing was gained there. Older steps weigh less. What is
known of a request that does not draft loses weight slowly, so that it drafts again some time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

_EXPECTED: Final = 0.7  # c_1 until something was drafted
_PRIOR_WEIGHT: Final = 4.0  # of _EXPECTED for c_1, of c_(j-1) for c_j; in times reached
_WINDOW: Final = 512.0  # steps of requests that c looks back on
_OWN_WINDOW: Final = 128.0  # steps of one request
_IDLE_WINDOW: Final = 256.0
_OWN_PRIOR: Final = 4.0  # accepted tokens
_MOST_LIKELY: Final = 0.99


@dataclass(slots=True)
class _Own:
    accepted: float = 0.0
    expected: float = 0.0

    def fade(self, kept: float) -> None:
        self.accepted *= kept
        self.expected *= kept


class RunningAcceptance:
    """See the module. Positions are counted from 1; K is at most `largest_k`."""

    def __init__(self, largest_k: int) -> None:
        self._reached = [0.0] * largest_k
        self._accepted = [0.0] * largest_k
        self._conditional = [_EXPECTED] * largest_k
        self._own: dict[str, _Own] = {}
        self._expected = [0.0, *accumulate(self._conditional)]  # [j] accepted tokens where j were reached
        self._ended: Counter[tuple[int, int]] = Counter()  # (reached, accepted) of steps since the update

    @property
    def first_position(self) -> float:
        """Probability that the first draft token is accepted, of all requests."""
        return self._conditional[0]

    def survival(self, request_id: str, k: int) -> list[float]:
        """[k] s_ij of positions 1 .. k."""
        own = self._own.get(request_id)
        ratio = (own.accepted + _OWN_PRIOR) / (own.expected + _OWN_PRIOR) if own else 1.0
        found, reached = [], 1.0
        for conditional in self._conditional[:k]:
            reached *= min(ratio * conditional, _MOST_LIKELY)
            found.append(reached)
        return found

    def add(self, request_id: str, drafted: int, accepted: int) -> None:
        """One step of one request: how many draft tokens were planned, and how many were accepted."""
        own = self._own.setdefault(request_id, _Own())
        if drafted == 0:
            own.fade(1.0 - 1.0 / _IDLE_WINDOW)
            return
        reached = min(accepted + 1, drafted)
        own.fade(1.0 - 1.0 / _OWN_WINDOW)
        own.accepted += accepted
        own.expected += self._expected[reached]
        self._ended[reached, accepted] += 1

    def update(self) -> None:
        """Computes c again, with the steps added since the last call."""
        if not self._ended:
            return
        self._fade((1.0 - 1.0 / _WINDOW) ** self._ended.total())
        for (reached, accepted), steps in self._ended.items():
            for position in range(reached):
                self._reached[position] += steps
                self._accepted[position] += steps * (position < accepted)
        self._ended.clear()
        before = _EXPECTED
        for position, counts in enumerate(zip(self._reached, self._accepted, strict=True)):
            before = (counts[1] + _PRIOR_WEIGHT * before) / (counts[0] + _PRIOR_WEIGHT)
            self._conditional[position] = before
        self._expected = [0.0, *accumulate(self._conditional)]

    def doubt(self, most: float) -> None:
        """Bounds the weight of the past to `most` steps. Before a probe: its few steps are to decide."""
        if self._reached[0] > most:
            self._fade(most / self._reached[0])

    def keep(self, request_ids: Collection[str]) -> None:
        """Forgets all other requests."""
        self._own = {name: own for name, own in self._own.items() if name in request_ids}

    def _fade(self, kept: float) -> None:
        for counts in (self._reached, self._accepted):
            for position, count in enumerate(counts):
                counts[position] = count * kept
