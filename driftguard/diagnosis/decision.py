"""The table of causes as one function: evidence in, diagnosis out. The tests are run once (examination.py)
and say in words what they found (facts.py); here they are weighed. The order of the questions matters.

is it about goodput?               -> see goodput.py
is the text itself suspicious?     -> quality
was the target replaced?           -> target_replaced
did K or the verification rule
  change, and explain it?          -> configuration
is it a fault of the engine?       -> see engine_faults.py
was the draft replaced?            -> draft_wrong
did another setting explain it?    -> configuration
did only the mix move?             -> mix_shift
did requests like before fall?     -> machine
did the engine change as well, and
  no steady probes exclude it?     -> configuration, or query_drift of low confidence
did the queries move, or do steady
  probes or a steady serving gap
  leave only them?                 -> query_drift, as far as the evidence carries
otherwise                          -> unknown
"""

from __future__ import annotations

from typing import Final, Literal

from driftguard.diagnosis import configuration
from driftguard.diagnosis.comparisons import EXCLUDED_SHARE, LEVEL
from driftguard.diagnosis.configuration import FieldChange
from driftguard.diagnosis.engine_faults import alike_fell, fault_of
from driftguard.diagnosis.evidence import EngineChange, Evidence
from driftguard.diagnosis.examination import EXCLUDING, Examination, examine
from driftguard.diagnosis.facts import facts, missing
from driftguard.diagnosis.goodput import of_goodput
from driftguard.diagnosis.probes import Behaviour
from driftguard.diagnosis.verdict import Verdict
from driftguard.records.documents.diagnosis import Diagnosis
from driftguard.records.positions import ACCEPTANCE

COMPARABLE: Final = 0.2  # of the traffic has values on both sides, so that like was compared with like


def diagnose(evidence: Evidence) -> Diagnosis:
    """The likely cause of one incident. Pure, deterministic; what `confidence` means: CONFIDENCE_MEANS.

    Never says query_drift with high confidence without canary probes that stayed steady: nothing else
    excludes the machine. Without probes and captured queries that can be compared, a fall inside segments has
    no cause; and low confidence never calls for a retraining.
    """
    found = examine(evidence)
    verdict = _decide(evidence, found)
    queries = found.queries
    return Diagnosis(
        cause=verdict.cause,
        confidence=verdict.confidence,
        summary=verdict.summary,
        reason=verdict.reason,
        facts=tuple(facts(evidence, found)),
        missing=tuple(missing(evidence, found)),
        recommended_action=verdict.action(evidence.direction),
        retrain=verdict.calls_for_a_draft(evidence.direction),
        awaits_probes=evidence.probes_awaited and not evidence.probes_after,
        examples=queries.examples if queries else (),
        confirmed_by=verdict.confirmed_by,
    )


def _decide(evidence: Evidence, found: Examination) -> Verdict:
    if evidence.goodput is not None:
        return of_goodput(evidence, evidence.goodput, found)
    setting = found.explaining()
    if evidence.direction == "up" and (suspicious := _suspicious(found, setting)):
        return suspicious
    if evidence.replaced_target is not None:
        return _replaced(evidence.replaced_target, setting)
    if setting and setting.field in configuration.KEEPS_FIRST:
        return _drafted_otherwise(setting, found.move)
    if fault := fault_of(found):
        return fault
    if evidence.replaced_draft is not None:
        return _other_draft(evidence.replaced_draft, found)
    if setting and not found.traffic_moved:
        return _other_setting(setting, found)
    if found.segments and found.segments.is_mix_alone:
        return Verdict("mix_shift", "high", "every segment is steady; only their shares moved")
    return _rose(found) if evidence.direction == "up" else _fell(evidence, found)


def _suspicious(found: Examination, setting: FieldChange | None) -> Verdict | None:
    if found.repetition and found.repetition.rose(LEVEL):
        if setting:
            return Verdict("quality", "medium", "answers repeat themselves more; a setting changed as well")
        return Verdict("quality", "high", "answers repeat themselves more, and no setting explains the rise")
    if found.looping and found.looping.rose and not setting:
        reason = (
            f"{100 * found.looping.after:.0f}% of the answers are long and guessed nearly without error, as "
            "repetitions are"
        )
        return Verdict("quality", "medium", reason)
    return None


