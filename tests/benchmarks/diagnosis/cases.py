"""One incident of a fault, by its seed: the requests, probes and captures that the sidecar would hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
from driftguard_training.serving import Score

from driftguard.diagnosis import Captured, Evidence, Observed, ProbeResult
from driftguard.diagnosis.serving_gap import Expected, ScoredRequest, summarised
from driftguard.store.serving_scores import SCORED_REQUESTS
from tests.benchmarks.diagnosis.engine_figures import Condition, Figures
from tests.benchmarks.diagnosis.faults import (
    DOMAIN_OF,
    FAULTS,
    HOUR,
    LONG_TOKENS,
    SHARES,
    Fault,
    Plan,
    Request,
    thinned,
)

EPOCH: Final = 1_790_000_000.0  # of the change, seconds since 1970
SECONDS_BETWEEN: Final = 150.0  # requests
PROBE_HOURS: Final = (60, 48, 36, 24, 18, 12, 6, 2)  # before the change
DIFFERENT_REPLAYS: Final = 0.05  # of a healthy server's greedy answers: batches change the last bits
FOUND_AT: Final = 4.0
MOST_SINCE: Final = 2_000

Answer = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and output, which decide the score
ProbesAtHand = Literal["twice", "once", "none"]  # each prompt asked again at once, or not


@dataclass(frozen=True, slots=True)
class Case:
    """Evidence with everything at hand; `without` takes some of it away."""

    fault: Fault
    evidence: Evidence

    def without(self, *, probes: ProbesAtHand, captures: bool, scores: bool) -> Evidence:
        found = self.evidence
        if not scores:
            found = replace(found, scores=None)
        if probes == "none":
            found = replace(found, probes_before=(), probes_after=())
        if probes == "once":
            before = tuple(one for one in found.probes_before if not one.is_warm)
            after = tuple(one for one in found.probes_after if not one.is_warm)
            found = replace(found, probes_before=before, probes_after=after)
        if not captures:
            found = replace(found, captures_before=(), captures_after=())
        return found


def case(fault: Fault, seed: int, figures: Mapping[str, Condition], known: Mapping[Answer, Score]) -> Case:
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
    probes = [_probes(random, figures, plan, starts, since=since) for since in (False, True)]
    kept = [_captures(random, side, captured) for side in (before, after)]
    accounted = (False, plan.is_accounted)
    old, new = (_scored(side, known, plan.changed, own) for side, own in zip(kept, accounted, strict=True))
    return Case(
        fault,
        Evidence(
            direction=plan.direction,  # type: ignore[arg-type]
            changed=plan.changed,
            before=tuple(_observed(one) for one in before),
            after=tuple(_observed(one) for one in after),
            probes_before=probes[0],
            probes_after=probes[1],
            captures_before=kept[0],
            captures_after=kept[1],
            scores=summarised(old, new, plan.changed, "rejection") if plan.direction == "down" else None,
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
            made = replace(made, accepted=thinned(made.accepted, left, random))
    return plan.each(made, random) if plan.each and at >= 0.0 else made


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
                accepted = thinned(accepted, left, random)
            if plan.probe_kept is not None and (left := plan.probe_kept(age, since)) < 1.0:
                accepted = thinned(accepted, left, random)
            answer = str(hash(one.output))
            if random.random() < DIFFERENT_REPLAYS:
                answer, accepted = f"{answer}-{replay}-{since}", thinned(accepted, 0.97, random)
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


def _scored(
    captured: Sequence[Captured], known: Mapping[Answer, Score], changed: Sequence[str], is_accounted: bool
) -> list[ScoredRequest]:
    """The newest of each changed segment. `is_accounted`: the models expect what was served. The engine's
    answers are few, and a case repeats them: the same one scored again would pass for another."""
    newest = [
        one
        for name in changed
        for one in [*{(one.prompt, one.output): one for one in captured if one.segment == name}.values()][
            -SCORED_REQUESTS:
        ]
        if (one.prompt, one.output) in known
    ]
    found = []
    for one in newest:
        score = known[one.prompt, one.output]
        served = float(one.drafted or 0), float(one.accepted or 0), float(one.accepted or 0)
        by = score.rejection
        counts = served if is_accounted else (by.drafted, by.accepted, by.accepted_of_answer)
        found.append(ScoredRequest(one, Expected(*counts), Expected(*counts), score.surprise, score.tokens))
    return found


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
