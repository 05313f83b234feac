"""The annotations of a rule that are addresses: pages of the sidecar, and a dashboard of Grafana.

They are lines of YAML, whose {{ }}, `query` and `urlquery` belong to Prometheus' templates. Source:
prometheus.io/docs/prometheus/latest/configuration/template_reference
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from driftguard.alerting.places import BEFORE, DASHBOARD

_BEFORE: Final = f"{BEFORE.total_seconds():.0f}"
_INDENT: Final = "\n          "  # of an annotation in the template
_PLACE: Final = ("server", "target")
_STREAM: Final = (*_PLACE, "draft_version", "method")


@dataclass(frozen=True, slots=True)
class Links:
    """`grafana_url`: where the dashboards are; without it no alert links one."""

    base_url: str
    grafana_url: str | None
    cluster_labels: Sequence[str]

    def incident(self, direction: str | None = None) -> str:
        """Of an alert about an incident. `direction`: that of the incident, where it is no label of the
        alert."""
        labels = _STREAM if direction else (*_STREAM, "direction")
        more = f',direction="{direction}"' if direction else ""
        info = self._query("driftguard_incident_info{%s}", labels, more)
        changed = "1000 * (driftguard_incident_change_point_timestamp_seconds{%s} - " + _BEFORE + ")"
        since = self._query(changed, labels, more)
        begin = _with(since, '&from={{ . | first | value | printf "%.0f" }}&to=now')
        return self._lines(
            incident_url=_with(info, self.base_url + "/incidents/{{ (. | first).Labels.incident }}"),
            stream_url=self._stream(),
            dashboard_url=self._dashboard("stream", _STREAM, begin),
        )

    def stream(self) -> str:
        """Of an alert with the labels of a stream."""
        return self._lines(stream_url=self._stream(), dashboard_url=self._dashboard("stream", _STREAM))

    def server(self) -> str:
        """Of an alert with the label server."""
        return self._lines(status_url=self._search(), dashboard_url=self._dashboard("fleet"))

    def retraining(self) -> str:
        """Of an alert with the labels server and target."""
        page = f"{self.base_url}/retraining"
        return self._lines(status_url=page, dashboard_url=self._dashboard("retraining", _PLACE))

    def fleet(self) -> str:
        """Of any other."""
        return self._lines(status_url=f"{self.base_url}/", dashboard_url=self._dashboard("fleet"))

    def _stream(self) -> str:
        """Beyond metrics.max_streams a stream has no series of its own; it can be searched for."""
        info = self._query("driftguard_stream_info{%s}", _STREAM)
        return _with(info, self.base_url + "/streams/{{ (. | first).Labels.stream }}", self._search())

    def _search(self) -> str:
        return self.base_url + "/?q={{ $labels.server | urlquery }}"

    def _dashboard(self, name: str, labels: Sequence[str] = (), more: str = "") -> str:
        chosen = "".join(f"&var-{label}={{{{ $labels.{label} | urlquery }}}}" for label in labels)
        sidecar = quote(self.base_url, safe="")
        return f"{self.grafana_url}/d/{DASHBOARD[name]}?var-sidecar={sidecar}{chosen}{more}"

    def _query(self, expression: str, labels: Sequence[str], more: str = "") -> str:
        """`expression` has %s where its matchers belong."""
        every = (*self.cluster_labels, *labels)
        matchers = ",".join(f"{label}=%q" for label in every) + more
        values = " ".join(f"$labels.{label}" for label in every)
        return f"printf `{expression % matchers}` {values} | query"

    def _lines(self, **urls: str) -> str:
        if self.grafana_url is None:
            del urls["dashboard_url"]
        return _INDENT.join(f"{name}: >-{_INDENT}  {url}" for name, url in urls.items())


def _with(query: str, found: str, otherwise: str = "") -> str:
    """What stands there if the query has an answer, which is the dot in `found`."""
    return f"{{{{ with {query} }}}}{found}{{{{ else }}}}{otherwise}{{{{ end }}}}"
