"""What is said about an incident: one sentence for people, one document for machines."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec

from driftguard.cost.best_action import Action, best_of
from driftguard.cost.payoff import load_text
from driftguard.detection.findings import duration
from driftguard.incidents import aftermath, remedy
from driftguard.records.documents.acceptance import from_to
from driftguard.records.documents.diagnosis import for_server
from driftguard.records.documents.goodput import AcceptanceMove, GoodputChange
from driftguard.records.documents.incident import IncidentDiagnosis, names_of, over_by_now, positions_of
from driftguard.records.positions import ACCEPTANCE
from driftguard.store.tables import Incident, Stream

# How much earlier than the change point a gradual change may have begun, so that a page says so.
WORTH_TELLING: Final = timedelta(hours=1)
_AT_ONCE: Final = ("speculation_off", "another_k", "roll_back")
_UNKNOWN = "unknown"  # what a record calls a draft or method of which its source does not tell


def permalink(external_url: str, incident_id: UUID) -> str:
    return f"{external_url.rstrip('/')}/incidents/{incident_id}"


def clock(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def cost_percent(incident: Incident) -> float | None:
    """Tokens per second lost, in percent: measured where it could be, else by formula; negative is a gain."""
    slowdown = incident.evidence.slowdown
    return None if slowdown is None else round(100.0 * slowdown, 1)


def summary(incident: Incident, stream: Stream) -> str:
    """Since when, where, how bad and what it costs, in one sentence; and why, in another. Of one that is
    resolved also how long it lasted, when it was detected and mitigated, and what it cost."""
    if incident.evidence.goodput is not None:
        text = _goodput(incident, stream, incident.evidence.goodput)
        return f"{text}{_raised(incident)}{_why(incident, stream.server)}{_over(incident)}"
    verb = "fell" if incident.direction == "down" else "rose"
    where = some(names_of(incident.segments))
    acceptance = ACCEPTANCE[positions_of(incident.segments)]
    text = (
        f"{acceptance[0].upper()}{acceptance[1:]} of {_draft(stream)} on {stream.server} {verb} from "
        f"{from_to(incident.acceptance_before, incident.acceptance_after)} since "
        f"{clock(incident.change_point_at)} in segment{'s' if len(incident.segments) > 1 else ''} {where}"
    )
    told = f"{text}{_cost(incident)}.{over_in(incident)}{_gradually(incident)}{_counted(incident)}"
    told += _repeating(incident)
    return f"{told}{_raised(incident)}{_recovered(incident)}{_why(incident, stream.server)}{_over(incident)}"


def some(names: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def over_in(incident: Incident) -> str:
    """For example: It is over in german by now. Of one that is not over."""
    over = names_of(over_by_now(incident.segments))
    return f" It is over in {some(over)} by now." if over and incident.state != "resolved" else ""


def _over(incident: Incident) -> str:
    found = aftermath.of(incident)
    return f" {found.text}" if found else ""


def _goodput(incident: Incident, stream: Stream, goodput: GoodputChange) -> str:
    """For example: Tokens of draft v2 (eagle) on chat come 30% slower at 9 to 16 requests at once since ..:
    28.9 tokens/s, 41.2 before. Acceptance did not move: 0.86 before, 0.87 now."""
    load, since = load_text(goodput.concurrency), clock(incident.change_point_at)
    before, after = incident.tokens_per_second_before, incident.tokens_per_second_after
    if goodput.kind == "speculation_loses":
        factor = goodput.factor
        times = f" ({factor.value:.2f} times, {factor.low:.2f} to {factor.high:.2f})" if factor else ""
        without = after / factor.value if after and factor else None
        speeds = f": {after:.1f} tokens/s, {without:.1f} without{times}" if after and without else times
        text = f"Speculation of {_draft(stream)} on {stream.server} loses {load} since {since}{speeds}."
        if (also := goodput.further) is not None:
            at = load_text(also.concurrency)
            text += f" Since {clock(also.at)} tokens also come {also.lost:.0%} slower {at}."
    else:
        slower = incident.evidence.slowdown or goodput.lost
        further = f", and still slower since {clock(goodput.further.at)}" if goodput.further else ""
        speeds = f": {after:.1f} tokens/s, {before:.1f} before" if before and after else ""
        text = (
            f"Tokens of {_draft(stream)} on {stream.server} come {slower:.0%} slower at the same load "
            f"({load}) since {since}{further}{speeds}."
        )
    levels = f"{incident.acceptance_before:.2f} before, {incident.acceptance_after:.2f} now"
    return f"{text} {_MOVED[goodput.acceptance]}: {levels}."


_MOVED: Final[dict[AcceptanceMove, str]] = {
    "none": "Acceptance did not move",
    "fell": "Acceptance fell",
    "rose": "Acceptance rose",
    "not_shown": "No move of acceptance is shown",
}


def _draft(stream: Stream) -> str:
    """As far as it is known: the metrics of most engines do not name it."""
    if stream.draft_version == _UNKNOWN:
        return "the draft"
    return f"draft {stream.draft_version}" + ("" if stream.method == _UNKNOWN else f" ({stream.method})")


def _gradually(incident: Incident) -> str:
    """For example: It may have begun gradually, 2026-11-20 04:10 UTC at the earliest: that cannot be told
    yet."""
    told = incident.evidence.gradual
    if told is None:
        return ""
    if told.certain:
        return f" {told.text[0].upper()}{told.text[1:]}."
    if incident.change_point_at - told.interval[0] < WORTH_TELLING:
        return ""
    first = f"{told.interval[0]:%Y-%m-%d %H:%M} UTC"
    return f" It may have begun gradually, {first} at the earliest: that cannot be told yet."


def _counted(incident: Incident) -> str:
    """For example: Plain counts say 0.61 to 0.62, because answers are shorter; the numbers before compare
    like with like."""
    told = incident.evidence.adjusted
    if told is None or not told.counted_differs:
        return ""
    counted = from_to(told.counted_before, told.counted_after)
    why = f", because {' and '.join(told.because)}" if told.because else ""
    return f" Plain counts say {counted}{why}; the numbers before compare like with like."


def _repeating(incident: Incident) -> str:
    """For example: It looks like that of Saturday 2026-11-14 00:31 UTC, which lasted 2.1 days: it pages
    nobody unless it lasts longer, costs more or spreads. Is it usual on Saturdays?"""
    told = incident.evidence.repeats
    if told is None or told.differs is not None or told.usual:
        return ""
    lasted = duration((told.until - told.since).total_seconds())
    asked = "" if incident.state == "resolved" else f" Is it usual {told.when}?"
    only = "it pages nobody unless it lasts longer, costs more or spreads"
    return f" It looks like {told.name}, which lasted {lasted}: {only}.{asked}"


def _raised(incident: Incident) -> str:
    """For example: Now critical: the changed segments have become about 24% slower (measured)."""
    because = incident.evidence.raised_because
    return f" Now {incident.severity}: {because}." if because else ""


def _why(incident: Incident, server: str) -> str:
    """For example: Likely cause: the traffic moved (medium confidence); a new draft is being trained."""
    best = best_of(remedy.of_incident(incident))
    over = incident.state == "resolved"
    if incident.diagnosis is None and over and not incident.awaits_examination:
        return " It was over before its cause was examined."
    if incident.diagnosis is None:
        at_once = best.kind in _AT_ONCE and incident.direction != "up" and not over
        told = f" Best now: {best.sentence}." if at_once else ""
        return f" Its cause has not been examined yet.{told}"
    known = incident.diagnosis
    action = "" if over else f"; {_action(incident, known, best, server)}"
    if known.cause == "unknown":
        return f" {known.summary[0].upper()}{known.summary[1:]}{action}."
    of_first = " of what changed first" if incident.evidence.outgrew_cause else ""
    return f" Likely cause{of_first}: {known.summary} ({known.confidence} confidence){action}."


def _action(incident: Incident, known: IncidentDiagnosis, best: Action, server: str) -> str:
    """What holds at once and is measured is told before what the cause calls for."""
    if best.kind in _AT_ONCE and incident.direction != "up":
        return f"best now: {best.sentence}"
    return being_done(incident) or for_server(known.recommended_action, server)


def being_done(incident: Incident) -> str | None:
    """What a retraining does about it at the moment; None where none is under way."""
    if not incident.is_left_to_retraining:
        return None
    mitigation = incident.evidence.mitigation
    if mitigation is None:
        return "a new draft is being trained"
    return f"the new draft {mitigation.draft_version} is in service and being watched"


def _recovered(incident: Incident) -> str:
    """For example: Recovered in part: draft v2 promoted: acceptance of german recovered to 0.53 from 0.39,
    was 0.62: 15% below, over 29 requests."""
    mitigation = incident.evidence.mitigation
    if incident.state == "resolved" or mitigation is None or mitigation.recovered is None:
        return ""
    return f" Recovered in part: {mitigation.recovered}."


def _cost(incident: Incident) -> str:
    percent = cost_percent(incident)
    if percent is None:
        return ""
    measured = incident.evidence.slowdown_measured is not None
    change = "slower" if percent >= 0 else "faster"
    return f"; about {abs(percent):.0f}% {change} ({'measured' if measured else 'by formula'})"


def document(incident: Incident, stream: Stream, event: str, external_url: str) -> dict[str, Any]:
    """The body of a webhook: every fact of the incident."""
    return {
        "event": event,
        "url": permalink(external_url, incident.id),
        "summary": summary(incident, stream),
        "stream": {
            "id": stream.id,
            "server": stream.server,
            "target": stream.target,
            "draft": stream.draft,
            "draft_version": stream.draft_version,
            "method": stream.method,
        },
        "incident": {
            "id": str(incident.id),
            "state": incident.state,
            "direction": incident.direction,
            "severity": incident.severity,
            "opened_at": incident.opened_at.isoformat(),
            "since": incident.change_point_at.isoformat(),
            "since_interval": [incident.interval_start_at.isoformat(), incident.interval_end_at.isoformat()],
            "acceptance_before": incident.acceptance_before,
            "acceptance_after": incident.acceptance_after,
            "positions": positions_of(incident.segments),
            "tokens_per_second_before": incident.tokens_per_second_before,
            "tokens_per_second_after": incident.tokens_per_second_after,
            "cost_percent": cost_percent(incident),
            "segments": msgspec.to_builtins(incident.segments),
            "evidence": msgspec.to_builtins(incident.evidence),
            "actions": [
                {**msgspec.to_builtins(action), "sentence": action.sentence}
                for action in remedy.of_incident(incident)
            ],
            "diagnosis": _diagnosis(incident.diagnosis),
            "resolved_at": incident.resolved_at.isoformat() if incident.resolved_at else None,
            "resolution": incident.resolution,
            "aftermath": msgspec.to_builtins(aftermath.of(incident)),
        },
    }


def _diagnosis(diagnosis: IncidentDiagnosis | None) -> dict[str, Any] | None:
    if diagnosis is None:
        return None
    return {**msgspec.to_builtins(diagnosis), "diagnosed_at": diagnosis.diagnosed_at.isoformat()}
