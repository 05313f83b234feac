"""What the tests found, each in words and with its numbers, and what would have told more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from driftguard.diagnosis import captured_requests, configuration, probes, slices
from driftguard.diagnosis.captured_requests import QueryChange, Repetition
from driftguard.diagnosis.comparisons import Decomposition, Difference
from driftguard.diagnosis.configuration import FieldChange
from driftguard.diagnosis.evidence import Evidence
from driftguard.diagnosis.examination import LOOKS_AS_BEFORE, OF_K, Examination, positions_of
from driftguard.diagnosis.like_with_like import LikeWithLike
from driftguard.diagnosis.pace import Load, Looping
from driftguard.diagnosis.probes import Behaviour, ProbeChange
from driftguard.diagnosis.server_age import ServerAge
from driftguard.diagnosis.serving_gap import ServingGap
from driftguard.diagnosis.slices import FirstPosition, Slices
from driftguard.diagnosis.template import Template
from driftguard.records.documents.diagnosis import PROBE, Fact, Number
from driftguard.records.documents.serving_scores import MissingScores
from driftguard.records.positions import ACCEPTANCE, Positions

_UNTOLD: Final = "not told by the records"


def facts(evidence: Evidence, found: Examination) -> Iterator[Fact]:
    """What was measured, in the order in which a reader asks."""
    if evidence.replaced_target is not None:
        text = f"the server served the target {evidence.replaced_target} before"
        yield Fact("target", text, {"target_before": evidence.replaced_target})
    if evidence.replaced_draft is not None:
        text = f"the server served the draft version {evidence.replaced_draft} before"
        yield Fact("draft", text, {"draft_version_before": evidence.replaced_draft})
    if (change := found.engine_change) is not None:
        numbers: dict[str, Number] = {"engine_before": change.before, "engine_after": change.after}
        yield Fact("engine", change.in_words, {**numbers, "seconds_before": change.seconds_before})
    if found.probes is not None:
        yield _probe_fact(found.probes, found.probes_behaviour)
    if found.warm_probes is not None:
        yield _warm_fact(found.warm_probes, found.warm_behaviour)
    yield from (_setting_fact(change, found) for change in found.settings.changes)
    if found.settings.compared and not found.settings.changes:
        names = ", ".join(configuration.NAMES[name] for name in found.settings.compared)
        yield Fact("configuration", f"no change shown: {names}", {})
    if found.segments is not None:
        yield _mix_fact(found.segments, positions_of(evidence.after))
    if found.queries is not None:
        yield _query_fact(found.queries, found.queries_moved, evidence)
    if found.alike is not None:
        yield _alike_fact(found.alike, found)
    if found.gap is not None:
        yield _gap_fact(found.gap, found)
        yield _surprise_fact(found.gap)
    if found.repetition is not None:
        yield _quality_fact(found.repetition)
    if found.looping is not None and found.looping.rose:
        yield _looping_fact(found.looping)
    if found.template is not None and found.template.is_other:
        yield _template_fact(found.template)
    if found.first is not None:
        yield _first_fact(found.first)
    yield from (_slice_fact(one) for one in found.slices)
    if found.age is not None:
        yield from _age_facts(found.age)
    if found.load is not None and found.load.is_slower:
        yield _load_fact(found.load)


def missing(evidence: Evidence, found: Examination) -> Iterator[str]:
    """What would have told more, and how to have it the next time."""
    if not evidence.probes_before:
        yield (
            f"no canary probes from before the change (`driftguard probe init --server SERVER`, then {PROBE})"
        )
    elif not evidence.probes_after:
        yield f"the canary probes have not been replayed since the change ({PROBE})"
    elif found.probes_behaviour == "steady" and not found.probes_cover:
        yield (
            "canary prompts as long, and as much from the prefix cache, as the traffic: those that there are "
            f"do not speak for {100 - 100 * found.probed_part:.0f}% of the requests"
        )
    elif found.probes_behaviour == "too_few":
        yield f"fewer than {probes.MINIMUM_PROMPTS} canary prompts were replayed on both sides of the change"
    if not evidence.captures_before and not evidence.captures_after:
        yield "no captured requests, so that the queries cannot be compared (capture.enabled)"
    elif found.queries is None:
        yield (
            f"fewer than {captured_requests.MINIMUM_SAMPLE} captured requests of a changed segment on one "
            "side of the change, so that the queries cannot be compared"
        )
    if evidence.missing_scores is not None:
        yield f"captured requests could not be scored: {_NOT_SCORED[evidence.missing_scores]}"
    if found.gap is not None and found.gap.rules_disagree(found.towards):
        yield (
            "the rule by which the engine keeps draft tokens (engines.acceptance_rule): by each of two the "
            "serving gap says something else"
        )
    needless = ("drafted_per_step",) if found.positions == "all" else OF_K
    untold = [configuration.NAMES[name] for name in found.settings.untold if name not in needless]
    if untold:
        few = min(len(evidence.before), len(evidence.after)) < configuration.LEAST_REQUESTS
        yield ", ".join(untold) + (": too few records" if few else f": {_UNTOLD}")


_NOT_SCORED: Final[dict[MissingScores, str]] = {
    "not_registered": "the settings name no engine of this server, whose models are unknown (engines)",
    "engine_silent": "the engine did not say which models it serves",
    "no_draft_model": "the draft is none that is run here",
    "not_here": "the directory of the target or of this draft version is not known, or may not be read, or "
    "it or torch is not on this machine",
    "typical": "the engine keeps draft tokens by typical acceptance, so that answers are not the target's "
    "own (engines.acceptance_rule)",
    "too_few": "fewer than 10 on one side of the change have counts, the temperature, and K or counts per "
    "position in their record, and this draft version",
    "timeout": "the time was too short (diagnosis.score_seconds)",
    "failed": "the scoring process failed; the log of the sidecar says how",
    "interrupted": "the sidecar was stopped while it scored them",
}
_TOO_FEW_PROMPTS: Final = "show no move, but are too few to exclude one"
_VERBS: Final[dict[Behaviour | Literal["none"], str]] = {
    "moved": "moved with the traffic",
    "moved_less": "moved, by less than the traffic",
    "steady": "did not move",
    "unclear": "do not tell: too noisy",
    "too_few": "are too few to tell",
    "none": "are missing",
}


def _warm_fact(change: ProbeChange, behaviour: Behaviour | Literal["none"]) -> Fact:
    text = (
        f"the same prompts, asked again from the prefix cache, {_VERBS[behaviour]}: {change.before:.2f} "
        f"before, {change.after:.2f} now (change {change.difference.in_words})"
    )
    numbers: dict[str, Number] = {"before": change.before, "after": change.after}
    return Fact("probes", text, {"prompts": change.prompts, **numbers, **_numbers(change.difference)})


def _probe_fact(change: ProbeChange, behaviour: Behaviour | Literal["none"]) -> Fact:
    text = (
        f"canary probes {_VERBS[behaviour]}: {change.before:.2f} before, {change.after:.2f} now over "
        f"{change.prompts} prompts (change {change.difference.in_words})"
    )
    if change.is_counted_differently:
        text += (
            f"; {change.lengths_changed} of {change.lengths_compared} prompts have other lengths in tokens, "
            "so that another template or tokenizer is applied to them"
        )
    elif change.is_answered_differently:
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
            "lengths_changed": change.lengths_changed,
            "lengths_compared": change.lengths_compared,
            "first_position_before": change.first_before,
            "first_position_after": change.first_after,
        },
    )


def _setting_fact(change: FieldChange, found: Examination) -> Fact:
    name = configuration.NAMES[change.field]
    shift = f"went from {change.before} to {change.after}"
    if change.before == change.after:
        shift = f"moved, though {change.before} stays its most common value"
    numbers = {"p_value": change.p_value, "distance": change.distance}
    if change.field in OF_K and found.positions != "all":
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
        shown = "look as before"
        if moved is None:
            leans = change.p_value <= LOOKS_AS_BEFORE
            shown = "show no move, but do not exclude one" if leans else _TOO_FEW_PROMPTS
        text = f"prompts of {names} {shown} (p = {change.p_value:.3f}; {counts})"
    else:
        like = f"like {change.nearest}" if change.nearest != captured_requests.NEW_TOPIC else "a new topic"
        text = f"prompts of {names} moved (p = {change.p_value:.3f}; {counts}): {like}"
    text += "; requests of one conversation count as one"
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


def _alike_fact(alike: LikeWithLike, found: Examination) -> Fact:
    still = alike.change.low <= 0.0 <= alike.change.high
    verb = {
        "fell": "moved with the traffic",
        "kept": "did not move" if still else "moved, by less than the traffic",
        "unclear": "do not tell: too noisy",
        "none": "are missing",
    }[found.alike_outcome]
    text = (
        f"captured requests that look as before {verb}: change {alike.change.in_words} over {alike.compared}"
    )
    return Fact("queries", text, {"compared": alike.compared, **_numbers(alike.change)})


def _gap_fact(gap: ServingGap, found: Examination) -> Fact:
    verb = {
        "opened": "opened",
        "opened_less": "opened, by a part of the move",
        "steady": "did not open",
        "unclear": "does not tell: too noisy",
        "none": "is missing",
    }[found.gap_behaviour]
    if found.gap_behaviour == "unclear" and gap.rules_disagree(found.towards):
        verb = "depends on the rule of the engine, which is not known"
    text = (
        f"the serving gap {verb}: of captured requests the server accepted {gap.served_before:.2f} before "
        f"and {gap.served_after:.2f} since, target and draft account for {gap.offline_before:.2f} and "
        f"{gap.offline_after:.2f}{_by_match(gap)} ({gap.requests_before} and {gap.requests_after} scored; "
        f"change of the gap {gap.opened.in_words})"
    )
    numbers: dict[str, Number] = {
        "served_before": gap.served_before,
        "served_after": gap.served_after,
        "offline_before": gap.offline_before,
        "offline_after": gap.offline_after,
        "requests_before": gap.requests_before,
        "requests_after": gap.requests_after,
    }
    return Fact("serving gap", text, {**numbers, **_numbers(gap.opened)})


def _by_match(gap: ServingGap) -> str:
    """Where the engine's rule is not known, what the other one would account for."""
    if gap.by_match is None:
        return ""
    before, after = gap.by_match.offline_before, gap.by_match.offline_after
    return f" by rejection sampling, or for {before:.2f} and {after:.2f} if the likeliest token is drafted"


