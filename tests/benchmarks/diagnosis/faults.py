"""Labelled faults: what the sidecar would hold of one incident, with the cause that was planted.

Requests and prompts come from the engine's figures (engine_figures.py), drawn by conversation. `measured`
says which faults ran in the real engine; the others are simulated on its healthy figures. Every draw is by
the seed of the case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np

from driftguard.diagnosis import Captured, Evidence, Observed, ProbeResult
from tests.benchmarks.diagnosis.engine_figures import Condition, Figures

HOUR: Final = 3_600.0
EPOCH: Final = 1_790_000_000.0  # of the change, seconds since 1970
SHARES: Final[Mapping[str, float]] = {"code": 0.45, "docs": 0.45, "rare": 0.1}
DOMAIN_OF: Final[Mapping[str, str]] = {"code": "python", "docs": "prose", "rare": "headers"}
SECONDS_BETWEEN: Final = 150.0  # requests
PROBE_HOURS: Final = (60, 48, 36, 24, 18, 12, 6, 2)  # before the change
DIFFERENT_REPLAYS: Final = 0.05  # of a healthy server's greedy answers: batches change the last bits
STEP_SECONDS: Final = 0.012
LONG_TOKENS: Final = 250
FOUND_AT: Final = 4.0
MOST_SINCE: Final = 2_000

ProbesAtHand = Literal["twice", "once", "none"]  # each prompt asked again at once, or not
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


@dataclass(frozen=True, slots=True)
class Case:
    """Evidence with everything at hand; `without` takes some of it away."""

    fault: Fault
    evidence: Evidence

    def without(self, *, probes: ProbesAtHand, captures: bool) -> Evidence:
        found = self.evidence
        if probes == "none":
            found = replace(found, probes_before=(), probes_after=())
        if probes == "once":
            before = tuple(one for one in found.probes_before if not one.is_warm)
            after = tuple(one for one in found.probes_after if not one.is_warm)
            found = replace(found, probes_before=before, probes_after=after)
        if not captures:
            found = replace(found, captures_before=(), captures_after=())
        return found


def case(fault: Fault, seed: int, figures: Mapping[str, Condition]) -> Case:
    """One case: 300 to 800 requests before the change, and 80 to 250 since it; more where a fall is so small
    that no detector would have found it on these."""
    random = np.random.default_rng([20_261_124, FAULTS.index(fault), seed])
    plan = replace(fault.plan(random), names_sessions=seed % 2 == 0)
    drawn = tuple(-random.uniform(low, high) * HOUR for low, high in ((60, 90), (20, 40), (3, 15)))
    starts = plan.starts or drawn
    earlier, later = int(random.integers(300, 800)), int(random.integers(80, 250))
    before, after = _traffic(random, figures, plan, starts, earlier, later)
    while plan.is_found and later < MOST_SINCE and not _is_found(before, after, plan.changed):
        later *= 2
        before, after = _traffic(random, figures, plan, starts, earlier, later)
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


def _is_found(before: Sequence[Request], after: Sequence[Request], changed: Sequence[str]) -> bool:
    """A move of the changed segments at FOUND_AT standard errors, as evidence of 100,000 takes."""
    rates = [
        np.array([sum(one.accepted) / sum(one.drafted) for one in side if one.segment in changed])
        for side in (before, after)
    ]
    error = np.sqrt(sum(side.var(ddof=1) / len(side) for side in rates))
    return bool(abs(rates[1].mean() - rates[0].mean()) >= FOUND_AT * error)


def _traffic(
    random: np.random.Generator,
    figures: Mapping[str, Condition],
    plan: Plan,
    starts: Sequence[float],
    earlier: int,
    later: int,
) -> tuple[list[Request], list[Request]]:
    """Conversations that begin at any time, also across the change; their turns lie minutes apart."""
    found: list[Request] = []
    first, last = -earlier * SECONDS_BETWEEN, later * SECONDS_BETWEEN
    number = 0
    while len(found) < earlier + later:
        begin = random.uniform(first - HOUR / 2, last)
        shares = SHARES if begin < 0.0 else plan.shares
        segment = str(random.choice(list(shares), p=list(shares.values())))
        at, number = begin, number + 1
        session = f"session {number}" if plan.names_sessions else None
        for one, ill in _conversation(random, figures, plan, segment, is_new=begin >= 0.0):
            if first <= at < last:
                shown = ill if at >= 0.0 else one
                found.append(_request(random, plan, starts, segment, session, at, shown, len(found)))
            at += random.uniform(60, 300)
    ordered = sorted(found, key=lambda one: one.at)
    return [one for one in ordered if one.at < 0.0], [one for one in ordered if one.at >= 0.0]


def _conversation(
    random: np.random.Generator, figures: Mapping[str, Condition], plan: Plan, segment: str, *, is_new: bool
) -> list[tuple[Figures, Figures]]:
    """Its turns, each healthy and as the plan's condition serves it."""
    domain = DOMAIN_OF[segment]
    moves = is_new and segment in plan.domains and random.random() < plan.new_share
    healthy = figures["healthy"].traffic[plan.domains[segment] if moves else domain]
    if moves and plan.only_long:
        healthy = [one for one in healthy if len(one.prompt) > LONG_TOKENS]
    ill = figures[plan.condition].traffic.get(domain)
    chosen = healthy[int(random.integers(len(healthy)))].conversation
    turns = [one for one in healthy if one.conversation == chosen]
    turns = turns[: int(random.integers(1, len(turns) + 1))]
    if plan.condition == "healthy":
        return [(one, one) for one in turns]
    if ill is None:  # not run in this condition: each position loses what it loses in another domain
        rates = [_by_position(figures[name].traffic["python"]) for name in ("healthy", plan.condition)]
        kept = np.clip(rates[1] / rates[0], 0.0, 1.0)
        return [(one, _lowered(one, kept, random)) for one in turns]
    served = {(one.conversation, one.turn): one for one in ill}
    return [(one, served.get((one.conversation, one.turn), one)) for one in turns]


