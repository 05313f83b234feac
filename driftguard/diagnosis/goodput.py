"""The cause of an incident of goodput, which no new draft mends.

does speculation lose at the load? -> load
was K set to another?              -> configuration
are tokens fewer per step?         -> unknown: acceptance has its own incidents, which tell why
are prompts longer?                -> load: a step reads more context
does a step take longer?           -> machine: the load was the same
"""

from __future__ import annotations

from typing import Final

from driftguard.diagnosis import configuration
from driftguard.diagnosis.comparisons import LEVEL, compare_ranks
from driftguard.diagnosis.configuration import FieldChange
from driftguard.diagnosis.evidence import Evidence
from driftguard.diagnosis.examination import Examination
from driftguard.diagnosis.verdict import Verdict
from driftguard.records.documents.goodput import GoodputChange

LEAST_REQUESTS: Final = 20  # that tell the length of their prompt, on each side
RELEVANT_LENGTH: Final = 1.25  # times the median before


def of_goodput(evidence: Evidence, goodput: GoodputChange, found: Examination) -> Verdict:
    """Never of a cause that calls for a draft."""
    if goodput.kind == "speculation_loses":
        return _loses(goodput, found)
    if changed := _other_k(found):
        name = configuration.NAMES[changed.field]
        reason = f"tokens come slower since {name} changed"
        return Verdict("configuration", "medium", reason, f": {name} {changed.before} to {changed.after}")
    if goodput.by_acceptance:
        reason = "each step gives fewer tokens: acceptance fell, and tells why where its own incident opens"
        return Verdict("unknown", "low", reason)
    if longer := _longer(evidence):
        reason = f"tokens come slower at as many requests at once, and prompts are {longer:.1f} times as long"
        return Verdict("load", "medium", reason)
    kept = ", and acceptance did not move" if goodput.acceptance == "none" else ""
    return Verdict("machine", "medium", f"each step takes longer at the same load{kept}")


def _other_k(found: Examination) -> FieldChange | None:
    """K that was set to another value. Where it varies it follows what a step costs, as does what a drafter
    finds to draft: such a change is no more than the mark that a slower machine leaves."""
    if found.positions != "all":
        return None
    changes = (one for one in found.settings.changes if one.field == "num_speculative_tokens")
    return next((one for one in changes if configuration.NOT_TOLD not in (one.before, one.after)), None)


def _loses(goodput: GoodputChange, found: Examination) -> Verdict:
    kept = ", and acceptance did not move" if goodput.acceptance == "none" else ""
    if found.load is not None and found.load.concurrency_rose:
        reason = f"more requests run at once, where verifying draft tokens costs more than they give{kept}"
        return Verdict("load", "high" if goodput.acceptance == "none" else "medium", reason)
    reason = f"verifying draft tokens costs more than they give at this load{kept}"
    return Verdict("load", "medium", reason)


def _longer(evidence: Evidence) -> float | None:
    """How many times as long prompts are in the median; None where no relevant rise is shown."""
    sides = [
        [float(one.prompt_tokens) for one in side if one.prompt_tokens is not None]
        for side in (evidence.before, evidence.after)
    ]
    if min(map(len, sides)) < LEAST_REQUESTS or compare_ranks(sides[0], sides[1]).p_rose > LEVEL:
        return None
    medians = [sorted(side)[len(side) // 2] for side in sides]
    factor = medians[1] / max(medians[0], 1.0)
    return factor if factor >= RELEVANT_LENGTH else None
