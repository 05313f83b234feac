"""/runbooks/{alert}: the web page to which an alert's `runbook_url` leads."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse, Response
from markdown_it import MarkdownIt
from markupsafe import Markup

from driftguard.api.context import Context, get_context
from driftguard.api.pages.errors import PageRoute
from driftguard.api.pages.rendering import render
from driftguard.errors import NotFound

router = APIRouter(include_in_schema=False, route_class=PageRoute)

MARKDOWN = ".md"
_TO_SET = "`$SIDECAR` in the commands is the address of the status page. Set it, and the other names"
_TO_SET_HERE = "Set the names"  # the address stands there already


@router.get("/runbooks/{alert}")
def runbook(alert: str, request: Request, context: Annotated[Context, Depends(get_context)]) -> Response:
    """For a browser; with ".md" after the name, the Markdown source. 404: no such alert."""
    known = {file.stem: file for file in _directory().glob(f"*{MARKDOWN}")}
    name = alert.removesuffix(MARKDOWN)
    if name not in known:
        raise NotFound(
            f"there is no runbook {alert!r}; the runbooks are: {', '.join(sorted(known)) or 'none'}"
        )
    text = known[name].read_text(encoding="utf-8")
    if alert.endswith(MARKDOWN):
        return PlainTextResponse(text)
    sidecar = (context.settings.alerting.external_url or str(request.base_url)).rstrip("/")
    body = _html(text.replace(_TO_SET, _TO_SET_HERE).replace("$SIDECAR", sidecar))
    return render(request, "runbook.html", alert=name, body=body, others=sorted(known.keys() - {name}))


def _html(text: str) -> Markup:
    """Renders Markdown without HTML; links between the files become links between the web pages."""
    tokens = _markdown().parse(text)
    for token in tokens:
        for part in token.children or ():
            if part.type == "link_open":
                part.attrSet("href", str(part.attrGet("href")).removesuffix(MARKDOWN))
    shown = _markdown().renderer.render(tokens, _markdown().options, {})
    return Markup(shown.replace("<pre>", '<pre tabindex="0">'))  # noqa: S704 (HTML is off); wide ones scroll


@cache
def _markdown() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable("table")


def _directory() -> Path:
    """In an installed wheel the runbooks are inside the package, in a checkout beside it."""
    package = Path(__file__).parents[2]
    installed = package / "_runbooks"
    return installed if installed.is_dir() else package.parent / "alerts" / "runbooks"