def _surprise_fact(gap: ServingGap) -> Fact:
    if gap.answers_are_others:
        verb = "are not the registered target's own any more"
    elif gap.answers_are_own:
        verb = "are the registered target's as before"
    else:
        verb = "are too few to tell whether they are still the registered target's"
    change = gap.surprise
    text = (
        f"the captured answers {verb}: their surprise changed by {change.low:+.2f} to {change.high:+.2f} "
        "nats per token at 99%"
    )
    return Fact("target", text, _numbers(change))


def _looping_fact(change: Looping) -> Fact:
    text = (
        f"{100 * change.after:.0f}% of the answers are long and guessed nearly without error, "
        f"{100 * change.before:.0f}% before (change {change.change.in_words})"
    )
    return Fact("quality", text, {"before": change.before, "after": change.after, **_numbers(change.change)})


def _template_fact(change: Template) -> Fact:
    text = (
        f"of the tokens in nearly all prompts of each of {change.segments} segments {len(change.vanished)} "
        f"vanished and {len(change.new)} are new"
    )
    return Fact("template", text, {"vanished": len(change.vanished), "new": len(change.new)})


def _first_fact(first: FirstPosition) -> Fact:
    text = (
        f"acceptance at position 1 was {first.before:.2f} and is {first.after:.2f} (change "
        f"{first.change.in_words}); it kept its level in {first.kept} of {first.segments} segments"
    )
    numbers: dict[str, Number] = {"before": first.before, "after": first.after, "segments": first.segments}
    return Fact("position 1", text, {**numbers, "kept": first.kept, **_numbers(first.change)})


