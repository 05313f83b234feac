"""The demo's access to the sidecar: its public API only.

By no proxy that the environment names: all servers of the demo are on this machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from driftguard.demo.processes import DemoFailed

T = TypeVar("T")
POLL_SECONDS = 0.25


@dataclass(slots=True)
class SidecarClient:
    base_url: str

    def _get(self, path: str) -> dict[str, Any]:
        answer = httpx.get(self.base_url + path, timeout=10.0, trust_env=False)
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
        return body

    def stream_in_service(self) -> dict[str, Any] | None:
        """The stream of the draft in service, once records of it have arrived."""
        streams: list[dict[str, Any]] = self._get("/api/v1/status")["streams"]
        drafting = [stream for stream in streams if stream["in_service"] and stream["method"] != "none"]
        return drafting[0] if drafting else None

    def incidents(self, direction: str | None = None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("/api/v1/incidents")["incidents"]
        return [incident for incident in found if direction in (None, incident["direction"])]

    def incident(self, incident_id: str) -> dict[str, Any]:
        return self._get(f"/api/v1/incidents/{incident_id}")

    def record_kinds(self) -> list[str]:
        """In the order of arrival: canary probes are numbered with requests."""
        url = f"{self.base_url}/api/v1/records"
        answer = httpx.get(url, params={"format": "jsonl"}, timeout=60.0, trust_env=False)
        answer.raise_for_status()
        return [json.loads(line)["kind"] for line in answer.content.splitlines()]

    def draft_directory(self, version: str) -> str | None:
        drafts: list[dict[str, Any]] = self._get("/api/v1/drafts")["drafts"]
        return next((draft["directory"] for draft in drafts if draft["version"] == version), None)

    def retrain(self, server: str) -> None:
        """Asks for a retraining, although no incident calls for one."""
        body = {"server": server, "force": True}
        url = f"{self.base_url}/api/v1/retrain"
        httpx.post(url, json=body, timeout=10.0, trust_env=False).raise_for_status()

    def newest_run(self) -> dict[str, Any] | None:
        runs: list[dict[str, Any]] = self._get("/api/v1/retrain-runs")["runs"]
        return runs[0] if runs else None


def wait_for(
    what: str, seconds: float, look: Callable[[], T | None], part: Callable[[], float] = lambda: 0.0
) -> T:
    """Polls `look` until it returns a value. `part`: how much is done, from 0 to 1; with each percent the
    time begins anew, as a slow machine must succeed too. Raises DemoFailed, which names what did not happen
    in time."""
    most, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = look()
        if found is not None:
            return found
        if (percent := int(100.0 * part())) > most:
            most, deadline = percent, time.monotonic() + seconds
        time.sleep(POLL_SECONDS)
    reached = f", {most}% of it done" if most else ""
    raise DemoFailed(f"{what} did not happen within {seconds:.0f} s{reached}")
