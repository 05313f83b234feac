"""`driftguard incidents`: list, show, acknowledge, resolve, accept the new level, take as usual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any
from uuid import UUID

import typer

from driftguard.cli.lists import print_list
from driftguard.cli.options import (
    DEFAULT_SIDECAR,
    AsJson,
    Cursor,
    Limit,
    OfSegment,
    OfServer,
    OfStream,
    OfTarget,
    Sidecar,
    Since,
    Until,
)
from driftguard.cli.output import print_facts, print_text, time_of
from driftguard.records.documents.acceptance import from_to
from driftguard.records.documents.diagnosis import for_server
from driftguard.records.documents.incident import told_as

commands = typer.Typer(no_args_is_help=True, help="List, show, acknowledge and resolve incidents.")
PATH = "/api/v1/incidents"

IncidentId = Annotated[UUID, typer.Argument(metavar="ID", help="Of an incident; `incidents list` has them.")]


@commands.command("list")
def list_incidents(
    state: Annotated[
        str | None,
        typer.Option(
            metavar="STATE",
            help="open, acknowledged, mitigating, recovered_in_part, resolved; unresolved: any but the last.",
        ),
    ] = None,
    server: OfServer = None,
    target: OfTarget = None,
    segment: OfSegment = None,
    stream: OfStream = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    sidecar: Sidecar = DEFAULT_SIDECAR,
    as_json: AsJson = False,
) -> None:
    """List incidents, the newest first."""
    query = {
        "state": state, "server": server, "target": target, "segment": segment, "stream": stream,
        "since": since, "until": until, "limit": limit, "cursor": cursor,
    }  # fmt: skip

    def row(one: dict[str, Any]) -> Sequence[object]:
        return (
            one["id"],
            one["state"],
            one["severity"],
            time_of(one["opened_at"]),
            one["stream"]["server"],
            one["summary"],
        )

    heads = ("ID", "STATE", "SEVERITY", "OPENED", "SERVER", "SUMMARY")
    print_list(sidecar, PATH, query, as_json, heads, row, "incidents")


@commands.command("show")
def show_incident(
    incident_id: IncidentId, sidecar: Sidecar = DEFAULT_SIDECAR, as_json: AsJson = False
) -> None:
    """Show one incident: where, why, what to do, what happened."""
    from driftguard.cli.sidecar_client import call

    answer = call("GET", sidecar, f"{PATH}/{incident_id}")
    if as_json:
        print(answer.text)
    else:
        print_incident(answer.found, sidecar)


def print_incident(incident: dict[str, Any], sidecar: str) -> None:
    from driftguard.cli.sidecar_client import without_password

    diagnosis, cause = incident["diagnosis"] or {}, "not known yet"
    if diagnosis:
        cause = f"{diagnosis['summary']} ({diagnosis['confidence']} confidence)"
    print_text(incident["summary"])
    print()
    print_facts(
        {
            "id": incident["id"],
            "state": f"{incident['state']} ({incident['severity']})",
            "server": incident["stream"]["server"],
            "stream": incident["stream"]["id"],
            "since": time_of(incident["since"]),
            "opened": time_of(incident["opened_at"]),
            "resolved": time_of(incident["resolved_at"]),
            "segments": ", ".join(map(_levels, incident["segments"])),
            **_cost(incident["cost_percent"]),
            "cause": cause,
            "because": diagnosis.get("reason"),
            "to do": for_server(diagnosis.get("recommended_action", ""), incident["stream"]["server"])
            or None,
            "afterwards": incident["aftermath"] and incident["aftermath"]["text"],
            "page": f"{without_password(sidecar).rstrip('/')}/incidents/{incident['id']}",
        }
    )
    if incident["actions"]:
        print("\nWhat could be done:")
        for action in incident["actions"]:
            print_text(f"{'*' if action['best'] else '-'} {action['sentence']}", "  ")
            if action["command"]:
                print_text(action["command"], "      ")
    print("\nWhat happened:")
    for step in incident["transitions"]:
        became = told_as(step["from_state"], step["to_state"], step["severity"])
        print_text(f"{time_of(step['at'])}  {became}: {step['reason']}", "  ")
    if incident["notifications"]:
        print("\nWho was told:")
    for told in incident["notifications"]:
        gone = "" if told.get("in_settings", True) else ", and not in the settings of this sidecar"
        outcome = (
            f"delivered {time_of(told['delivered_at'])}" if told["delivered_at"] else f"not delivered{gone}"
        )
        error = f", last error: {told['last_error']}" if told["last_error"] else ""
        print_text(f"{told['destination']}: {told['event']}, {outcome}{error}", "  ")


def _levels(segment: dict[str, Any]) -> str:
    """As they were tested, which the summary tells; where nothing was tested, as counted."""
    tested = segment.get("adjusted")
    before, after = (
        (tested["before"], tested["after"])
        if tested
        else (segment["before"]["rate"], segment["after"]["rate"])
    )
    return f"{segment['segment']} {from_to(before, after)}"


def _cost(percent: float | None) -> dict[str, str]:
    if percent is None:
        return {}
    return {"slower by" if percent >= 0 else "faster by": f"{abs(percent):.0f}%"}


Reason = Annotated[str, typer.Option(help="Why; it is stored with the incident.")]


def _decide(
    incident_id: UUID,
    what: str,
    reason: str,
    sidecar: str,
    as_json: bool,
    told: Callable[[dict[str, Any]], str] = lambda incident: f"is {incident['state']}",
) -> None:
    """Sends a person's decision. told: what became of the incident, in a few words."""
    from driftguard.cli.sidecar_client import call

    answer = call("POST", sidecar, f"{PATH}/{incident_id}/{what}", {"reason": reason})
    print(answer.text if as_json else f"{answer.found['id']} {told(answer.found)}")


def _segments(incident: dict[str, Any]) -> str:
    return ", ".join(segment["segment"] for segment in incident["segments"])


@commands.command()
def acknowledge(
    incident_id: IncidentId, reason: Reason, sidecar: Sidecar = DEFAULT_SIDECAR, as_json: AsJson = False
) -> None:
    """Say that a person looks at an incident."""
    _decide(incident_id, "acknowledge", reason, sidecar, as_json)


@commands.command()
def resolve(
    incident_id: IncidentId, reason: Reason, sidecar: Sidecar = DEFAULT_SIDECAR, as_json: AsJson = False
) -> None:
    """End an incident; the next change opens another one."""
    _decide(incident_id, "resolve", reason, sidecar, as_json)


@commands.command()
def accept(
    incident_id: IncidentId, reason: Reason, sidecar: Sidecar = DEFAULT_SIDECAR, as_json: AsJson = False
) -> None:
    """Take the new level as normal, and learn it anew."""

    def told(incident: dict[str, Any]) -> str:
        learned = f"the baseline of {_segments(incident)} will be learned anew with the next record"
        return f"is resolved; {learned}"

    _decide(incident_id, "accept", reason, sidecar, as_json, told)


@commands.command()
def usual(
    incident_id: IncidentId, reason: Reason, sidecar: Sidecar = DEFAULT_SIDECAR, as_json: AsJson = False
) -> None:
    """Take as usual what repeats an earlier incident."""

    def told(incident: dict[str, Any]) -> str:
        cycle = incident["evidence"]["repeats"]["cycle"]
        return f"is resolved; {_segments(incident)} is expected to change so every {cycle}"

    _decide(incident_id, "usual", reason, sidecar, as_json, told)
