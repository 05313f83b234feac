"""`driftguard streams`: list, show, acceptance over time, read again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from driftguard.cli.lists import print_list
from driftguard.cli.options import DEFAULT_SIDECAR, AsJson, Cursor, Limit, OfServer, OfTarget, Sidecar
from driftguard.cli.output import number, print_table, time_of

commands = typer.Typer(no_args_is_help=True, help="List and show streams, and their acceptance over time.")
PATH = "/api/v1/streams"

StreamId = Annotated[
    int, typer.Argument(metavar="ID", min=1, help="Of a stream; `streams list` and `status` have them.")
]


@commands.command("list")
def list_streams(
    search: Annotated[
        str | None, typer.Option(help="Part of the name of a server, target, draft, method or segment.")
    ] = None,
    verdict: Annotated[
        str | None, typer.Option(metavar="VERDICT", help="Only these: degraded, steady, ...")
    ] = None,
    server: OfServer = None,
    target: OfTarget = None,
    method: Annotated[str | None, typer.Option(help="Only of this drafting method.")] = None,
    in_service: Annotated[
        bool | None,
        typer.Option("--in-service/--not-in-service", help="Only of the draft in service, or not."),
    ] = None,
    sort: Annotated[
        str, typer.Option(metavar="ORDER", help="verdict, last_seen, cost or server.")
    ] = "verdict",
    limit: Limit = 50,
    cursor: Cursor = None,
    sidecar: Sidecar = DEFAULT_SIDECAR,
    as_json: AsJson = False,
) -> None:
    """List streams with their numbers, the worst first."""
    query = {
        "q": search, "verdict": verdict, "server": server, "target": target, "method": method,
        "in_service": in_service, "sort": sort, "limit": limit, "cursor": cursor,
    }  # fmt: skip

    def row(stream: dict[str, Any]) -> Sequence[object]:
        return (
            stream["id"], stream["verdict"], stream["server"], stream["draft_version"], stream["method"],
            *(_rate(stream["acceptance"][when]) for when in ("now", "baseline")),
            number(stream["tokens_per_second"]["now"], ".0f"),
            time_of(stream["last_seen_at"]),
            stream["target"],
        )  # fmt: skip

    heads = (
        "ID",
        "VERDICT",
        "SERVER",
        "DRAFT",
        "METHOD",
        "ACCEPTANCE",
        "BASELINE",
        "TOKENS/S",
        "LAST SEEN",
        "TARGET",
    )
    print_list(sidecar, PATH, query, as_json, heads, row, "streams")


def _rate(rate: dict[str, Any] | None) -> str:
    return "-" if rate is None else number(rate["rate"], ".2f")


@commands.command("show")
def show_stream(stream_id: StreamId, sidecar: Sidecar = DEFAULT_SIDECAR, as_json: AsJson = False) -> None:
    """Show one stream as `status` does."""
    from driftguard.cli.sidecar_client import call
    from driftguard.cli.status_table import print_stream

    answer = call("GET", sidecar, f"{PATH}/{stream_id}")
    if as_json:
        print(answer.text)
    else:
        print_stream(answer.found)


@commands.command("acceptance")
def show_acceptance(
    stream_id: StreamId,
    minutes: Annotated[int, typer.Option(min=1, max=527_040, help="How far to look back.")] = 60,
    sidecar: Sidecar = DEFAULT_SIDECAR,
    as_json: AsJson = False,
) -> None:
    """Show the acceptance of a stream and its segments over time."""
    from driftguard.cli.sidecar_client import call

    answer = call("GET", sidecar, f"{PATH}/{stream_id}/acceptance", query={"minutes": minutes})
    if as_json:
        print(answer.text)
        return
    rows = [
        (
            time_of(point["at"]),
            line["draft_version"],
            line["segment"] or "all",
            point["requests"],
            number(point["acceptance"], ".3f"),
        )
        for line in answer.found["lines"]
        for point in line["points"]
    ]
    print_table(("FROM", "DRAFT", "SEGMENT", "REQUESTS", "ACCEPTANCE"), rows, "no records in that time")


@commands.command("retry")
def retry(stream_id: StreamId, sidecar: Sidecar = DEFAULT_SIDECAR, as_json: AsJson = False) -> None:
    """Read the records again at which the detector failed."""
    from driftguard.cli.sidecar_client import call

    answer = call("POST", sidecar, f"{PATH}/{stream_id}/retry", {})
    if as_json:
        print(answer.text)
        return
    behind = answer.found["records_behind"]
    print(f"stream {stream_id}: its {behind:,} waiting records are read again within seconds")
