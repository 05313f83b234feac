"""Templates, their filters and the headers of every page: nothing is fetched from elsewhere."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from driftguard.api.pages.direction import isolated
from driftguard.api.prefix import prefix_of
from driftguard.detection.findings import duration
from driftguard.detection.state.columns import SECONDS_PER_DAY
from driftguard.incidents.message import clock
from driftguard.records.documents.diagnosis import for_server

_TEMPLATES: Final = Path(__file__).parent / "templates"
_CLOCK: Final = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d) UTC")
_TONES: Final = {
    "bad": "degraded cannot_be_judged drafting_stopped speculation_loses open failed rolled_back lost",
    "warn": "insufficient_data relearning stale acknowledged mitigating recovered_in_part rejected",
}
_COMMAND: Final = re.compile(r"`([^`]*)`")
_SECURITY: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def render(request: Request, template: str, **values: object) -> HTMLResponse:
    """A page; `now` is what its ages are counted from."""
    values = {"now": datetime.now(UTC), **values}
    page = _environment(prefix_of(request.scope)).get_template(template).render(values)
    return HTMLResponse(isolated(page), headers=_SECURITY)


@cache
def _environment(prefix: str) -> Environment:
    """`prefix`: global, so that macros know it too."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["prefix"] = prefix
    environment.filters.update(
        time=_time,
        timed=timed,
        tone=_tone,
        age=_age,
        took=_took,
        seconds=_seconds,
        rate=_rate,
        length_of=_length,
        signed=_signed,
        number=_number,
        percent=_percent,
        gain=_gain,
        count=_count,
        words=_words,
        days=_days,
        fact=_fact,
        marked=marked,
        code=_code,
    )
    return environment


def _time(at: datetime | None) -> str | Markup:
    """An element that page.js can show in local time."""
    if at is None:
        return "–"
    return Markup('<time datetime="{}">{}</time>').format(
        at.astimezone(UTC).isoformat(), clock(at.astimezone(UTC))
    )


def timed(text: str) -> Markup:
    """A sentence whose times are such elements, and whose commands, in backticks, are shown as such."""
    return Markup(_CLOCK.sub(r'<time datetime="\1T\2Z">\g<0></time>', str(_code(text))))  # noqa: S704 (escaped before)


def _tone(word: str) -> str:
    """Of a verdict or a state: the colour of the page's icon."""
    return next((tone for tone, words in _TONES.items() if word in words.split()), "good")


def _age(at: datetime, now: datetime) -> str:
    seconds = (now - at).total_seconds()
    return f"{duration(seconds)} ago" if seconds >= 1 else "now"


def _took(start: datetime, end: datetime) -> str:
    return duration(max(0.0, (end - start).total_seconds()))


def _seconds(value: float | None) -> str:
    return "not known" if value is None else duration(value)


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _length(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _signed(value: float) -> str:
    return f"{value:+.3f}"


def _number(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:,.1f}{unit}"


def _percent(part: float) -> str:
    return f"{100.0 * part:.1f}%"


def _gain(part: float) -> str:
    return f"{100.0 * part:+.0f}%"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _days(value: float) -> str:
    return duration(value * SECONDS_PER_DAY)


def _words(text: str) -> str:
    return text.replace("_", " ")


def marked(text: str, server: str) -> Markup:
    """A sentence whose commands, in backticks, are shown as such, with the name of the server in them."""
    return _code(for_server(text, server))


def _code(text: str) -> Markup:
    """What is in backticks is shown as code."""
    return Markup(_COMMAND.sub(r"<code>\1</code>", str(escape(text))))  # noqa: S704 (escaped before)


def _fact(value: Any) -> str:
    """One number of a piece of evidence, of any type."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
