"""The table of causes as one function: evidence in, diagnosis out. The order of the questions matters.

is the text itself suspicious?  -> quality
was the target replaced?        -> target_replaced
did K change, and explain it?   -> configuration
did the canary probes move too? -> machine
did another setting explain it? -> configuration
did only the mix move?          -> mix_shift
otherwise the queries moved     -> query_drift, as far as the evidence carries
"""

from __future__ import annotations

from typing import Final, NamedTuple

from driftguard.diagnosis import configuration
from driftguard.diagnosis.configuration import FieldChange
from driftguard.diagnosis.evidence import Evidence
from driftguard.diagnosis.examination import Examination, examine, facts, missing
from driftguard.diagnosis.rates import LEVEL
from driftguard.records.documents.diagnosis import Cause, Confidence, Diagnosis
from driftguard.records.positions import ACCEPTANCE

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
    excludes the machine.
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
        recommended_action=_action(verdict.cause, evidence),
        retrain=evidence.direction == "down" and verdict.cause in RETRAINABLE,
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
        return _other_k(setting)
    if found.probes_behaviour == "moved":
        return _machine(found, setting)
    if setting and not found.queries_moved:
        return _other_setting(setting, found)
    if found.segments and found.segments.is_mix_alone:
        return _Verdict("mix_shift", "high", "every segment is steady; only their shares moved")
    return _rose(found) if evidence.direction == "up" else _fell(evidence, found, setting)


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


def _other_k(setting: FieldChange) -> _Verdict:
    if setting.first_position is not None:
        return _Verdict(
            "configuration",
            "high",
            "K changed, and acceptance at position 1, which K leaves alone, did not move with it",
            _what(setting),
        )
    return _Verdict(
        "configuration",
        "medium",
        "K changed; the records hold no counts per position, so that nothing else can be excluded",
        _what(setting),
    )


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


_QUERIES: Final[dict[bool | None, str]] = {
    True: "the queries moved",
    False: "captured queries do not show a move",
    None: "the queries could not be compared",
}


def _fell(evidence: Evidence, found: Examination, setting: FieldChange | None) -> _Verdict:
    inside = f"{ACCEPTANCE[found.positions]} fell inside segments"
    changed = [configuration.NAMES[change.field] for change in found.settings.changes]
    if evidence.probes_awaited and not evidence.probes_after:
        reason = f"{inside}; the canary probes must be replayed before the machine can be excluded"
        return _Verdict("query_drift", "low", reason)
    if found.probes_behaviour == "steady":
        if found.queries_moved and not changed:
            reason = f"{inside}, the queries moved, the canary probes and every setting did not"
            return _Verdict("query_drift", "high", reason, _like(found))
        doubt = f"; {', '.join(changed)} changed as well" if changed else ""
        shown = _QUERIES[found.queries_moved]
        return _Verdict(
            "query_drift", "medium", f"{inside}, the canary probes did not move, {shown}{doubt}", _like(found)
        )
    if found.queries_moved is False:
        reason = f"{inside}, but the queries look as before, and no canary probes exclude the machine"
        return _Verdict("unknown", "low", reason)
    if setting or "num_speculative_tokens" in [change.field for change in found.settings.changes]:
        reason = f"{inside}; {', '.join(changed)} changed as well, and no canary probes exclude the machine"
        return _Verdict("query_drift", "low" if not found.queries_moved else "medium", reason, _like(found))
    how = "the queries moved" if found.queries_moved else "no setting changed"
    reason = f"{inside} and {how}; no canary probes exclude the machine"
    return _Verdict("query_drift", "medium", reason, _like(found))


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
    "unknown": "not known",
}


def _action(cause: Cause, evidence: Evidence) -> str:
    if evidence.direction == "up" and cause in ("query_drift", "machine", "configuration"):
        return "nothing to repair: acceptance rose"
    return _ACTIONS[cause]


_ACTIONS: Final[dict[Cause, str]] = {
    "query_drift": "retrain the draft on the new traffic",
    "mix_shift": "nothing to repair: every segment accepts as before",
    "machine": "restart the server or roll back what changed on it; retraining would not help",
    "configuration": "check that it was meant, and let the baseline start anew; retraining would not help",
    "target_replaced": "retrain the draft against the new target",
    "quality": "read some answers: the output is suspect, not the speed",
    "unknown": "replay the canary probes (`driftguard probe run`), then look at the machine",
}
