"""The parts of dashboards about streams: names, verdicts, servers, and marks on the time axis."""

from __future__ import annotations

from typing import Final

from dashboards import colours, frame, panels, promql, words
from dashboards.promql import is_

LABELS: Final = ("server", "target", "draft_version", "method")
INCIDENT: Final = (*LABELS, "direction", "severity")
NAME: Final = "{{server}} {{draft_version}} {{method}}"
HEADINGS: Final = {
    "server": "Server",
    "target": "Target",
    "draft_version": "Draft version",
    "method": "Method",
}
TRAFFIC: Final = 'kind!="probe"'  # canary probes are not traffic
SPECULATING: Final = 'method!="none"'  # requests without speculation have a stream of their own
UNSPECULATED: Final = {"displayName": "without speculation"}  # for such a stream, called "none none"


def link() -> panels.Properties:
    """A link from a table's row to its stream."""
    place = "&".join(f"var-{name}=${{__data.fields.{name}:percentencode}}" for name in ("server", "target"))
    address = frame.address(frame.STREAM, "job", "instance")
    return panels.link("Open the stream", f"{address}&{place}&${{__url_time_range}}")


def verdicts(*matchers: str) -> str:
    """Per stream the rank of its verdict."""
    ranks = words.names(words.VERDICTS)
    return promql.ranked("driftguard_stream_verdict", "verdict", ranks, SPECULATING, *matchers, by=LABELS)


def of_the_worst(expression: str) -> str:
    """Of the streams with the worst verdicts. `expression`: with one series for each stream."""
    return promql.largest(expression, of=f"-1 * {verdicts()}", by=LABELS)


def conditions(*matchers: str) -> str:
    """Per scraped server the rank of its condition."""
    ranks, by = words.names(words.CONDITIONS), ("source", "kind")
    return promql.ranked("driftguard_source_condition", "condition", ranks, *matchers, by=by)


def acceptance(*matchers: str, by: tuple[str, ...] = LABELS) -> str:
    accepted, drafted = "driftguard_accepted_tokens_total", "driftguard_draft_tokens_total"
    return promql.ratio(accepted, drafted, TRAFFIC, *matchers, by=by)


def baseline(*matchers: str, by: tuple[str, ...] = LABELS) -> str:
    """The baselines of the segments, weighted by their current draft tokens."""
    of = (*LABELS, "segment")
    drafted = promql.summed_rate("driftguard_draft_tokens_total", TRAFFIC, *matchers, by=of)
    known = promql.gauge("driftguard_acceptance_baseline_ratio", *matchers, by=of)
    over = ", ".join(by)
    watched = f"sum by ({over}) ({drafted} and {known})"
    return f"sum by ({over}) ({known} * {drafted}) / ({watched} > 0)"


def change_points(*matchers: str) -> frame.Annotation:
    at = promql.gauge("driftguard_incident_change_point_timestamp_seconds", *matchers, by=INCIDENT)
    return frame.annotation(
        "Change points",
        f"1000 * {at}",
        colour=colours.BAD,
        title="Change: {{direction}}",
        text=NAME,
        value_is_time=True,
    )


def incidents(*matchers: str) -> frame.Annotation:
    degraded = promql.gauge("driftguard_stream_verdict", is_("verdict", "degraded"), *matchers, by=LABELS)
    return frame.annotation(
        "Incidents", f"{degraded} == 1", colour=colours.WARNING, title="Degraded", text=NAME
    )


def promotions(*matchers: str) -> frame.Annotation:
    since = promql.gauge(
        "driftguard_draft_in_service_since_timestamp_seconds",
        *matchers,
        by=("server", "target", "draft_version"),
    )
    return frame.annotation(
        "Drafts put into service",
        f"1000 * {since}",
        colour=colours.GOOD,
        title="Draft {{draft_version}} put into service",
        text="{{server}}, {{target}}",
        value_is_time=True,
    )
