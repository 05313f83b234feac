"""Causes in the engine, each by what only it does. None of them is cured by a new draft.

is another template applied?       -> template: the same prompts have other lengths, or lost the same marks
does the target answer otherwise?  -> target_replaced, unannounced
do tokens only come slower?        -> load
does it fall with the age?         -> engine_state: and a restart cures it, or the canary probes fell too
does it fall with cache or length? -> cache
is position 1 gone for everybody?  -> draft_wrong
did the canary probes move too, or
  did the serving gap open?        -> draft_wrong where position 1 fell everywhere, else machine

Where the gap is steady and the answers are the target's own, state, cache and a collapse are excluded: the
models themselves account for what is accepted.

A rise is never the fault of a cache, of a draft or of an age that no restart ended: they make it fall.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from driftguard.diagnosis import configuration, pace, slices
from driftguard.diagnosis.comparisons import MAIN_SHARE
from driftguard.diagnosis.examination import EXCLUDING, Examination
from driftguard.diagnosis.slices import Slices
from driftguard.diagnosis.verdict import Verdict


def fault_of(found: Examination) -> Verdict | None:
    """The first that holds, in the order above; None: no fault of the engine is shown."""
    inside: Sequence[Callable[[Examination], Verdict | None]] = (_state, _cache, _collapsed)
    tests: Sequence[Callable[[Examination], Verdict | None]] = (
        _template,
        _exchanged,
        _load,
        *(() if found.serves_as_before else inside),
        _machine,
        _unfaithful,
    )
    return next((verdict for test in tests if (verdict := test(found)) is not None), None)


def alike_fell(found: Examination) -> Verdict | None:
    """Captured requests like those before fell: not the traffic, and nothing says more."""
    if found.alike_outcome != "fell" or found.alike is None:
        return None
    reason = (
        f"captured requests that look as before are accepted less too ({found.alike.change.in_words}), so "
        "that it is not the queries"
    )
    return Verdict("machine", "medium", reason + with_engine(found))


def with_engine(found: Examination) -> str:
    """What became of the engine near the change, to end a reason with; empty where nothing is known."""
    return f"; {found.engine_change.in_words}" if found.engine_change is not None else ""


def _template(found: Examination) -> Verdict | None:
    probed = found.probes
    if probed is not None and probed.is_counted_differently:
        reason = (
            f"{probed.lengths_changed} of {probed.lengths_compared} canary prompts have other lengths in "
            "tokens than before, so that another template or tokenizer is applied"
        )
        return Verdict("template", "high", reason)
    if found.template is not None and found.template.is_other:
        marks = len(found.template.vanished) + len(found.template.new)
        reason = (
            f"{marks} token{'s' if marks > 1 else ''} of nearly all prompts in each of "
            f"{found.template.segments} segments vanished or came new, which queries of several segments do "
            "not do together"
        )
        return Verdict("template", "medium", reason)
    return None


def _exchanged(found: Examination) -> Verdict | None:
    probed = found.probes
    if probed is None or not probed.is_answered_differently:
        return _not_its_own(found)
    moved = found.probes_behaviour in ("moved", "moved_less")
    reason = (
        f"the greedy answers to {probed.answers_changed} of {probed.answers_compared} canary prompts are "
        "others, which no draft can change: the target has other weights or another quantisation under the "
        "same name"
    )
    detail = ", and nobody announced it"
    return Verdict("target_replaced", "high" if moved else "medium", reason, detail, is_fault=True)


def _not_its_own(found: Examination) -> Verdict | None:
    gap = found.gap
    if gap is None or not gap.answers_are_others or (found.probes and found.probes.is_answered_alike):
        return None
    reason = (
        f"the captured answers surprise the registered target by {gap.surprise.change:.2f} nats per token "
        f"more than before ({gap.surprise.in_words}), which no draft can change: they are drawn from another "
        "target, or the engine computes this one wrongly"
    )
    return Verdict("target_replaced", "medium", reason, ", and nobody announced it", is_fault=True)


def _load(found: Examination) -> Verdict | None:
    if found.load is None or not found.load.is_slower or not found.has_not_moved or found.change is None:
        return None
    if found.probes_behaviour == "moved":
        return None
    reason = f"a step takes {found.load.factor:.1f} times as long"
    if found.change.excludes(pace.EXCLUDED_MOVE):
        sure = found.load.is_busier is True
        reason += f", and acceptance did not move ({found.change.in_words})"
        return Verdict("load", "high" if sure else "medium", reason)
    return Verdict(
        "load", "medium", f"{reason}, and no move of acceptance is shown ({found.change.in_words})"
    )


def _state(found: Examination) -> Verdict | None:
    age = found.age
    if age is None:
        return None
    falls, cured = age.falls_with_age(found.move), age.is_cured(found.move)
    probed = found.probes_behaviour == "moved" or age.probes_fall_with_age(found.move)
    if not probed and found.probes_behaviour in EXCLUDING:
        return None  # they did not, with the server as old as it is
    shown = probed or found.gap_behaviour == "opened"
    also = "that of the canary probes too" if probed else "target and draft do not account for it"
    if falls and cured and age.cured is not None:
        reason = "acceptance falls with the age of the server, and a restart brought it back"
        reason += f" ({age.cured.in_words})"
        return Verdict("engine_state", "high" if shown else "medium", reason)
    if falls and shown and not found.is_rise:
        reason = f"acceptance falls with the age of the server, and {also}"
        return Verdict("engine_state", "medium", reason)
    return None


def _cache(found: Examination) -> Verdict | None:
    if found.is_rise:
        return None
    warm, cold = found.warm_probes, found.probes
    if found.warm_behaviour == "moved" and found.probes_behaviour in EXCLUDING and warm and cold:
        reason = (
            "the same canary prompts are accepted less only when they are asked again and come from the "
            f"prefix cache ({warm.difference.in_words}, else {cold.difference.in_words})"
        )
        return Verdict("cache", "high", reason)
    shown = next((one for one in found.slices if _is_cache(one, found)), None)
    if shown is None:
        return None
    reason = f"acceptance fell with {slices.NAMES[shown.of]}: {shown.high.in_words} where it is large, "
    reason += f"{shown.low.in_words} where it is small"
    detail = "" if shown.of == "cached_share" else ", at long prompts"
    sure = found.probes_behaviour == "moved" or found.queries_moved is False
    return Verdict("cache", "high" if sure else "medium", reason, detail)


def _is_cache(sliced: Slices, found: Examination) -> bool:
    """Not where the traffic itself became longer or more cached, nor where other queries came in that may be
    the longer ones, nor where canary prompts as long are accepted as before."""
    if not sliced.is_concentrated or sliced.traffic_moved:
        return False
    if found.traffic_moved:
        return False
    asked = ((found.probes, found.probes_behaviour), (found.warm_probes, found.warm_behaviour))
    kept = [probed for probed, behaviour in asked if probed is not None and behaviour in EXCLUDING]
    if sliced.of == "prompt_tokens":
        return all(probed.longest is None or probed.longest < sliced.high_from for probed in kept)
    return all(probed.most_cached < sliced.high_from for probed in kept)


def _collapsed(found: Examination) -> Verdict | None:
    if found.is_rise:
        return None
    first, probed = found.first, found.probes
    everywhere = first is not None and first.has_collapsed_everywhere
    if found.probes_behaviour == "moved" and probed is not None and probed.has_first_collapsed:
        reason = (
            f"position 1 of the canary probes fell from {probed.first_before:.2f} to {probed.first_after:.2f}"
        )
        return Verdict("draft_wrong", "high", f"{reason} at once: the draft guesses as if it were another")
    if not everywhere or first is None or found.probes_behaviour in EXCLUDING:
        return None
    reason = f"position 1 fell from {first.before:.2f} to {first.after:.2f} at once in every segment"
    if found.probes_behaviour == "moved":
        return Verdict("draft_wrong", "high", f"{reason}, and the canary probes fell too")
    if found.gap_behaviour == "opened":
        return Verdict("draft_wrong", "high", f"{reason}, which target and draft do not account for")
    if found.traffic_moved:
        return None
    return Verdict("draft_wrong", "medium", f"{reason}, as no change of topic makes it")


def _machine(found: Examination) -> Verdict | None:
    if found.probes_behaviour != "moved" or found.probes is None:
        return None
    setting = found.explaining()
    share = abs(found.probes.difference.change) / abs(found.move) if found.move else 1.0
    if share < MAIN_SHARE:
        reason = f"the canary probes moved too, by {100 * share:.0f}% of the traffic's move: a part of it"
        return Verdict("machine", "medium", reason)
    if setting:
        reason = f"the canary probes moved too; {configuration.NAMES[setting.field]} changed as well"
        return Verdict("machine", "medium", reason)
    if found.moved_k():
        reason = "the canary probes moved too, but so did K, which moves what all of their positions accept"
        return Verdict("machine", "medium", reason)
    return _draft_or_machine(found)


def _draft_or_machine(found: Examination) -> Verdict:
    """The probes moved with the traffic, and nothing else did."""
    first = found.first
    if first is not None and first.has_fallen_everywhere and not found.is_rise and _probes_first_fell(found):
        reason = (
            "the canary probes moved too, with the same answers, and position 1 fell in every segment "
            f"({first.change.in_words})"
        )
        return Verdict("draft_wrong", "medium", reason)
    reason = "the same prompts are accepted differently, and no setting changed"
    if found.gap_behaviour == "steady":
        reason += "; but target and draft account for what is accepted of the captured requests"
        return Verdict("machine", "medium", reason + with_engine(found))
    return Verdict("machine", "high", reason + with_engine(found))


def _unfaithful(found: Examination) -> Verdict | None:
    """The serving gap opened: the engine accepts otherwise than the models would of the same requests."""
    gap, behaviour = found.gap, found.gap_behaviour
    if gap is None or behaviour not in ("opened", "opened_less"):
        return None
    excluded = found.probes_behaviour in EXCLUDING and found.probes_cover
    reason = (
        f"captured requests are accepted {'more' if found.is_rise else 'less'} than target and draft account "
        f"for, by more than before ({gap.opened.in_words})"
    )
    if behaviour == "opened_less":
        return None if excluded else Verdict("machine", "medium", f"{reason}: a part of the move")
    if excluded:
        return Verdict("machine", "medium", f"{reason}, though the canary probes did not move")
    if setting := found.explaining():
        reason += f"; {configuration.NAMES[setting.field]} changed as well"
        return Verdict("machine", "medium", reason)
    if not gap.answers_are_own:
        reason += "; whether the answers are still the registered target's is not shown"
        return Verdict("machine", "medium", reason + with_engine(found))
    first = found.first
    if first is not None and first.has_fallen_everywhere and not found.is_rise:
        reason += f", and position 1 fell in every segment ({first.change.in_words})"
        return Verdict("draft_wrong", "medium", reason + with_engine(found))
    return Verdict("machine", "high", reason + with_engine(found))


def _probes_first_fell(found: Examination) -> bool:
    """Relative to all positions: a fault behind position 1 leaves it alone."""
    probed = found.probes
    if probed is None or probed.first_before is None or probed.first_after is None:
        return False
    return probed.first_after < probed.first_before - 0.1 * (probed.before - probed.after)
