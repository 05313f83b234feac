"""/runbooks/{alert}: what the `runbook_url` of a page opens."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from driftguard.errors import NotFound

router = APIRouter(include_in_schema=False)


@router.get("/runbooks/{alert}")
def runbook(alert: str) -> PlainTextResponse:
    """Markdown, readable as it is. 404: no such alert."""
    known = {file.stem: file for file in _directory().glob("*.md")}
    if alert not in known:
        raise NotFound(f"there is no runbook {alert!r}; there are: {', '.join(sorted(known)) or 'none'}")
    return PlainTextResponse(known[alert].read_text(encoding="utf-8"))


def _directory() -> Path:
    """In an installed wheel the runbooks lie inside the package, in a checkout beside it."""
    package = Path(__file__).parents[1]
    installed = package / "_runbooks"
    return installed if installed.is_dir() else package.parent / "alerts" / "runbooks"
