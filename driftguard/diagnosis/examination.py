"""Every test that a diagnosis rests on, run once, and what each says in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from driftguard.diagnosis import configuration, mix, probes, quality, query_drift
from driftguard.diagnosis.configuration import Configuration, FieldChange
from driftguard.diagnosis.evidence import Evidence, Observed
from driftguard.diagnosis.mix import Decomposition
from driftguard.diagnosis.probes import Behaviour, ProbeChange
from driftguard.diagnosis.quality import Repetition
from driftguard.diagnosis.query_drift import QueryChange
from driftguard.diagnosis.rates import LEVEL
from driftguard.records.documents.diagnosis import Fact
from driftguard.records.positions import ACCEPTANCE, Positions, combined

ENOUGH_QUERIES: Final = 50  # captured requests a side; fewer cannot show that prompts stayed as they were
_OF_K: Final = ("num_speculative_tokens", "drafted_per_step")
_UNTOLD: Final = "not told by the records"


@dataclass(frozen=True, slots=True)
class Examination:
    """`move`: signed change of acceptance inside the changed segments, at the `positions` by which their
    requests are judged. `queries_moved` None: cannot tell."""

    move: float
    positions: Positions
    segments: Decomposition | None
    settings: Configuration
    probes: ProbeChange | None
    probes_behaviour: Behaviour | Literal["none"]
    queries: QueryChange | None
    queries_moved: bool | None
    repetition: Repetition | None

    def explaining(self) -> FieldChange | None:
        """The changed setting that explains the move best, if one does; K only if position 1 kept still."""
        return next((change for change in self.settings.changes if self._explains(change)), None)

    def moved_k(self) -> bool:
        """K follows acceptance where it varies: what was drafted then moves as well, and explains nothing."""
        return self.positions != "all" and any(change.field in _OF_K for change in self.settings.changes)

    def _explains(self, change: FieldChange) -> bool:
        first = change.first_position
        if change.field in _OF_K and self.positions != "all":
            return False
        if change.field == "num_speculative_tokens" and first is not None:
            fell_too = first.p_value <= LEVEL and abs(first.change) >= probes.RELEVANT_SHARE * abs(self.move)
            return change.explains and not fell_too
        return change.explains


def examine(evidence: Evidence) -> Examination:
    """Runs the tests. Pure: seeded where labels are drawn."""
    before = [one for one in evidence.before if one.segment in evidence.changed]
    after = [one for one in evidence.after if one.segment in evidence.changed]
    own = mix.of_segments(before, after)
    move = own.within if own else 0.0
    probed = probes.compare(
        evidence.probes_before, evidence.probes_after, downward=evidence.direction == "down"
    )
    towards = abs(move) if evidence.direction == "up" else -abs(move)
    queries = query_drift.compare(evidence.captures_before, evidence.captures_after, evidence.changed, LEVEL)
    return Examination(
        move=move,
        positions=_positions(after),
        segments=mix.of_segments(evidence.before, evidence.after),
        settings=configuration.compare(before, after),
        probes=probed,
        probes_behaviour=probes.behaviour(probed, towards) if probed else "none",
        queries=queries,
        queries_moved=_moved(queries),
        repetition=quality.compare(evidence.captures_before, evidence.captures_after, evidence.changed),
    )


def _positions(requests: Iterable[Observed]) -> Positions:
    return combined("first" if one.by_first else "all" for one in requests)


def _moved(queries: QueryChange | None) -> bool | None:
    if queries is None:
        return None
    if queries.p_value <= LEVEL:
        return True
    enough = min(queries.requests_before, queries.requests_after) >= ENOUGH_QUERIES
    return False if enough else None


def facts(evidence: Evidence, found: Examination) -> Iterator[Fact]:
    """What was measured, in the order in which a reader asks."""
    if evidence.replaced_target is not None:
        text = f"the server served the target {evidence.replaced_target} before"
        yield Fact("target", text, {"target_before": evidence.replaced_target})
    if found.probes is not None:
        yield _probe_fact(found.probes, found.probes_behaviour)
    yield from (_setting_fact(change, found) for change in found.settings.changes)
    if found.settings.compared and not found.settings.changes:
        names = ", ".join(configuration.NAMES[name] for name in found.settings.compared)
        yield Fact("configuration", f"as before: {names}", {})
    if found.segments is not None:
        yield _mix_fact(found.segments, _positions(evidence.after))
    if found.queries is not None:
        yield _query_fact(found.queries, evidence)
    if found.repetition is not None:
        yield _quality_fact(found.repetition)


def missing(evidence: Evidence, found: Examination) -> Iterator[str]:
    """What would have told more, and how to have it the next time."""
    if not evidence.probes_before:
        yield "no canary probes from before the change (`driftguard probe init`, then `driftguard probe run`)"
    elif not evidence.probes_after:
        yield "the canary probes have not been replayed since the change (`driftguard probe run`)"
    elif found.probes_behaviour == "too_few":
        yield f"fewer than {probes.MINIMUM_PROMPTS} canary prompts were replayed on both sides of the change"
    if not evidence.captures_before and not evidence.captures_after:
        yield "no captured requests, so that the queries cannot be compared (capture.enabled)"
    elif found.queries is None:
        yield (
            f"fewer than {query_drift.MINIMUM_SAMPLE} captured requests of a changed segment on one side of "
            "the change, so that the queries cannot be compared"
        )
    needless = ("drafted_per_step",) if found.positions == "all" else _OF_K
    untold = [configuration.NAMES[name] for name in found.settings.untold if name not in needless]
    if untold:
        few = min(len(evidence.before), len(evidence.after)) < configuration.LEAST_REQUESTS
        yield ", ".join(untold) + (": too few records" if few else f": {_UNTOLD}")


def _probe_fact(change: ProbeChange, behaviour: Behaviour | Literal["none"]) -> Fact:
    verb = {
        "moved": "moved with the traffic",
        "steady": "did not move",
        "unclear": "do not tell: too noisy",
        "too_few": "are too few to tell",
        "none": "are missing",
    }[behaviour]
    text = (
        f"canary probes {verb}: {change.before:.2f} before, {change.after:.2f} now over {change.prompts} "
        f"prompts (change {change.difference.low:+.2f} to {change.difference.high:+.2f} at 99%)"
    )
    if change.is_answered_differently:
        text += (
            f"; the greedy answers to {change.answers_changed} of {change.answers_compared} prompts are "
            "others, so the target itself changed (weights, quantisation or template), not the draft alone"
        )
    return Fact(
        "probes",
        text,
        {
            "prompts": change.prompts,
            "before": change.before,
            "after": change.after,
            "change_low": change.difference.low,
            "change_high": change.difference.high,
            "p_value": change.p_value,
            "answers_changed": change.answers_changed,
            "answers_compared": change.answers_compared,
        },
    )


def _setting_fact(change: FieldChange, found: Examination) -> Fact:
    name = configuration.NAMES[change.field]
    shift = f"went from {change.before} to {change.after}"
    if change.before == change.after:
        shift = f"moved, though {change.before} stays its most common value"
    numbers = {"p_value": change.p_value, "distance": change.distance}
    if change.field in _OF_K and found.positions != "all":
        text = f"{name} {shift}; whether the first draft token is accepted does not depend on it"
        return Fact("configuration", text, {"field": change.field, **numbers})
    text = f"{name} {shift}; {100 * change.explained:.0f}% of the move lies between its values"
    numbers |= {"explained": change.explained, "overlap": change.overlap}
    if change.first_position is not None and change.field == "num_speculative_tokens":
        text += f"; acceptance at position 1 changed by {change.first_position.change:+.2f}"
        numbers["first_position_change"] = change.first_position.change
    return Fact("configuration", text, {"field": change.field, **numbers})


def _mix_fact(parts: Decomposition, positions: Positions) -> Fact:
    text = (
        f"{ACCEPTANCE[positions]} of all traffic moved by {parts.total:+.3f}: {parts.mix:+.3f} by the mix of "
        f"segments, {parts.within:+.3f} inside them"
    )
    numbers = {"total": parts.total, "mix": parts.mix, "within": parts.within}
    return Fact("mix", text, {**numbers, "within_error": parts.within_error})


def _query_fact(change: QueryChange, evidence: Evidence) -> Fact:
    counts = f"{change.requests_before} captured before, {change.requests_after} since"
    names = ", ".join(evidence.changed[:3])
    if change.nearest is None:
        text = f"prompts of {names} look as before (p = {change.p_value:.3f}; {counts})"
    else:
        like = f"like {change.nearest}" if change.nearest != query_drift.NEW_TOPIC else "a new topic"
        text = f"prompts of {names} moved (p = {change.p_value:.3f}; {counts}): {like}"
    text += "; p supposes independent requests, and long conversations can look like a move"
    numbers = {"p_value": change.p_value, "distance": change.distance, "nearest": change.nearest}
    more = {"requests_before": change.requests_before, "requests_after": change.requests_after}
    return Fact("queries", text, {**numbers, **more})


def _quality_fact(change: Repetition) -> Fact:
    text = (
        f"{100 * change.after:.0f}% of the 4-grams of captured answers repeat earlier ones, "
        f"{100 * change.before:.0f}% before"
    )
    numbers = {"before": change.before, "after": change.after, "p_value": change.p_value}
    more = {"requests_before": change.requests_before, "requests_after": change.requests_after}
    return Fact("quality", text, {**numbers, **more})
