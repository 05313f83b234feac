"""A real server as a source of the sidecar."""

from __future__ import annotations

from collections.abc import Mapping

from tests.live.processes import Sidecar, of_all


def scraping(url: str, draft_version: str = "v1") -> str:
    """The sidecar's settings, without canary probes, whose windows are left out."""
    return f"""
[[sources]]
url = "{url}/metrics"
server = "real"
draft = "small"
draft_version = "{draft_version}"
method = "draft_model"
[scraping]
interval_seconds = 1.0
[probes]
enabled = false
"""


def condition(beside: Sidecar) -> str:
    sources = beside.get("status")["sources"]
    return str(sources[0]["condition"]) if sources else ""


def windows_are(beside: Sidecar, own: Mapping[str, int]) -> bool:
    """Do the windows add up to these of the server's own counts?"""
    ours = of_all(beside.records())
    return all(ours[name] == count for name, count in own.items())
