"""Where the links of alerts lead: the sidecar's own pages, and Grafana."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from urllib.parse import urlencode

from driftguard.incidents.message import permalink
from driftguard.store.tables import Incident, Stream

DASHBOARD: Final = {name: f"driftguard-{name}" for name in ("fleet", "stream", "retraining")}  # name -> uid
BEFORE: Final = timedelta(hours=1)  # the change point, from when on a dashboard shows an incident


@dataclass(frozen=True, slots=True)
class Places:
    """`grafana_url`: where the dashboards are; without it no alert links one."""

    external_url: str
    grafana_url: str | None = None

    def links(self, alert: str, incident: Incident, stream: Stream) -> dict[str, str]:
        """Annotations of an alert about an incident, by the names that the Prometheus rules use too."""
        sidecar = self.external_url.rstrip("/")
        found = {
            "runbook_url": f"{sidecar}/runbooks/{alert}",
            "incident_url": permalink(self.external_url, incident.id),
            "stream_url": f"{sidecar}/streams/{stream.id}",
        }
        if self.grafana_url is not None:
            found["dashboard_url"] = self._dashboard(self.grafana_url.rstrip("/"), sidecar, incident, stream)
        return found

    def _dashboard(self, grafana: str, sidecar: str, incident: Incident, stream: Stream) -> str:
        chosen = {
            "var-sidecar": sidecar,
            "var-server": stream.server,
            "var-target": stream.target,
            "var-draft_version": stream.draft_version,
            "var-method": stream.method,
            "from": f"{(incident.change_point_at - BEFORE).timestamp() * 1_000:.0f}",
            "to": "now",
        }
        return f"{grafana}/d/{DASHBOARD['stream']}?{urlencode(chosen)}"
