"""Labelled faults: what the sidecar would hold of one incident, with the cause that was planted.

Requests and prompts come from the engine's figures (engine_figures.py), drawn by conversation. `measured`
says which faults ran in the real engine; the others are simulated on its healthy figures. Every draw is by
the seed of the case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np

from driftguard.diagnosis import Captured, Evidence, Observed, ProbeResult
from tests.benchmarks.diagnosis.engine_figures import Condition, Figures

HOUR: Final = 3_600.0
SHARES: Final[Mapping[str, float]] = {"code": 0.45, "docs": 0.45, "rare": 0.1}
DOMAIN_OF: Final[Mapping[str, str]] = {"code": "python", "docs": "prose", "rare": "headers"}
SECONDS_BETWEEN: Final = 150.0  # requests
PROBE_HOURS: Final = (60, 48, 36, 24, 18, 12, 6, 2)  # before the change
DIFFERENT_REPLAYS: Final = 0.05  # of a healthy server's greedy answers: batches change the last bits
STEP_SECONDS: Final = 0.012

Kept = Callable[["Request"], float]  # part of what a request accepts that is left


@dataclass(frozen=True, slots=True)
class Request:
    """One request as served. `at`: seconds after the change; `age`: of the server, in seconds."""

    number: int
    segment: str
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
    probes_too: bool = True  # the probes meet the condition
    starts: tuple[float, ...] | None = None
    direction: str = "down"


@dataclass(frozen=True, slots=True)
class Fault:
    """`right`: the causes that are the truth; `is_drift`: a new draft is what repairs it."""

    name: str
    measured: bool
    right: tuple[str, ...]
    plan: Callable[[np.random.Generator], Plan]
    is_drift: bool = False


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
        before = now - (whole + random.uniform(0.1, 0.3) * over) if first_time else now - (whole + over)
        return Plan(
            kept=lambda one: kept(one.age),
            probe_kept=lambda age, _: kept(age),
            starts=(before - 40 * HOUR, before, now) if not first_time else (before - 5 * HOUR, before, now),
        )

    return plan


def _prefix_collapse(random: np.random.Generator) -> Plan:
    """Where the cached part of a long prompt is large, little is accepted; the aggregate is mediocre."""
    left = random.uniform(0.2, 0.5)

    def kept(one: Request) -> float:
        return left if one.cached_tokens > 0.5 * len(one.prompt) and len(one.prompt) > 200 else 1.0

    return Plan(kept_since=kept, probes_too=False, changed=("code", "docs"))


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

    return Plan(each=each, changed=("code",))


def _other_k(random: np.random.Generator) -> Plan:
    def each(one: Request, draws: np.random.Generator) -> Request:
        fifth = int(draws.binomial(one.accepted[-1], 0.6))
        more = (fifth, int(draws.binomial(fifth, 0.6)), 0, 0)
        return replace(one, drafted=(*one.drafted, *[one.drafted[-1]] * 4), accepted=(*one.accepted, *more))

    return Plan(each=each)


def _temperature(random: np.random.Generator) -> Plan:
    left = random.uniform(0.6, 0.8)
    hot = random.uniform(0.6, 0.9)  # of the requests

    def each(one: Request, draws: np.random.Generator) -> Request:
        if draws.random() > hot:
            return one
        return replace(one, temperature=1.4, accepted=_thinned(one.accepted, left, draws))

    return Plan(each=each)


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
    return lambda _: Plan(condition=condition, changed=changed or ("code", "docs", "rare"))


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
        lambda _: Plan(shares={"code": 0.15, "docs": 0.25, "rare": 0.6}, changed=("rare",)),
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


@dataclass(frozen=True, slots=True)
class Case:
    """Evidence with everything at hand; `without` takes some of it away."""

    fault: Fault
    evidence: Evidence

    def without(self, *, probes: bool, captures: bool) -> Evidence:
        found = self.evidence
        if not probes:
            found = replace(found, probes_before=(), probes_after=())
        if not captures:
            found = replace(found, captures_before=(), captures_after=())
        return found


def case(fault: Fault, seed: int, figures: Mapping[str, Condition]) -> Case:
    """One case: 300 to 800 requests before the change, 80 to 250 after it."""
    random = np.random.default_rng([20_261_124, FAULTS.index(fault), seed])
    plan = fault.plan(random)
    starts = plan.starts or tuple(
        -random.uniform(low, high) * HOUR for low, high in ((60, 90), (20, 40), (3, 15))
    )
    before = _requests(random, figures, Plan(kept=plan.kept), starts, int(random.integers(300, 800)), -1)
    after = _requests(random, figures, plan, starts, int(random.integers(80, 250)), 1)
    captured = random.uniform(0.3, 0.8)
    return Case(
        fault,
        Evidence(
            direction=plan.direction,  # type: ignore[arg-type]
            changed=plan.changed,
            before=tuple(_observed(one) for one in before),
            after=tuple(_observed(one) for one in after),
            probes_before=_probes(random, figures, plan, starts, since=False),
            probes_after=_probes(random, figures, plan, starts, since=True),
            captures_before=_captures(random, before, captured),
            captures_after=_captures(random, after, captured),
        ),
    )


def _requests(
    random: np.random.Generator,
    figures: Mapping[str, Condition],
    plan: Plan,
    starts: Sequence[float],
    count: int,
    direction: int,
) -> list[Request]:
    """Conversations one after the other until there are enough; their turns lie minutes apart."""
    found: list[Request] = []
    names = list(plan.shares)
    span = count * SECONDS_BETWEEN
    while len(found) < count:
        segment = str(random.choice(names, p=list(plan.shares.values())))
        begin = direction * random.uniform(0.0, span)
        for turn, one in enumerate(_conversation(random, figures, plan, segment)):
            at = begin + direction * turn * random.uniform(60, 300)
            found.append(_request(random, plan, starts, segment, at, one, len(found)))
    ordered = sorted(found, key=lambda one: one.at)
    return ordered[:count] if direction > 0 else ordered[-count:]


def _conversation(
    random: np.random.Generator, figures: Mapping[str, Condition], plan: Plan, segment: str
) -> list[Figures]:
    domain, condition, is_new = DOMAIN_OF[segment], plan.condition, False
    if segment in plan.domains and random.random() < plan.new_share:
        domain, is_new = plan.domains[segment], True
    if domain not in figures[condition].traffic:
        condition = "healthy"
    known = figures[condition].traffic[domain]
    if is_new and plan.only_long:
        known = [one for one in known if len(one.prompt) > 250]
    chosen = known[int(random.integers(len(known)))].conversation
    turns = [one for one in known if one.conversation == chosen]
    return turns[: int(random.integers(1, len(turns) + 1))]


def _request(
    random: np.random.Generator,
    plan: Plan,
    starts: Sequence[float],
    segment: str,
    at: float,
    one: Figures,
    number: int,
) -> Request:
    age = at - max((start for start in starts if start <= at), default=min(starts) - 40 * HOUR)
    drafted = one.drafted + (one.drafted[-1],) * (4 - len(one.drafted))
    accepted = one.accepted + (0,) * (4 - len(one.accepted))
    made = Request(
        number, segment, at, age, one.prompt, one.output, one.cached_tokens, one.steps, drafted, accepted,
        temperature=float(random.choice([0.7, 1.0])), concurrency=int(random.integers(2, 9)),
    )  # fmt: skip
    for kept in (plan.kept, plan.kept_since):
        if kept is not None and (left := kept(made)) < 1.0:
            made = replace(made, accepted=_thinned(made.accepted, left, random))
    return plan.each(made, random) if plan.each else made


def _thinned(accepted: Sequence[int], left: float, random: np.random.Generator) -> tuple[int, ...]:
    """Each position is kept with the chance of all before it and its own."""
    counts = [int(random.binomial(count, left ** (place + 1))) for place, count in enumerate(accepted)]
    return tuple(np.minimum.accumulate(counts).tolist())


def _probes(
    random: np.random.Generator,
    figures: Mapping[str, Condition],
    plan: Plan,
    starts: Sequence[float],
    *,
    since: bool,
) -> tuple[ProbeResult, ...]:
    """The engine's own answers to the same prompts, one replay per time; some answers differ by chance."""
    name = plan.condition if since and plan.probes_too else "healthy"
    found = []
    for replay, hours in enumerate([-1] if since else PROBE_HOURS):
        at = -hours * HOUR
        age = at - max((start for start in starts if start <= at), default=min(starts) - 40 * HOUR)
        for number, one in enumerate(figures[name].probes):
            accepted = one.accepted
            if plan.probe_kept is not None and (left := plan.probe_kept(age, since)) < 1.0:
                accepted = _thinned(accepted, left, random)
            answer = str(hash(one.output))
            if random.random() < DIFFERENT_REPLAYS:
                answer, accepted = f"{answer}-{replay}-{since}", _thinned(accepted, 0.97, random)
            told = {
                "prompt": f"p{number}",
                "answer": answer,
                "drafted": sum(one.drafted),
                "accepted": sum(accepted),
                "first_drafted": one.drafted[0],
                "first_accepted": accepted[0],
                "prompt_tokens": len(one.prompt),
                "cached_tokens": 0,
                "server_age_seconds": age,
            }
            found.append(ProbeResult(**_told(ProbeResult, told)))
    return tuple(found)


def _captures(random: np.random.Generator, requests: Sequence[Request], part: float) -> tuple[Captured, ...]:
    return tuple(
        Captured(f"r{one.number}-{one.at:.0f}", one.segment, one.prompt, one.output)
        for one in requests
        if random.random() < part
    )


def _observed(one: Request) -> Observed:
    return Observed(
        **_told(
            Observed,
            {
                "segment": one.segment,
                "steps": one.steps,
                "drafted": sum(one.drafted),
                "accepted": sum(one.accepted),
                "num_speculative_tokens": len(one.drafted),
                "acceptance_rule": "rejection",
                "temperature": one.temperature,
                "concurrency": one.concurrency,
                "first_drafted": one.drafted[0],
                "first_accepted": one.accepted[0],
                "prompt_tokens": len(one.prompt),
                "cached_tokens": one.cached_tokens,
                "output_tokens": len(one.output),
                "server_age_seconds": one.age,
                "time_per_output_token_seconds": one.steps * one.step_seconds / len(one.output),
            },
        )
    )


def _told(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """What the evidence has a place for."""
    known = {one.name for one in fields(kind)}
    return {name: value for name, value in values.items() if name in known}