def _replaced(target: str, setting: FieldChange | None) -> Verdict:
    detail = f" ({target} before)"
    if setting:
        name = configuration.NAMES[setting.field]
        return Verdict(
            "target_replaced", "medium", f"another target is served; {name} changed as well", detail
        )
    return Verdict(
        "target_replaced", "high", "another target is served, and no setting explains the move", detail
    )


def _other_draft(version: str, found: Examination) -> Verdict:
    """Another draft version came into service, and less is accepted since: whatever the traffic did as well,
    the one before is to be put back first."""
    reason = "another draft version is served, and less of it is accepted"
    sure = found.queries_moved is False and not found.settings.changes
    return Verdict("draft_wrong", "high" if sure else "medium", reason, f" ({version} before)")


def _drafted_otherwise(setting: FieldChange, move: float) -> Verdict:
    """By another K, or verified by another rule."""
    name = "K" if setting.field == "num_speculative_tokens" else configuration.NAMES[setting.field]
    first = setting.first_position
    if not setting.keeps_first:
        reason = f"{name} changed, and no position can be compared, so that nothing else can be excluded"
        return Verdict("configuration", "medium", reason, _what(setting))
    if first is None:
        reason = f"{name} changed; records have no counts per position, so that nothing else can be excluded"
        return Verdict("configuration", "medium", reason, _what(setting))
    kept = (
        f"acceptance at position 1, which it leaves alone, changed by {first.low:+.2f} to {first.high:+.2f}"
    )
    if first.excludes(EXCLUDED_SHARE * abs(move)):
        return Verdict("configuration", "high", f"{name} changed; {kept} at 99%", _what(setting))
    reason = f"{name} changed; {kept} at 99%, which does not exclude another cause"
    return Verdict("configuration", "medium", reason, _what(setting))


def _other_setting(setting: FieldChange, found: Examination) -> Verdict:
    name = configuration.NAMES[setting.field]
    if setting.overlap < COMPARABLE:
        excluded = found.queries_moved is False and setting.field in ("temperature", "acceptance_rule")
        return Verdict(
            "configuration",
            "medium" if excluded else "low",
            f"{name} changed for nearly all of the traffic, so that no like can be compared with like",
            _what(setting),
        )
    if found.queries_moved is False and found.probes_behaviour == "steady":
        reason = f"at equal {name} acceptance is as before; queries and canary probes did not move"
        return Verdict("configuration", "high", reason, _what(setting))
    reason = f"at equal {name} most of the move is gone"
    return Verdict("configuration", "medium", reason, _what(setting))


def _rose(found: Examination) -> Verdict:
    if found.queries_moved:
        return Verdict("query_drift", "medium", "the queries moved to what the draft knows well")
    return Verdict("unknown", "low", "a rise: no setting, no probe and no repetition explains it")


def _fell(evidence: Evidence, found: Examination) -> Verdict:
    inside = f"{ACCEPTANCE[found.positions]} fell inside segments"
    changed = [configuration.NAMES[change.field] for change in found.settings.changes]
    doubt = f"; {', '.join(changed)} changed as well" if changed else ""
    if found.gap is not None and found.gap.answers_are_others:
        shown = "the captured answers surprise the registered target, though canary probes are answered alike"
        return Verdict("unknown", "low", f"{inside}; {shown}{doubt}")
    if accounted := _fell_with_the_models(found, inside, doubt):
        return accounted
    if evidence.probes_awaited and not evidence.probes_after:
        reason = f"{inside}; the canary probes must be replayed before the machine can be excluded"
        return Verdict("query_drift" if found.traffic_moved else "unknown", "low", reason, _like(found))
    if found.probes_behaviour == "steady":
        return _fell_beside_steady_probes(found, inside, doubt)
    if like_before := alike_fell(found):
        return like_before
    if found.engine_change is not None and found.probes_behaviour not in EXCLUDING:
        return _other_engine(found, found.engine_change, inside)
    if found.traffic_moved:
        reason = f"{inside} and {_moved(found)}{doubt}; {_NO_PROBES[found.probes_behaviour]}"
        return Verdict("query_drift", "medium", reason, _like(found))
    if found.queries_moved is None:
        reason = f"{inside}{doubt}; nothing tells the traffic from the machine"
        return Verdict("unknown", "low", reason)
    reason = f"{inside}, but captured queries show no move{doubt}; {_NO_PROBES[found.probes_behaviour]}"
    return Verdict("unknown", "low", reason)


