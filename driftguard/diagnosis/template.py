"""A prompt template that broke: it changes the prompts of every segment in the same way.

New queries change what is asked, and not the marks that a template puts into every prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from driftguard.diagnosis.evidence import Captured

MINIMUM_PROMPTS: Final = 10  # of a segment, on each side
MINIMUM_SEGMENTS: Final = 2  # of one segment a new topic could do the same
IN_ALL: Final = 0.9  # of the prompts of every segment
CHANGED: Final = 0.7  # of the prompts: by how much more, or fewer, of each segment's prompts hold the token


@dataclass(frozen=True, slots=True)
class Template:
    """Tokens that were in nearly every prompt of each segment and no longer are, and those that now are."""

    segments: int
    vanished: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def is_other(self) -> bool:
        return bool(self.vanished or self.new)


def compare(before: Sequence[Captured], after: Sequence[Captured], changed: Sequence[str]) -> Template | None:
    """None where fewer than MINIMUM_SEGMENTS changed segments have captured prompts on both sides."""
    sides = [
        {name: [set(one.prompt) for one in side if one.segment == name] for name in changed}
        for side in (before, after)
    ]
    names = [name for name in changed if min(len(side[name]) for side in sides) >= MINIMUM_PROMPTS]
    if len(names) < MINIMUM_SEGMENTS:
        return None
    vanished = _gone([sides[0][name] for name in names], [sides[1][name] for name in names])
    new = _gone([sides[1][name] for name in names], [sides[0][name] for name in names])
    return Template(len(names), vanished, new)


def _gone(of: Sequence[Sequence[set[int]]], then: Sequence[Sequence[set[int]]]) -> tuple[int, ...]:
    """Tokens in nearly all prompts of every segment on the one side, and in far fewer on the other side."""
    shares, others = [_shares(prompts) for prompts in of], [_shares(prompts) for prompts in then]
    return tuple(
        token
        for token in sorted(set.intersection(*(set(share) for share in shares)))
        if all(
            share[token] >= IN_ALL and share[token] - other.get(token, 0.0) >= CHANGED
            for share, other in zip(shares, others, strict=True)
        )
    )


def _shares(prompts: Sequence[set[int]]) -> dict[int, float]:
    """Token -> part of the prompts that hold it."""
    counts = Counter(token for prompt in prompts for token in prompt)
    return {token: count / len(prompts) for token, count in counts.items()}
