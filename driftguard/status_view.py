"""`driftguard status`: what GET /api/v1/status says, for a terminal."""

from __future__ import annotations

import json
from typing import Any

import httpx
from rich.console import Console

from driftguard.errors import DriftGuardError

_STYLES = {"degraded": "bold red", "drafting_stopped": "bold red", "improved": "cyan", "steady": "green"}


def print_status(base_url: str, *, as_json: bool, api_key: str | None) -> None:
    """Prints a few lines per stream, worst first. Raises DriftGuardError when the sidecar gives no answer."""
    status = _fetch(base_url, api_key)
    if as_json:
        print(json.dumps(status))
        return
    console = Console()
    if not status["streams"]:
        console.print("No records yet: send some to POST /api/v1/records, or start an engine with --sidecar.")
        return
    for stream in status["streams"]:
        style = _STYLES.get(stream["verdict"], "dim")
        console.print(
            f"[bold]{stream['server']}[/] {stream['target']}, {stream['method']} {stream['draft_version']}"
        )
        console.print(f"  [{style}]{stream['text']}[/]", highlight=False)
        console.print(f"  {_numbers(stream)}\n", highlight=False)


def _numbers(stream: dict[str, Any]) -> str:
    acceptance, speed = stream["acceptance"], stream["tokens_per_second"]
    parts = [
        f"acceptance {_rate(acceptance['now'])}, baseline {_rate(acceptance['baseline'])}",
        f"{_number(speed['now'], '{:.0f}')} tokens/s",
        f"cost {_number(speed['cost_percent'], '{:.0f}%')}",
        f"draft in service {stream['draft_in_service']}",
    ]
    return "; ".join(parts)


def _fetch(base_url: str, api_key: str | None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{base_url.rstrip('/')}/api/v1/status", headers=headers, timeout=10.0)
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
    except (httpx.InvalidURL, httpx.HTTPError, ValueError) as error:
        raise DriftGuardError(
            f"no status from {base_url}: {error}; is `driftguard serve` running there?"
        ) from None
    return body


def _rate(rate: dict[str, Any] | None) -> str:
    return f"{rate['rate']:.2f} ({rate['requests']})" if rate else "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
