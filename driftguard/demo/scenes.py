"""What the demo sends, by what drafts: routes, their weights, the text of each, and how it is sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Weights = Mapping[str, float]
Domains = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Scene:
    """`shifted`: other weights of the same routes, which is no drift. `known` and `drifted`: the domain of
    each route. `judged`: routes that must have a baseline before the drift.

    prompts: of each domain; where these are few, the same ones are asked again and again. fresh: the part of
    the requests with a prompt that was not asked before, in spite of that.
    """

    weights: Weights
    shifted: Weights
    known: Domains
    drifted: Domains
    judged: tuple[str, ...]
    temperature: float = 1.0
    prompts: int = 3_000
    fresh: float = 0.0

    @property
    def routes(self) -> tuple[str, ...]:
        return tuple(self.known)

    @property
    def all_domains(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.known.values(), *self.drifted.values()]))


OF_MODELS = Scene(
    weights={"code": 0.5, "docs": 0.5},
    shifted={"code": 0.85, "docs": 0.15},
    known={"code": "python", "docs": "prose"},
    drifted={"code": "headers", "docs": "prose"},
    judged=("code", "docs"),
)
# What a lookup finds has been written before: templates, of which a quarter is filled in anew each time. One
# route is so rare that it has no baseline when the other one moves.
OF_LOOKUPS = Scene(
    weights={"code": 0.62, "docs": 0.34, "rare": 0.04},
    shifted={"code": 0.8, "docs": 0.16, "rare": 0.04},
    known={"code": "python", "docs": "prose", "rare": "python"},
    drifted={"code": "headers", "docs": "prose", "rare": "python"},
    judged=("code", "docs"),
    temperature=0.0,
    prompts=24,
    fresh=0.25,
)