def _other_engine(found: Examination, change: EngineChange, inside: str) -> Verdict:
    """The engine changed as well, and no canary probes exclude it."""
    told = f"{change.in_words}; {_NO_PROBES[found.probes_behaviour]}"
    if found.traffic_moved:
        return Verdict("query_drift", "low", f"{inside} and {_moved(found)}, but {told}", _like(found))
    if found.queries_moved is None:
        return Verdict(
            "configuration", "low", f"{inside}; {told}", f": {change.before} became {change.after}"
        )
    reason = f"{inside}, the captured queries show no move, and {told}"
    return Verdict("configuration", "medium", reason, f": {change.before} became {change.after}")


def _fell_beside_steady_probes(found: Examination, inside: str, doubt: str) -> Verdict:
    if found.has_not_moved and found.change is not None:
        return Verdict(
            "unknown", "low", f"no fall is shown in the changed segments ({found.change.in_words})"
        )
    if found.alike_outcome == "fell":
        shown = "the canary probes did not move, but captured requests that look as before did"
        return Verdict("unknown", "low", f"{inside}, {shown}{doubt}")
    if found.traffic_moved:
        if doubt:
            reason = f"{inside}, {_moved(found)}, the canary probes did not{doubt}"
            return Verdict("query_drift", "medium", reason, _like(found))
        reason = f"{inside}, {_moved(found)}, the canary probes and every setting did not"
        return Verdict("query_drift", "high", reason, _like(found))
    if found.queries_moved is None:
        return _steady_probes_alone(found, inside, doubt)
    shown = "but neither the queries nor the canary probes moved"
    return Verdict("unknown", "low", f"{inside}, {shown}{doubt}")


def _fell_with_the_models(found: Examination, inside: str, doubt: str) -> Verdict | None:
    """The serving gap is steady, and the draft fits the requests since the change less. That prompts look as
    before does not contradict it: their n-grams are compared, and the models tell what the draft makes of
    them."""
    gap = found.gap
    if gap is None or not found.serves_as_before or not found.fits_less:
        return None
    shown = (
        f"target and draft account for it: offline {gap.offline_before:.2f} before, {gap.offline_after:.2f} "
        "since"
    )
    if doubt and not found.traffic_moved:
        return Verdict("unknown", "low", f"{inside}, {shown}{doubt}")
    if not found.traffic_moved and (found.queries_moved is False or found.alike_outcome == "fell"):
        like_before = f"{shown}, though captured prompts look as before"
        return Verdict("query_drift", "medium", f"{inside}, {like_before}{doubt}", _like(found))
    excluded = found.traffic_moved or (found.probes_cover and found.same_target)
    if found.probes_behaviour == "steady" and excluded and not doubt:
        reason = f"{inside}, {shown}; neither the canary probes nor any setting moved"
        return Verdict("query_drift", "high", reason, _like(found))
    return Verdict("query_drift", "medium", f"{inside}, {shown}{doubt}", _like(found))


def _moved(found: Examination) -> str:
    if found.queries_moved:
        return "the queries moved"
    return "captured requests that look as before are accepted as before"


def _steady_probes_alone(found: Examination, inside: str, doubt: str) -> Verdict:
    if not found.probes_cover:
        shown = (
            "the canary probes did not move, but are shorter, or less from the prefix cache, than the "
            "requests that fell"
        )
        return Verdict("unknown", "low", f"{inside}; {shown}{doubt}")
    shown = "the canary probes did not move, the queries could not be compared"
    if doubt:
        return Verdict("unknown", "low", f"{inside}, {shown}{doubt}")
    return Verdict("query_drift", "medium", f"{inside}, {shown}{doubt}", _like(found))


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
