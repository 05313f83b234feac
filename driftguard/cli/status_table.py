"""`driftguard status`: the answer of GET /api/v1/status, for a terminal."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.markup import escape

from driftguard.cli.sidecar_client import call, without_password

_OF = {"all": "", "first": "of the first draft token ", "both": "of the first draft token where K varies "}
_STYLES = {
    "degraded": "bold red",
    "stale": "bold yellow",
    "drafting_stopped": "bold red",
    "speculation_loses": "bold red",
    "cannot_be_judged": "bold yellow",
    "improved": "cyan",
    "watching": "cyan",
    "steady": "green",
}


def print_status(base_url: str, *, as_json: bool, limit: int) -> None:
    """Prints a few lines per stream, worst first. Raises DriftGuardError when the sidecar gives no answer."""
    answer = call("GET", base_url, "/api/v1/status", query={"limit": limit})
    if as_json:
        print(answer.text)
        return
    status, console = answer.found, _console()
    for source in answer.listed("sources"):
        told = f"{source['server']}: {source['condition'].replace('_', ' ')}"
        detail = f" ({source['detail']})" if source["detail"] else ""
        console.print(f"source {told}{detail}", markup=False)
    if elsewhere := status["sources_elsewhere"]:
        told = f"not scraped by this sidecar, but by another one on its database: {', '.join(elsewhere)}"
        console.print(told, markup=False)
    for probed in status["probes"]:
        told = f"probes of {probed['server']} at {probed['url']}: {probed['state']} ({probed['detail']})"
        console.print(told, markup=False)
    if not status["streams"]:
        missing = (
            "the first window of a scraped server comes with its second scrape or export, if it had traffic."
            if status["sources"] or elsewhere
            else "scrape a server with serve --source, send records to POST /api/v1/records, or start an "
            "engine with --sidecar."
        )
        console.print(f"No records yet: {missing}")
        return
    console.print(f"{status['fleet']['text']}\n")
    for stream in status["streams"]:
        print_stream(stream)
        console.print()
    if left_out := status["streams_left_out"]:
        place = without_password(base_url)
        console.print(f"{left_out:,} more; raise --limit, or search at {place}", markup=False)


def print_stream(stream: dict[str, Any]) -> None:
    console, style = _console(), _STYLES.get(stream["verdict"], "dim")
    console.print(
        f"[bold]{escape(stream['server'])}[/] {escape(stream['target'])}, {escape(stream['method'])} "
        f"{escape(stream['draft_version'])}, stream {stream['id']}"
    )
    console.print(f"  [{style}]{escape(stream['text'])}[/]")
    for line in [
        _numbers(stream),
        *_pays(stream["speculation"]),
        *_to_do(stream["actions"]),
        *_last_incident(stream["last_incident"]),
        *_detector(stream),
        *map(_segment, stream["segments"]),
    ]:
        console.print(f"  {line}", markup=False)


def _console() -> Console:
    """Where standard output is no terminal, no line is wrapped. Part of a name, as :a: of an IPv6 address, is
    no picture."""
    return Console(highlight=False, emoji=False, soft_wrap=not sys.stdout.isatty())


def _numbers(stream: dict[str, Any]) -> str:
    acceptance, speed = stream["acceptance"], stream["tokens_per_second"]
    parts = [
        f"acceptance {_rate(acceptance['now'])}, baseline {_rate(acceptance['baseline'])}",
        f"{_number(speed['now'], '{:.0f}')} tokens/s",
        f"cost {_number(speed['cost_percent'], '{:.0f}%')}",
        _speedup(stream["speculation"]),
        f"draft in service {stream['draft_in_service']}",
    ]
    return "; ".join(parts)


def _pays(speculation: dict[str, Any] | None) -> list[str]:
    """Where speculation loses, the stream's sentence has said it."""
    return [] if speculation is None or speculation["state"] == "loses" else [speculation["text"]]


def _to_do(actions: list[dict[str, Any]]) -> list[str]:
    """The best action, with its command; the sentence of the stream has said it where it is not nothing."""
    best = next((action for action in actions if action["best"]), None)
    return [f"to {best['text']}: {best['command']}"] if best and best["command"] else []


def _last_incident(incident: dict[str, Any] | None) -> list[str]:
    if incident is None:
        return []
    return [f"last incident, resolved {incident['resolved_at'][:19]}Z: {incident['aftermath']['text']}"]


def _speedup(speculation: dict[str, Any] | None) -> str:
    """Against no speculation, with its interval; or that it is not known."""
    if speculation is None or speculation["factor"] is None:
        return "speedup not known"
    factor = speculation["factor"]
    return f"speedup {factor['value']:.2f} ({factor['low']:.2f} to {factor['high']:.2f})"


def _detector(stream: dict[str, Any]) -> list[str]:
    """The false-alarm guarantee, the traffic, and what the records lack."""
    if stream["false_alarms"] is None:
        return []
    rate = stream["requests_per_day"]
    unit = stream["segments"][0]["unit"] if stream["segments"] else "requests"
    per_day = f"{unit} per day: not known yet" if rate is None else f"{rate:,.0f} {unit} per day"
    parts = [stream["false_alarms"]["text"], per_day, f"sessions: {stream['sessions']}"]
    if gaps := stream["windows_after_gap"]:
        parts.append(f"{gaps} window{'s' if gaps > 1 else ''} after a gap left out")
    return ["; ".join(parts)]


def _segment(segment: dict[str, Any]) -> str:
    if segment["learning"] is not None:
        needed = f"at least {segment['requests_needed']:,} more {segment['unit']} needed"
        return f"{segment['segment']}: not watched yet, {needed} ({segment['learning']})"
    delays = "; ".join(delay["text"] for delay in segment["expected_delays"])
    reason = f"{segment['verdict'].replace('_', ' ')} ({segment['baseline_reason'] or 'no baseline'})"
    if segment["alarm_waits"]:
        waits = f"{segment['alarm_waits']:,} more {segment['unit']}"
        reason += f", an alarm waits for about {waits} of the young stream"
    if segment["variance_inflation"] > 1.0:
        reason += f", not independent ({segment['variance_inflation']:.1f} times the variance)"
    for follows in segment["follows"]:
        reason += f", depends on {follows['text']}"
    if segment["length_of_acceptance"]:
        reason += ", answer length not used, as it follows from acceptance"
    return f"{segment['segment']}: {reason}" + (f"; expected delay: {delays}" if delays else "")


def _rate(rate: dict[str, Any] | None) -> str:
    if rate is None:
        return "-"
    return f"{_OF[rate.get('positions', 'all')]}{rate['rate']:.2f} ({rate['requests']})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
