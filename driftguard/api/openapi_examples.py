"""Examples of the OpenAPI document, from the JSON file beside it; a test checks them against the schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_stored: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_bytes())

RECORD = _stored["record"]
ROLLUP = _stored["rollup"]
CAPTURE = _stored["capture"]
UNRECORDED = _stored["unrecorded"]
SPANS = _stored["spans"]
METRICS = _stored["metrics"]
INCIDENT = _stored["incident"]
RUN = _stored["run"]


def _page(name: str, row: dict[str, Any]) -> dict[str, Any]:
    return {name: [row], "next_cursor": None}


_listed_run = {name: value for name, value in RUN.items() if name != "curve"}
_listed_incident = {
    name: value for name, value in INCIDENT.items() if name not in ("transitions", "notifications", "actions")
}

# By their names in the document.
ANSWERS: dict[str, Any] = {
    "batch": {"accepted": 1, "duplicates": 0},
    "records": _page("records", RECORD),
    "rollups": {
        **_page("rollups", ROLLUP),
        "resolution": "minute",
        "kept_since": "2026-09-28T00:00:00Z",
    },
    "status": _stored["status"],
    "stream": _stored["status"]["streams"][0],
    "streams": _page("streams", _stored["status"]["streams"][0]) | {"matching": 1},
    "acceptance": _stored["acceptance"],
    "incident": INCIDENT,
    "incidents": _page("incidents", _listed_incident),
    "drafts": _page("drafts", _stored["draft"]),
    "retrain_run": RUN,
    "retrain_runs": _page("runs", _listed_run),
    "rolled_back": {"server": "chat-eu-1", "draft_version": "8a17c90be2f3", "awaited": False},
    "job": {"job_id": 17},
    "held_stream": {
        "stream_id": 7,
        "since": "2026-11-02T09:14:31Z",
        "failures": 5,
        "reason": "NotFinite: incidents.evidence.cost.before: inf is not a finite number",
        "records_behind": 1204,
        "set_aside_at": "2026-11-02T09:16:02Z",
        "next_try_at": "2026-11-02T11:40:10Z",
    },
    "alive": {"status": "ok"},
    "ready": {"status": "ready", "database": "reachable, schema up to date", "fold_lag_records": 0},
}
