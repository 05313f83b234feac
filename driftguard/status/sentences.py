"""One sentence for people about one stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from driftguard.cost.best_action import Action, best_of
from driftguard.cost.payoff import load_text
from driftguard.incidents.message import being_done, clock, cost_percent, over_in, some
from driftguard.records.documents.acceptance import from_to
from driftguard.records.documents.goodput import GoodputChange
from driftguard.records.documents.incident import names_of, positions_of
from driftguard.records.positions import ACCEPTANCE
from driftguard.status.staleness import Newest, clock_difference
from driftguard.status.stream_status import StreamStatus
from driftguard.store.streams import RELEARNING
from driftguard.store.tables import HeldStream, Incident

DRAFTING: Final = (  # verdicts of streams that draft now
    "degraded",
    "speculation_loses",
    "improved",
    "watching",
    "insufficient_data",
    "relearning",
    "steady",
)


def with_text(found: StreamStatus, incident: Incident | None) -> StreamStatus:
    """Whether speculation pays is said here only where it loses; else it stands beside the sentence."""
    text = _sentence(found, incident)
    told = _best(found.actions)
    text = f"{text} {told[0].upper()}{told[1:]}." if told else text
    if found.speculation is not None and found.speculation.state == "loses" and found.verdict in DRAFTING:
        first = found.verdict == "speculation_loses"
        text = f"{found.speculation.text} {text}" if first else f"{text} {found.speculation.text}"
    return replace(found, text=text)


def set_aside_sentence(held: HeldStream) -> str:
    return (
        f"Cannot be judged since {clock(held.since)}: the detector failed {held.failures} times at its "
        f"records ({held.reason}). {held.records_behind:,} of them wait, until retention drops them. "
        "They are read again when another version of DriftGuard starts, or on request, on the stream's web "
        f"page or with `driftguard streams retry {held.stream_id}`."
    )


def stale(found: StreamStatus, newest: Newest) -> StreamStatus:
    """The verdict is not known any more, whatever it was; the incident stays."""
    text = f"Stale: no record from {found.stream.server} arrived after {clock(newest.arrived_at)}"
    if difference := clock_difference(newest):
        text += f"; the newest ended at {clock(newest.ended_at)} by its own clock: {difference}"
    text += f". Before that: {found.text}"
    return replace(found, verdict="stale", since=newest.arrived_at, text=text)


def with_clock(found: StreamStatus, newest: Newest) -> StreamStatus:
    difference = clock_difference(newest)
    if difference is None:
        return found
    told = (
        f"The newest record from {found.stream.server} arrived at {clock(newest.arrived_at)} and ended at "
        f"{clock(newest.ended_at)} by its own clock: {difference}."
    )
    return replace(found, text=f"{found.text} {told}")


def _best(found: Sequence[Action]) -> str | None:
    """None where there is nothing to do, or nothing that is sure."""
    best = best_of(found) if found else None
    if best is None or best.kind == "nothing" or best.under_way:
        return None
    return f"best now: {best.sentence}"


def _sentence(found: StreamStatus, incident: Incident | None) -> str:
    if found.verdict == "replaced" and found.target_in_service != found.stream.target:
        return f"No longer in service: {found.stream.server} serves {found.target_in_service}."
    if found.verdict == "replaced":
        return f"No longer in service: {found.stream.server} runs draft {found.draft_in_service}."
    if found.verdict == "drafting_stopped":
        return "Drafting has stopped: the newest requests had no draft tokens."
    if incident is not None:
        return _incident_sentence(incident)
    if found.stream.method == "none":
        return "Requests without speculation: there is no acceptance to watch."
    if found.acceptance_verdict == "watching":
        return _watching_sentence(found)
    if found.acceptance_verdict in ("insufficient_data", "relearning"):
        return _learning_sentence(found)
    rates = f"{ACCEPTANCE[found.now.positions]} {found.now.rate:.2f}" if found.now else "acceptance not known"
    is_off = found.now and found.baseline and not found.now.is_at(found.baseline.rate)
    told = "No alarm, but off the baseline" if is_off else "Steady"
    told += f": {rates}" + (f", baseline {found.baseline.rate:.2f}." if found.baseline else ".")
    if found.recovery is not None:
        told += f" Draft {found.stream.draft_version} is being watched: {found.recovery}."
    learning = [segment.segment for segment in found.segments if segment.learning]
    return f"{told} Not watched yet: {some(learning)}." if learning else told


def _learning_sentence(found: StreamStatus) -> str:
    so_far = f"{_counted(found.sample_size, found.unit)} so far"
    if missing := found.requests_missing:  # none before the detector has looked at the stream
        verb = "is" if missing == 1 else "are"
        so_far += f"; at least {missing} more {verb} needed before a change can be detected"
    so_far += "."
    begun_at, because = found.stream.begun_anew_at, found.stream.begun_anew_because
    if begun_at is None or because is None:
        return f"Insufficient data: {so_far}"
    if found.acceptance_verdict == "relearning":
        return f"Relearning since {clock(begun_at)}: the detector's state was {RELEARNING[because]}. {so_far}"
    return f"Insufficient data since {clock(begun_at)}: {RELEARNING[because]}. {so_far}"


def _watching_sentence(found: StreamStatus) -> str:
    """The draft was promoted, and the detector has no baseline of its own for it yet."""
    since = f" since its promotion {clock(found.promoted_at)}" if found.promoted_at else ""
    told = f"Watching draft {found.stream.draft_version}{since}: {found.recovery or 'no request yet'}."
    if not found.requests_missing:
        return told
    missing = _counted(found.requests_missing, f"more {found.unit}")
    return f"{told} At least {missing} to a baseline of its own."


def _counted(number: int, plural: str) -> str:
    return f"{number} {plural.removesuffix('s') if number == 1 else plural}"


def _incident_sentence(incident: Incident) -> str:
    seen = "acknowledged" if incident.state == "acknowledged" else None
    done = "; ".join(told for told in (seen, being_done(incident)) if told)
    doing = f" {done[0].upper()}{done[1:]}." if done else ""
    if (goodput := incident.evidence.goodput) is not None:
        return f"{_goodput_sentence(incident, goodput)}{doing}"
    names = some(names_of(incident.segments))
    word, verb = ("Degraded", "fell") if incident.direction == "down" else ("Improved", "rose")
    acceptance = ACCEPTANCE[positions_of(incident.segments)]
    percent = cost_percent(incident)
    cost = (
        f", about {percent:.0f}% slower" if incident.direction == "down" and percent and percent > 0 else ""
    )
    return (
        f"{word} since {clock(incident.change_point_at)}: {acceptance} in {names} {verb} from "
        f"{from_to(incident.acceptance_before, incident.acceptance_after)}{cost}.{over_in(incident)}{doing}"
    )


def _goodput_sentence(incident: Incident, goodput: GoodputChange) -> str:
    since, load = clock(incident.change_point_at), load_text(goodput.concurrency)
    levels = from_to(incident.acceptance_before, incident.acceptance_after)
    if goodput.kind == "speculation_loses":
        return f"Slower with speculation {load} since {since}; acceptance {levels}."
    slower = incident.evidence.slowdown or goodput.lost
    return f"Degraded since {since}: tokens come {slower:.0%} slower {load}; acceptance {levels}."
