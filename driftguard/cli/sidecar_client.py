"""A call of a running sidecar's API, for commands."""

from __future__ import annotations

import os
from typing import Any

import httpx

from driftguard.errors import DriftGuardError

TIMEOUT_SECONDS = 10.0


def call(method: str, base_url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer's JSON object; the key is DRIFTGUARD_API_KEY, where that is set.

    Raises DriftGuardError: no answer, or what the problem document says.
    """
    key = os.environ.get("DRIFTGUARD_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = base_url.rstrip("/") + path
    try:
        answer = httpx.request(method, url, json=body, headers=headers, timeout=TIMEOUT_SECONDS)
        found = answer.json()
    except (httpx.InvalidURL, httpx.HTTPError, ValueError) as error:
        raise DriftGuardError(
            f"no answer from {base_url}: {error}; is `driftguard serve` running there?"
        ) from None
    if answer.is_error:
        raise DriftGuardError(f"{base_url} refuses: {found.get('detail', answer.status_code)}")
    return dict(found)
