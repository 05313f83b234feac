"""`driftguard runs`: retraining runs: list, show, start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any
from uuid import UUID

import typer

from driftguard.cli.lists import print_list
from driftguard.cli.options import (
    DEFAULT_SIDECAR,
    AsJson,
    Cursor,
    Limit,
    OfServer,
    OfTarget,
    Sidecar,
    Since,
    Until,
    Yes,
    confirm,
)
from driftguard.cli.output import number, print_facts, print_table, print_text, time_of

commands = typer.Typer(no_args_is_help=True, help="List, show and start retraining runs.")
PATH = "/api/v1/retrain-runs"

Retrained = Annotated[
    str | None,
    typer.Option(help="Server whose draft to retrain; needed when the settings name several engines."),
]
Force = Annotated[bool, typer.Option("--force", help="Retrain even when no incident calls for it.")]


@commands.command("list")
def list_runs(
    state: Annotated[
        str | None,
        typer.Option(
            metavar="STATE",
            help="promoted, rejected, failed, watching, ...; or running: any that has not ended.",
        ),
    ] = None,
    server: OfServer = None,
    target: OfTarget = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    sidecar: Sidecar = DEFAULT_SIDECAR,
    as_json: AsJson = False,
) -> None:
    """List retraining runs, the newest first."""
    query = {
        "state": state, "server": server, "target": target, "since": since, "until": until,
        "limit": limit, "cursor": cursor,
    }  # fmt: skip

    def row(run: dict[str, Any]) -> Sequence[object]:
        return (
            run["id"], _state(run), run["server"], run["trigger"], time_of(run["started_at"]),
            time_of(run["ended_at"]), run["candidate_version"], run["reason"],
        )  # fmt: skip

    heads = ("ID", "STATE", "SERVER", "TRIGGER", "STARTED", "ENDED", "CANDIDATE", "REASON")
    print_list(sidecar, PATH, query, as_json, heads, row, "retraining runs")


def _state(run: dict[str, Any]) -> str:
    progress = run["progress"] or {}
    step = f" {progress['step']}/{progress['steps']}" if {"step", "steps"} <= progress.keys() else ""
    return f"{run['state']}{step}"


@commands.command("show")
def show_run(
    run_id: Annotated[UUID, typer.Argument(metavar="ID", help="Of a run; `runs list` has them.")],
    sidecar: Sidecar = DEFAULT_SIDECAR,
    as_json: AsJson = False,
) -> None:
    """Show one retraining run with its training, its gate and its watch."""
    from driftguard.cli.sidecar_client import call

    answer = call("GET", sidecar, f"{PATH}/{run_id}")
    if as_json:
        print(answer.text)
        return
    run = answer.found
    print_facts(
        {
            "id": run["id"],
            "state": _state(run),
            "reason": run["reason"],
            "server": run["server"],
            "target": run["target"],
            "trigger": run["trigger"],
            "incident": run["incident_id"],
            "started": time_of(run["started_at"]),
            "ended": time_of(run["ended_at"]),
            "parent": run["parent_version"],
            "candidate": run["candidate_version"],
        }
    )
    if lines := [*_training(run["curve"] or {})]:
        print()
        for line in lines:
            print_text(line)
    numbers = run["numbers"] or {}
    if gate := numbers.get("gate"):
        print()
        why = "" if gate["reason"] == run["reason"] else f": {gate['reason']}"
        print_text(f"Gate: {'promote' if gate['promote'] else 'reject'}{why}")
        rows = [
            (
                group["group"],
                group["requests"],
                number(group["parent"], ".3f"),
                number(group["candidate"], ".3f"),
                f"{group['difference']:+.3f} ({group['lower']:+.3f} to {group['upper']:+.3f})",
            )
            for group in gate["groups"]
        ]
        print_table(("SEGMENT", "HELD OUT", "PARENT", "CANDIDATE", "DIFFERENCE"), rows, "no segments")
    if watch := numbers.get("watch"):
        print()
        outcome = run.get("watch_outcome", watch["verdict"])  # an earlier sidecar does not tell it
        told = "ended undecided" if outcome == "undecided" else outcome
        print_text(f"Watch: {told}, over {watch['requests']:,} requests")


def _training(curve: dict[str, Any]) -> Iterator[str]:
    for kind, told in (("training", "Training"), ("held_out", "Held out")):
        if points := curve[kind]["points"] if curve else ():
            first, last = points[0], points[-1]
            yield (
                f"{told}: loss {first['loss']:.3f} at step {first['step']}, "
                f"{last['loss']:.3f} at step {last['step']}; "
                f"single draft tokens kept {first['acceptance']:.3f}, then {last['acceptance']:.3f}"
            )


@commands.command("start")
def start_run(
    server: Retrained = None,
    force: Force = False,
    yes: Yes = False,
    sidecar: Sidecar = DEFAULT_SIDECAR,
    as_json: AsJson = False,
) -> None:
    """Let the sidecar retrain now; the gate decides on the promotion."""
    from driftguard.cli.sidecar_client import call

    confirm(
        f"Retrain the draft of {server or 'the engine'}, and put it into service if it is better?", yes=yes
    )
    answer = call("POST", sidecar, "/api/v1/retrain", {"server": server, "force": force})
    if as_json:
        print(answer.text)
    else:
        print(f"queued as job {answer.found['job_id']}; `driftguard runs list` shows its run")