def _by_position(known: Sequence[Figures]) -> np.ndarray[Any, np.dtype[np.float64]]:
    drafted = np.sum([_padded(one.drafted) for one in known], axis=0)
    return np.asarray(np.sum([_padded(one.accepted) for one in known], axis=0) / drafted)


def _padded(counts: Sequence[int]) -> tuple[int, ...]:
    return (*counts, *[0] * (4 - len(counts)))


def _lowered(
    one: Figures, kept: np.ndarray[Any, np.dtype[np.float64]], random: np.random.Generator
) -> Figures:
    lost = [int(random.binomial(count, left)) for count, left in zip(one.accepted, kept, strict=False)]
    return Figures(
        one.conversation,
        one.turn,
        one.prompt,
        one.output,
        one.cached_tokens,
        one.steps,
        one.drafted,
        tuple(np.minimum.accumulate(lost).tolist()),
    )


def _request(
    random: np.random.Generator,
    plan: Plan,
    starts: Sequence[float],
    segment: str,
    session: str | None,
    at: float,
    one: Figures,
    number: int,
) -> Request:
    age = at - max((start for start in starts if start <= at), default=min(starts) - 40 * HOUR)
    drafted = one.drafted + (one.drafted[-1],) * (4 - len(one.drafted))
    accepted = one.accepted + (0,) * (4 - len(one.accepted))
    made = Request(
        number, segment, session, at, age, one.prompt, one.output, one.cached_tokens,
        one.steps, drafted, accepted,
        temperature=float(random.choice([0.7, 1.0])), concurrency=int(random.integers(2, 9)),
    )  # fmt: skip
    for kept in (plan.kept, plan.kept_since if at >= 0.0 else None):
        if kept is not None and (left := kept(made)) < 1.0:
            made = replace(made, accepted=_thinned(made.accepted, left, random))
    return plan.each(made, random) if plan.each and at >= 0.0 else made


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
        cold, warm = figures[name].probes, figures[name].warm_probes
        for number, one in [*enumerate(cold), *enumerate(warm)]:
            accepted, is_warm = one.accepted, one.cached_tokens > 0
            if is_warm and since and plan.warm_kept is not None and (left := plan.warm_kept(one)) < 1.0:
                accepted = _thinned(accepted, left, random)
            if plan.probe_kept is not None and (left := plan.probe_kept(age, since)) < 1.0:
                accepted = _thinned(accepted, left, random)
            answer = str(hash(one.output))
            if random.random() < DIFFERENT_REPLAYS:
                answer, accepted = f"{answer}-{replay}-{since}", _thinned(accepted, 0.97, random)
            told: dict[str, Any] = {
                "prompt": f"p{number}",
                "answer": answer,
                "drafted": sum(one.drafted),
                "accepted": sum(accepted),
                "first_drafted": one.drafted[0],
                "first_accepted": accepted[0],
                "prompt_tokens": len(one.prompt),
                "cached_tokens": one.cached_tokens,
                "is_warm": is_warm,
                "ended_at": EPOCH + at,
                "server_started_at": EPOCH + at - age,
            }
            found.append(ProbeResult(**told))
    return tuple(found)


def _captures(random: np.random.Generator, requests: Sequence[Request], part: float) -> tuple[Captured, ...]:
    return tuple(
        Captured(
            record_id=f"r{one.number}-{one.at:.0f}",
            segment=one.segment,
            prompt=one.prompt,
            output=one.output,
            session=one.session,
            drafted=sum(one.drafted),
            accepted=sum(one.accepted),
        )
        for one in requests
        if random.random() < part
    )


def _observed(one: Request) -> Observed:
    return Observed(
        segment=one.segment,
        steps=one.steps,
        drafted=sum(one.drafted),
        accepted=sum(one.accepted),
        num_speculative_tokens=len(one.drafted),
        acceptance_rule="rejection",
        temperature=one.temperature,
        concurrency=one.concurrency,
        first_drafted=one.drafted[0],
        first_accepted=one.accepted[0],
        prompt_tokens=len(one.prompt),
        cached_tokens=one.cached_tokens,
        output_tokens=len(one.output),
        time_per_output_token_seconds=one.steps * one.step_seconds / len(one.output),
        session=one.session,
        ended_at=EPOCH + one.at,
        server_started_at=EPOCH + one.at - one.age,
    )
