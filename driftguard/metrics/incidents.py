"""Incidents that are not resolved."""

from __future__ import annotations

from collections.abc import Iterable

from driftguard.metrics.labels import DIRECTIONS, INCIDENT, SEVERITIES
from driftguard.metrics.series import Series


class IncidentMetrics:
    def __init__(self, series: Series) -> None:
        self._series = series
        self.open = series.gauge(
            "driftguard_incidents_open", "Incidents that are not resolved.", "severity", "direction"
        )
        self.info = series.gauge(
            "driftguard_incident_info",
            "1 for each incident that is not resolved, with its id and likely cause.",
            *INCIDENT,
            "incident",
            "cause",
            "confidence",
        )
        self.change_point = series.gauge(
            "driftguard_incident_change_point_timestamp_seconds",
            "When the acceptance or the goodput of an incident that is not resolved changed.",
            *INCIDENT,
        )
        self.slowdown = series.gauge(
            "driftguard_incident_slowdown_ratio",
            "Part of the tokens per second that an incident that is not resolved costs, measured where that "
            "is precise enough, else by formula; negative is a gain. Only where it is known.",
            *INCIDENT,
        )
        self.acceptance_before = series.gauge(
            "driftguard_incident_acceptance_before_ratio",
            "Acceptance per request of a segment before the change of an incident that is not resolved, "
            "allowing for the length of answers; of segments that are not back.",
            *INCIDENT,
            "segment",
            "positions",  # all | first | both: its draft positions
        )
        self.acceptance_after = series.gauge(
            "driftguard_incident_acceptance_after_ratio",
            "Acceptance per request of a segment after the change of an incident that is not resolved; of "
            "segments that are not back.",
            *INCIDENT,
            "segment",
            "positions",
        )

    def set_open(self, counts: Iterable[tuple[str, str, int]]) -> None:
        """`counts`: (severity, direction, how many) of the incidents that are not resolved."""
        shown: dict[tuple[str, ...], float] = {
            (severity, direction): 0.0 for severity in SEVERITIES for direction in DIRECTIONS
        }
        shown.update({(severity, direction): count for severity, direction, count in counts})
        self._series.replace(self.open, shown)
