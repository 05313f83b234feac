"""`driftguard drafts`: list, announce, roll back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

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
from driftguard.cli.output import time_of
from driftguard.errors import BadInput

commands = typer.Typer(no_args_is_help=True, help="List drafts, roll one back, announce one.")

Server = Annotated[str, typer.Argument(metavar="SERVER", help="The server's name, as its records carry it.")]


@commands.command("list")
def list_drafts(
    state: Annotated[
        str | None,
        typer.Option(metavar="STATE", help="candidate, rejected, in_service, retired, rolled_back or lost."),
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
    """List drafts, the newest first."""
    query = {
        "state": state, "server": server, "target": target, "since": since, "until": until,
        "limit": limit, "cursor": cursor,
    }  # fmt: skip

    def row(draft: dict[str, Any]) -> Sequence[object]:
        return (
            draft["version"], draft["state"], draft["server"], draft["method"], draft["parent_version"],
            time_of(draft["created_at"]), time_of(draft["promoted_at"]), draft["target"],
        )  # fmt: skip

    heads = ("VERSION", "STATE", "SERVER", "METHOD", "TRAINED FROM", "KNOWN SINCE", "PROMOTED", "TARGET")
    print_list(sidecar, "/api/v1/drafts", query, as_json, heads, row, "drafts")


@commands.command("rollback")
def rollback(
    server: Server,
    reason: Annotated[str, typer.Option(help="Why; it is stored with the retraining run.")],
    draft_version: Annotated[
        str | None,
        typer.Option(help="Draft to take out of service; refused if another one is in service by now."),
    ] = None,
    yes: Yes = False,
    sidecar: Sidecar = DEFAULT_SIDECAR,
    as_json: AsJson = False,
) -> None:
    """Put the draft before the one in service back into service."""
    from driftguard.cli.sidecar_client import ROLLBACK_SECONDS, call

    version = draft_version or _in_service(sidecar, server)
    confirm(f"Take draft {version} of {server} out of service?", yes=yes)
    body = {"server": server, "draft_version": version, "reason": reason}
    answer = call("POST", sidecar, "/api/v1/rollback", body, seconds=ROLLBACK_SECONDS)
    if as_json:
        print(answer.text)
        return
    instead = answer.found["draft_version"]
    if answer.found.get("awaited"):
        print(
            f"{server}: draft {version} is rolled back as soon as records of draft {instead} arrive, which "
            "it was told to serve instead; `driftguard runs list` shows that"
        )
    else:
        print(f"{server}: draft {version} is rolled back; draft {instead} serves instead")


def _in_service(sidecar: str, server: str) -> str:
    from driftguard.cli.sidecar_client import call

    query = {"server": server, "state": "in_service"}
    found = call("GET", sidecar, "/api/v1/drafts", query=query).found["drafts"]
    if len(found) != 1:
        several = (
            f"drafts {', '.join(draft['version'] for draft in found)} are" if found else "no known draft is"
        )
        raise BadInput(f"{several} in service on {server}; name one with --draft-version")
    return str(found[0]["version"])


@commands.command("announce")
def announce(
    server: Server,
    draft_version: Annotated[str, typer.Argument(metavar="VERSION", help="The draft that it serves.")],
    effective: Annotated[
        str,
        typer.Option(
            metavar="WHEN",
            help="after_restart: from its next restart. now. until_restart: from now until its next restart.",
        ),
    ] = "after_restart",
    sidecar: Sidecar = DEFAULT_SIDECAR,
    as_json: AsJson = False,
) -> None:
    """Say which draft a scraped server serves."""
    from driftguard.cli.sidecar_client import call

    body = {"server": server, "draft_version": draft_version, "effective": effective}
    answer = call("POST", sidecar, "/api/v1/drafts/announce", body)
    if as_json:
        print(answer.text)
    else:
        print(f"{server}: draft {draft_version} is announced ({answer.found['effective'].replace('_', ' ')})")
