"""Options that several commands have, with one name and one meaning, and the questions before a change."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from driftguard.errors import BadInput, DriftGuardError

DEFAULT_SIDECAR = "http://127.0.0.1:8200"
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


def _time(parameter: typer.CallbackParam, text: str | None) -> str | None:
    """As the API takes it: a date and time with UTC offset, or how long ago (30m, 12h). Raises BadInput."""
    if text is None:
        return None
    if found := re.fullmatch(r"(\d{1,5})([mhd])", text):
        ago = timedelta(**{_UNITS[found[2]]: int(found[1])})
        return (datetime.now(UTC) - ago).isoformat(timespec="seconds").replace("+00:00", "Z")
    if not text[:1].isdigit():  # what is wrong with a date the API says
        raise BadInput(
            f"--{parameter.name}: {text!r} should be a date and time with UTC offset, such as "
            "2026-11-01T00:00:00Z, or how long ago: 30m, 12h, 7d"
        )
    return text


Config = Annotated[
    Path | None, typer.Option("--config", help="TOML file with settings.", envvar="DRIFTGUARD_CONFIG")
]
Host = Annotated[str | None, typer.Option("--host", help="Address to bind (default 127.0.0.1).")]
Port = Annotated[int | None, typer.Option("--port", help="Port to bind (default 8200).")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Directory of the embedded database and candidates.")
]
Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        help="A server whose metrics to scrape, as KIND=URL or URL; several times for several servers. "
        "Replaces the sources of the settings.",
        metavar="[KIND=]URL",
    ),
]
Sidecar = Annotated[
    str, typer.Option("--sidecar", help="Address of the sidecar.", envvar="DRIFTGUARD_SIDECAR")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON; of a sidecar, the answer of its API as it is.")
]
Limit = Annotated[int, typer.Option(min=1, max=500, help="Rows to show.")]
Cursor = Annotated[str | None, typer.Option(help="Go on where the list before ended, which names it.")]
OfServer = Annotated[str | None, typer.Option("--server", help="Of this server only.")]
OfTarget = Annotated[str | None, typer.Option("--target", help="Of this target only.")]
OfSegment = Annotated[
    list[str] | None, typer.Option("--segment", help="Of this segment only; several times for several.")
]
OfStream = Annotated[
    list[int] | None,
    typer.Option("--stream", help="Of the stream with this id only; several times for several."),
]
Since = Annotated[
    str | None,
    typer.Option(
        help="From here on: 2026-11-01T00:00:00Z, or so long ago: 30m, 12h, 7d.",
        callback=_time,
    ),
]
Until = Annotated[
    str | None,
    typer.Option(help="Before here, in the same form.", callback=_time),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; for scripts.")]


def confirm(question: str, *, yes: bool) -> None:
    """Raises BadInput where nobody can be asked, DriftGuardError where the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise BadInput("--yes: needed where nobody can be asked, as this changes what is served")
    if not typer.confirm(question, err=True):
        raise DriftGuardError("nothing was changed")
