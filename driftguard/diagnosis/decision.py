"""The table of causes as one function: evidence in, diagnosis out. Every test is run once, and says in words
what it found; then they are weighed. The order of the questions matters.

is the text itself suspicious?  -> quality
was the target replaced?        -> target_replaced
did K change, and explain it?   -> configuration
did the canary probes move too? -> machine
did another setting explain it? -> configuration
did only the mix move?          -> mix_shift
did the queries move, or did
  steady probes leave only them? -> query_drift, as far as the evidence carries
otherwise                       -> unknown
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from driftguard.diagnosis import captured_requests, configuration, probes
from driftguard.diagnosis.captured_requests import QueryChange, Repetition
from driftguard.diagnosis.comparisons import EXCLUDED_SHARE, LEVEL, Decomposition, of_segments
from driftguard.diagnosis.configuration import Configuration, FieldChange
from driftguard.diagnosis.evidence import Evidence, Observed
from driftguard.diagnosis.probes import Behaviour, ProbeChange
from driftguard.records.documents.diagnosis import Cause, Confidence, Diagnosis, Fact
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
    own = of_segments(before, after)
    move = own.within if own else 0.0
    probed = probes.compare(
        evidence.probes_before, evidence.probes_after, downward=evidence.direction == "down"
    )
    towards = abs(move) if evidence.direction == "up" else -abs(move)
    queries = captured_requests.compare_prompts(
        evidence.captures_before, evidence.captures_after, evidence.changed, LEVEL
    )
    return Examination(
        move=move,
        positions=_positions(after),
        segments=of_segments(evidence.before, evidence.after),
        settings=configuration.compare(before, after),
        probes=probed,
        probes_behaviour=probes.behaviour(probed, towards) if probed else "none",
        queries=queries,
        queries_moved=_moved(queries),
        repetition=captured_requests.compare_answers(
            evidence.captures_before, evidence.captures_after, evidence.changed
        ),
    )


def _positions(requests: Iterable[Observed]) -> Positions:
    return combined(["first" if one.by_first else "all" for one in requests])


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
        yield Fact("configuration", f"no change shown: {names}", {})
    if found.segments is not None:
        yield _mix_fact(found.segments, _positions(evidence.after))
    if found.queries is not None:
        yield _query_fact(found.queries, found.queries_moved, evidence)
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
            f"fewer than {captured_requests.MINIMUM_SAMPLE} captured requests of a changed segment on one "
            "side of the change, so that the queries cannot be compared"
        )
    needless = ("drafted_per_step",) if found.positions == "all" else _OF_K
    untold = [configuration.NAMES[name] for name in found.settings.untold if name not in needless]
    if untold:
        few = min(len(evidence.before), len(evidence.after)) < configuration.LEAST_REQUESTS
        yield ", ".join(untold) + (": too few records" if few else f": {_UNTOLD}")


def _probe_fact(change: ProbeChange, behaviour: Behaviour | Literal["none"]) -> Fact:
    verb = {
        "moved": "moved with the traffic",
        "moved_less": "moved, by less than the traffic",
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


def _query_fact(change: QueryChange, moved: bool | None, evidence: Evidence) -> Fact:
    counts = f"{change.requests_before} captured before, {change.requests_after} since"
    names = ", ".join(evidence.changed[:3])
    if change.nearest is None:
        shown = "show no move, but are too few to exclude one" if moved is None else "look as before"
        text = f"prompts of {names} {shown} (p = {change.p_value:.3f}; {counts})"
    else:
        like = f"like {change.nearest}" if change.nearest != captured_requests.NEW_TOPIC else "a new topic"
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


COMPARABLE: Final = 0.2  # of the traffic has values on both sides, so that like was compared with like
RETRAINABLE: Final[tuple[Cause, ...]] = ("query_drift", "target_replaced")
MAIN_SHARE: Final = 0.5  # of the traffic's move, seen in the probes: the machine explains most of it


class _Verdict(NamedTuple):
    cause: Cause
    confidence: Confidence
    reason: str
    detail: str = ""


def diagnose(evidence: Evidence) -> Diagnosis:
    """The likely cause of one incident. Pure, deterministic; what `confidence` means: CONFIDENCE_MEANS.

    Never says query_drift with high confidence without canary probes that stayed steady: nothing else
    excludes the machine. Without probes and captured queries that can be compared, a fall inside segments has
    no cause; and low confidence never calls for a retraining.
    """
    found = examine(evidence)
    verdict = _decide(evidence, found)
    summary = _SUMMARIES[verdict.cause] + verdict.detail
    queries = found.queries
    return Diagnosis(
        cause=verdict.cause,
        confidence=verdict.confidence,
        summary=summary,
        reason=verdict.reason,
        facts=tuple(facts(evidence, found)),
        missing=tuple(missing(evidence, found)),
        recommended_action=_action(verdict, evidence),
        retrain=(
            evidence.direction == "down" and verdict.cause in RETRAINABLE and verdict.confidence != "low"
        ),
        awaits_probes=evidence.probes_awaited and not evidence.probes_after,
        examples=queries.examples if queries else (),
    )


def _decide(evidence: Evidence, found: Examination) -> _Verdict:
    setting = found.explaining()
    if evidence.direction == "up" and found.repetition and found.repetition.rose(LEVEL):
        if setting:
            return _Verdict("quality", "medium", "answers repeat themselves more; a setting changed as well")
        return _Verdict("quality", "high", "answers repeat themselves more, and no setting explains the rise")
    if evidence.replaced_target is not None:
        return _replaced(evidence.replaced_target, setting)
    if setting and setting.field == "num_speculative_tokens":
        return _other_k(setting, found.move)
    if found.probes_behaviour == "moved":
        return _machine(found, setting)
    if setting and not found.queries_moved:
        return _other_setting(setting, found)
    if found.segments and found.segments.is_mix_alone:
        return _Verdict("mix_shift", "high", "every segment is steady; only their shares moved")
    return _rose(found) if evidence.direction == "up" else _fell(evidence, found)


def _replaced(target: str, setting: FieldChange | None) -> _Verdict:
    detail = f" ({target} before)"
    if setting:
        name = configuration.NAMES[setting.field]
        return _Verdict(
            "target_replaced", "medium", f"another target is served; {name} changed as well", detail
        )
    return _Verdict(
        "target_replaced", "high", "another target is served, and no setting explains the move", detail
    )


def _other_k(setting: FieldChange, move: float) -> _Verdict:
    first = setting.first_position
    if first is None:
        reason = "K changed; the records hold no counts per position, so that nothing else can be excluded"
        return _Verdict("configuration", "medium", reason, _what(setting))
    kept = f"acceptance at position 1, which K leaves alone, changed by {first.low:+.2f} to {first.high:+.2f}"
    if first.excludes(EXCLUDED_SHARE * abs(move)):
        return _Verdict("configuration", "high", f"K changed; {kept} at 99%", _what(setting))
    reason = f"K changed; {kept} at 99%, which does not exclude another cause"
    return _Verdict("configuration", "medium", reason, _what(setting))


def _machine(found: Examination, setting: FieldChange | None) -> _Verdict:
    moved = found.probes.difference.change if found.probes else 0.0
    share = abs(moved) / abs(found.move) if found.move else 1.0
    if share < MAIN_SHARE:
        reason = f"the canary probes moved too, by {100 * share:.0f}% of the traffic's move: a part of it"
        return _Verdict("machine", "medium", reason)
    if setting:
        reason = f"the canary probes moved too; {configuration.NAMES[setting.field]} changed as well"
        return _Verdict("machine", "medium", reason)
    if found.moved_k():
        reason = "the canary probes moved too, but so did K, which moves what all of their positions accept"
        return _Verdict("machine", "medium", reason)
    return _Verdict("machine", "high", "the same prompts are accepted differently, and no setting changed")


def _other_setting(setting: FieldChange, found: Examination) -> _Verdict:
    name = configuration.NAMES[setting.field]
    if setting.overlap < COMPARABLE:
        excluded = found.queries_moved is False and setting.field in ("temperature", "acceptance_rule")
        return _Verdict(
            "configuration",
            "medium" if excluded else "low",
            f"{name} changed for nearly all of the traffic, so that no like can be compared with like",
            _what(setting),
        )
    if found.queries_moved is False and found.probes_behaviour == "steady":
        reason = f"at equal {name} acceptance is as before; queries and canary probes did not move"
        return _Verdict("configuration", "high", reason, _what(setting))
    reason = f"at equal {name} most of the move is gone"
    return _Verdict("configuration", "medium", reason, _what(setting))


def _rose(found: Examination) -> _Verdict:
    if found.queries_moved:
        return _Verdict("query_drift", "medium", "the queries moved to what the draft knows well")
    return _Verdict("unknown", "low", "a rise: no setting, no probe and no repetition explains it")


def _fell(evidence: Evidence, found: Examination) -> _Verdict:
    inside = f"{ACCEPTANCE[found.positions]} fell inside segments"
    changed = [configuration.NAMES[change.field] for change in found.settings.changes]
    doubt = f"; {', '.join(changed)} changed as well" if changed else ""
    if evidence.probes_awaited and not evidence.probes_after:
        reason = f"{inside}; the canary probes must be replayed before the machine can be excluded"
        return _Verdict("query_drift" if found.queries_moved else "unknown", "low", reason, _like(found))
    if found.probes_behaviour == "steady":
        return _fell_beside_steady_probes(found, inside, doubt)
    if found.queries_moved:
        reason = f"{inside} and the queries moved{doubt}; {_NO_PROBES[found.probes_behaviour]}"
        return _Verdict("query_drift", "medium", reason, _like(found))
    if found.queries_moved is None:
        reason = f"{inside}{doubt}; nothing tells the traffic from the machine"
        return _Verdict("unknown", "low", reason)
    reason = f"{inside}, but captured queries show no move{doubt}; {_NO_PROBES[found.probes_behaviour]}"
    return _Verdict("unknown", "low", reason)


def _fell_beside_steady_probes(found: Examination, inside: str, doubt: str) -> _Verdict:
    if found.queries_moved is None:
        shown = "the canary probes did not move, the queries could not be compared"
        return _Verdict("query_drift", "medium", f"{inside}, {shown}{doubt}", _like(found))
    if not found.queries_moved:
        shown = "but neither the queries nor the canary probes moved"
        return _Verdict("unknown", "low", f"{inside}, {shown}{doubt}")
    if doubt:
        reason = f"{inside}, the queries moved, the canary probes did not{doubt}"
        return _Verdict("query_drift", "medium", reason, _like(found))
    reason = f"{inside}, the queries moved, the canary probes and every setting did not"
    return _Verdict("query_drift", "high", reason, _like(found))


_NO_PROBES: Final[dict[Behaviour | Literal["none"], str]] = {
    "none": "no canary probes exclude the machine",
    "too_few": "too few canary probes exclude the machine",
    "unclear": "the canary probes are too noisy to exclude the machine",
    "moved_less": "the canary probes moved too, by less than the traffic: the machine may have a part in it",
}


def _what(setting: FieldChange) -> str:
    name = configuration.NAMES[setting.field]
    return f": {name} went from {setting.before} to {setting.after}"


def _like(found: Examination) -> str:
    if found.queries is None or found.queries.nearest is None:
        return ""
    return (
        f" ({found.queries.nearest})" if " " in found.queries.nearest else f" (like {found.queries.nearest})"
    )


_SUMMARIES: Final[dict[Cause, str]] = {
    "query_drift": "the traffic moved",
    "mix_shift": "only the mix of segments moved",
    "machine": "the machine or the engine, not the traffic",
    "configuration": "the configuration",
    "target_replaced": "the target was replaced",
    "quality": "looping or garbled output",
    "unknown": "the cause is not known",
}


def _action(verdict: _Verdict, evidence: Evidence) -> str:
    if evidence.direction == "up" and verdict.cause in ("query_drift", "machine", "configuration"):
        return "nothing to repair: acceptance rose"
    if verdict.cause in RETRAINABLE and verdict.confidence == "low":
        return _ACTIONS["unknown"]
    return _ACTIONS[verdict.cause]


_ACTIONS: Final[dict[Cause, str]] = {
    "query_drift": "retrain the draft on the new traffic",
    "mix_shift": "nothing to repair: every segment accepts as before",
    "machine": "restart the server or roll back what changed on it; retraining would not help",
    "configuration": "check that it was meant, and let the baseline start anew; retraining would not help",
    "target_replaced": "retrain the draft against the new target",
    "quality": "read some answers: the output is suspect, not the speed",
    "unknown": "replay the canary probes (`driftguard probe run`), then look at the machine",
}
