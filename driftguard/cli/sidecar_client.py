"""A call of a running sidecar's API, for commands."""

from __future__ import annotations

import os
from typing import Any

import httpx

from driftguard.errors import BadInput, DriftGuardError

TIMEOUT_SECONDS = 10.0


def call(method: str, base_url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer's JSON object; the key is DRIFTGUARD_API_KEY, where that is set.

    Raises BadInput (the address), DriftGuardError: no answer, not that of a sidecar, or what the problem
    document says.
    """
    if not base_url.startswith(("http://", "https://")):
        raise BadInput(f"--sidecar: {base_url} does not begin with http:// or https://")
    key = os.environ.get("DRIFTGUARD_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = base_url.rstrip("/") + path
    try:
        answer = httpx.request(method, url, json=body, headers=headers, timeout=TIMEOUT_SECONDS)
    except (httpx.InvalidURL, httpx.HTTPError) as error:
        raise DriftGuardError(
            f"no answer from {base_url}: {error}; is `driftguard serve` running there?"
        ) from None
    try:
        found = answer.json()
    except ValueError:
        raise DriftGuardError(
            f"{base_url} is no sidecar: its answer ({answer.status_code}) is not JSON"
        ) from None
    if answer.is_server_error:
        raise DriftGuardError(f"{base_url} cannot answer now: {found.get('detail', answer.status_code)}")
    if answer.is_error:
        raise DriftGuardError(f"{base_url} refuses: {found.get('detail', answer.status_code)}")
    return dict(found)
