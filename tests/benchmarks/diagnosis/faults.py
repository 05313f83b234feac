"""Labelled faults: how each changes the traffic, and the cause that is to be named.

`measured` says which ran in the real engine (engine_figures.py); the others are simulated on its healthy
figures. cases.py makes incidents of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tests.benchmarks.diagnosis.engine_figures import Figures

HOUR: Final = 3_600.0
SHARES: Final[Mapping[str, float]] = {"code": 0.45, "docs": 0.45, "rare": 0.1}
DOMAIN_OF: Final[Mapping[str, str]] = {"code": "python", "docs": "prose", "rare": "headers"}
STEP_SECONDS: Final = 0.012
LONG_TOKENS: Final = 250

Kept = Callable[["Request"], float]  # part of what a request accepts that is left


@dataclass(frozen=True, slots=True)
class Request:
    """One request as served. `at`: seconds after the change; `age`: of the server, in seconds."""

    number: int
    segment: str
    session: str | None
    at: float
    age: float
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    cached_tokens: int
    steps: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    temperature: float = 1.0
    concurrency: int = 4
    step_seconds: float = STEP_SECONDS


@dataclass(slots=True)
class Plan:
    """How the traffic since the change differs from the healthy traffic before it."""

    condition: str = "healthy"
    domains: dict[str, str] = field(default_factory=dict)  # of a segment's new topic, and the part of it
    new_share: float = 1.0
    only_long: bool = False  # of the new topic
    shares: Mapping[str, float] = field(default_factory=lambda: SHARES)
    changed: tuple[str, ...] = ("code", "docs", "rare")
    kept: Kept | None = None  # simulated loss, before the change too
    kept_since: Kept | None = None  # since the change
    each: Callable[[Request, np.random.Generator], Request] | None = None  # since the change
    probe_kept: Callable[[float, bool], float] | None = None  # of (age, is since the change)
    warm_kept: Callable[[Figures], float] | None = (
        None  # of the probes from the prefix cache, since the change
    )
    probes_too: bool = True  # the probes meet the condition
    starts: tuple[float, ...] | None = None
    direction: str = "down"
    names_sessions: bool = True
    is_found: bool = True  # by a move of acceptance
    is_accounted: bool = False  # simulated, and the models would account for it, given the request's settings


@dataclass(frozen=True, slots=True)
class Fault:
    """`right`: the causes that are the truth; `is_drift`: a new draft is what repairs it."""

    name: str
    measured: bool
    right: tuple[str, ...]
    plan: Callable[[np.random.Generator], Plan]
    is_drift: bool = False


def thinned(accepted: Sequence[int], left: float, random: np.random.Generator) -> tuple[int, ...]:
    """Each position is kept with the chance of all before it and its own."""
    counts = [int(random.binomial(count, left ** (place + 1))) for place, count in enumerate(accepted)]
    return tuple(np.minimum.accumulate(counts).tolist())


def _decaying(first_time: bool) -> Callable[[np.random.Generator], Plan]:
    """Acceptance is as it should be for some hours after a start, then falls to a part of itself."""

    def plan(random: np.random.Generator) -> Plan:
        whole, over, left = (
            random.uniform(4, 8) * HOUR,
            random.uniform(6, 12) * HOUR,
            random.uniform(0.4, 0.65),
        )

        def kept(age: float) -> float:
            return 1.0 - (1.0 - left) * float(np.clip((age - whole) / over, 0.0, 1.0))

        now = -(whole + 0.5 * over)  # the change is found in the middle of the decay
        if first_time:  # until now it was started anew before it could decay much
            earlier = tuple(now - number * (whole + 0.1 * over) for number in range(1, 12))
        else:
            earlier = (now - (whole + over), now - 2 * (whole + over))
        return Plan(
            kept=lambda one: kept(one.age),
            probe_kept=lambda age, _: kept(age),
            starts=(*earlier, now),
        )

    return plan


def _prefix_collapse(random: np.random.Generator) -> Plan:
    """Where the cached part of a long prompt is large, little is accepted; the aggregate is mediocre."""
    left = random.uniform(0.2, 0.5)

    def kept(one: Request | Figures) -> float:
        return left if one.cached_tokens > 0.5 * len(one.prompt) and len(one.prompt) > 200 else 1.0

    return Plan(kept_since=kept, warm_kept=kept, changed=("code", "docs"))


def _later_positions(random: np.random.Generator) -> Plan:
    left = random.uniform(0.2, 0.5)

    def each(one: Request, draws: np.random.Generator) -> Request:
        first, *later = one.accepted
        lost = [int(draws.binomial(count, left)) for count in later]
        return replace(one, accepted=(first, *np.minimum.accumulate(lost).tolist()))

    return Plan(each=each, probe_kept=lambda _, since: 0.6 if since else 1.0)


def _load(random: np.random.Generator) -> Plan:
    times = random.uniform(2.0, 4.0)

    def each(one: Request, draws: np.random.Generator) -> Request:
        return replace(one, concurrency=int(draws.integers(24, 40)), step_seconds=STEP_SECONDS * times)

    return Plan(each=each, changed=("code",), is_found=False)


def _other_k(random: np.random.Generator) -> Plan:
    def each(one: Request, draws: np.random.Generator) -> Request:
        fifth = int(draws.binomial(one.accepted[-1], 0.6))
        more = (fifth, int(draws.binomial(fifth, 0.6)), 0, 0)
        return replace(one, drafted=(*one.drafted, *[one.drafted[-1]] * 4), accepted=(*one.accepted, *more))

    return Plan(each=each, is_accounted=True)


def _temperature(random: np.random.Generator) -> Plan:
    left = random.uniform(0.6, 0.8)
    hot = random.uniform(0.6, 0.9)  # of the requests

    def each(one: Request, draws: np.random.Generator) -> Request:
        if draws.random() > hot:
            return one
        return replace(one, temperature=1.4, accepted=thinned(one.accepted, left, draws))

    return Plan(each=each, is_accounted=True)


def _looping(random: np.random.Generator) -> Plan:
    def each(one: Request, draws: np.random.Generator) -> Request:
        if draws.random() > 0.8:
            return one
        phrase = tuple(draws.integers(5, 1_500, 5).tolist())
        return replace(
            one,
            output=(phrase * 100)[:400],
            steps=82,
            drafted=(82,) * len(one.drafted),
            accepted=tuple(int(82 * rate) for rate in (0.98, 0.97, 0.96, 0.95)),
        )

    return Plan(each=each, direction="up", probe_kept=lambda _, __: 1.0)


def _drift(segments: Sequence[str], only_long: bool = False) -> Callable[[np.random.Generator], Plan]:
    def plan(random: np.random.Generator) -> Plan:
        return Plan(
            domains=dict.fromkeys(segments, "headers"),
            new_share=random.uniform(0.5, 1.0),
            only_long=only_long,
            changed=tuple(segments),
            probes_too=False,
        )

    return plan


def _planted(condition: str, *changed: str) -> Callable[[np.random.Generator], Plan]:
    def plan(random: np.random.Generator) -> Plan:
        restarted = random.random() < 0.5  # weights are loaded at a start, or woken from sleep
        return Plan(
            condition=condition,
            changed=changed or ("code", "docs", "rare"),
            starts=(-70 * HOUR, -30 * HOUR, -60.0) if restarted else None,
        )

    return plan


FAULTS: Final[Sequence[Fault]] = (
    Fault("state decays with age, restarts cured it", False, ("engine_state",), _decaying(False)),
    Fault("state decays with age, first time", False, ("engine_state",), _decaying(True)),
    Fault("stale draft cache on reuse", True, ("cache",), _planted("stale_draft_cache", "code", "docs")),
    Fault("long cached prompts collapse", False, ("cache",), _prefix_collapse),
    Fault("collapse with length (rope scaling lost)", True, ("cache",), _planted("rope_scaling_lost")),
    Fault("draft not loaded (random weights)", True, ("draft_wrong",), _planted("draft_random")),
    Fault("draft zeroed", True, ("draft_wrong",), _planted("draft_zeroed")),
    Fault("draft quantised to 3 bits", True, ("draft_wrong",), _planted("draft_quantised")),
    Fault("template broken", True, ("template",), _planted("template_broken")),
    Fault("target exchanged, unannounced", True, ("target_replaced",), _planted("target_other")),
    Fault("positions after the first collapse", False, ("machine",), _later_positions),
    Fault("load only", False, ("load",), _load),
    Fault("K changed", False, ("configuration",), _other_k),
    Fault("temperature changed", False, ("configuration",), _temperature),
    Fault(
        "only the mix moved",
        True,
        ("mix_shift",),
        lambda _: Plan(shares={"code": 0.15, "docs": 0.25, "rare": 0.6}, changed=("rare",), is_found=False),
    ),
    Fault("true drift in one segment", True, ("query_drift",), _drift(["code"]), is_drift=True),
    Fault("true drift everywhere", True, ("query_drift",), _drift(["code", "docs"]), is_drift=True),
    Fault(
        "true drift to long prompts",
        True,
        ("query_drift",),
        _drift(["code"], only_long=True),
        is_drift=True,
    ),
    Fault("looping output", False, ("quality",), _looping),
)