def _slice_fact(one: Slices) -> Fact:
    name = slices.NAMES[one.of]
    unit = "{:.0%}" if one.of == "cached_share" else "{:.0f} tokens"
    text = (
        f"by {name}: change {one.low.in_words} up to {unit.format(one.low_to)}, {one.high.in_words} from "
        f"{unit.format(one.high_from)} on (difference {one.more.in_words})"
    )
    if one.traffic_moved:
        text += "; the traffic itself changed in this, so that other requests are compared"
    numbers: dict[str, Number] = {"low_to": one.low_to, "high_from": one.high_from}
    numbers |= {"low_change": one.low.change, "high_change": one.high.change, **_numbers(one.more)}
    return Fact("slices", text, {"of": one.of, **numbers})


def _age_facts(age: ServerAge) -> Iterator[Fact]:
    if age.restarted:
        yield Fact(
            "server", "the server was restarted between the last request before and the first after", {}
        )
    told = (
        ("in the oldest third of a run of the server, against the youngest", age.aged),
        ("after a restart of the server, against right before it", age.cured),
        ("of the canary probes at an old server, against a young one, before the change", age.probes_aged),
    )
    for what, change in told:
        if change is not None:
            text = f"acceptance {what}: change {change.in_words}"
            yield Fact("server", text, {"runs": age.runs, **_numbers(change)})


def _load_fact(change: Load) -> Fact:
    rose = {True: "the concurrency rose", False: "no rise of the concurrency is shown", None: ""}
    told = rose[change.concurrency_rose]
    if change.queue_rose:
        told = f"{told}; " * bool(told) + "more requests wait in the queue"
    text = f"a verification step takes {change.factor:.2f} times as long" + (f"; {told}" if told else "")
    return Fact("load", text, {"factor": change.factor, "p_value": change.slower.p_value})


def _numbers(change: Difference) -> dict[str, Number]:
    return {"change": change.change, "low": change.low, "high": change.high, "p_value": change.p_value}
