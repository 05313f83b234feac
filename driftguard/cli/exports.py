"""`driftguard records export`, `rollups export`, `captures export`: all matching rows, as they come."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from driftguard.cli.options import (
    DEFAULT_SIDECAR,
    OfSegment,
    OfServer,
    OfStream,
    OfTarget,
    Sidecar,
    Since,
    Until,
)
from driftguard.errors import BadInput

records_commands = typer.Typer(no_args_is_help=True, help="Export acceptance records.")
rollups_commands = typer.Typer(no_args_is_help=True, help="Export sums per minute, hour or day.")
captures_commands = typer.Typer(no_args_is_help=True, help="Export captured token ids.")


class Format(StrEnum):
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


class Resolution(StrEnum):
    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"


AsFormat = Annotated[Format, typer.Option("--format", help="Of the file.")]
OfKind = Annotated[
    list[str] | None,
    typer.Option("--kind", metavar="KIND", help="request, window or probe; several times for several."),
]
Output = Annotated[
    Path | None, typer.Option(help="File to write (default: standard output).", dir_okay=False)
]


@records_commands.command("export")
def export_records(
    format_: AsFormat = Format.JSONL,
    output: Output = None,
    server: OfServer = None,
    target: OfTarget = None,
    segment: OfSegment = None,
    stream: OfStream = None,
    kind: OfKind = None,
    since: Since = None,
    until: Until = None,
    sidecar: Sidecar = DEFAULT_SIDECAR,
) -> None:
    """Export records; `driftguard replay` reads them as jsonl."""
    query = {
        "format": format_.value, "server": server, "target": target, "segment": segment, "stream": stream,
        "kind": kind, "since": since, "until": until,
    }  # fmt: skip
    _export(sidecar, "/api/v1/records", query, output)


@rollups_commands.command("export")
def export_rollups(
    resolution: Annotated[Resolution, typer.Option(help="What each row sums.")] = Resolution.MINUTE,
    format_: AsFormat = Format.JSONL,
    output: Output = None,
    server: OfServer = None,
    target: OfTarget = None,
    segment: OfSegment = None,
    stream: OfStream = None,
    kind: OfKind = None,
    since: Since = None,
    until: Until = None,
    sidecar: Sidecar = DEFAULT_SIDECAR,
) -> None:
    """Export sums per minute, hour or day."""
    query = {
        "resolution": resolution.value, "format": format_.value, "server": server, "target": target,
        "segment": segment, "stream": stream, "kind": kind, "since": since, "until": until,
    }  # fmt: skip
    _export(sidecar, "/api/v1/rollups", query, output)


@captures_commands.command("export")
def export_captures(
    output: Output = None,
    server: OfServer = None,
    target: OfTarget = None,
    segment: OfSegment = None,
    since: Since = None,
    until: Until = None,
    sidecar: Sidecar = DEFAULT_SIDECAR,
) -> None:
    """Export captured requests as JSON Lines of token ids."""
    query = {"server": server, "target": target, "segment": segment, "since": since, "until": until}
    _export(sidecar, "/api/v1/captures", query, output)


def _export(sidecar: str, path: str, query: Mapping[str, Any], output: Path | None) -> None:
    from driftguard.cli.sidecar_client import export

    if output is None and query.get("format") == Format.PARQUET and sys.stdout.isatty():
        raise BadInput("--output: needed for parquet on a terminal")
    parts = export(sidecar, path, query)
    first = next(parts, b"")  # a refusal leaves an existing file as it is
    if output is None:
        for part in chain([first], parts):
            sys.stdout.buffer.write(part)
        return
    try:
        with output.open("wb") as file:
            file.writelines(chain([first], parts))
    except OSError as error:
        raise BadInput(f"--output: {output} cannot be written: {error.strerror}") from error
