"""Names of labels, and the values of those that have few."""

from __future__ import annotations

from typing import Final, Literal, get_args

StreamVerdict = Literal[
    "insufficient_data",
    "relearning",
    "watching",
    "steady",
    "degraded",
    "improved",
    "drafting_stopped",
    "speculation_loses",
    "cannot_be_judged",
    "stale",
    "replaced",
]
VERDICTS: Final[tuple[StreamVerdict, ...]] = get_args(StreamVerdict)

CHORES: Final = (
    "diagnose",
    "measure_costs",
    "watch_goodput",
    "defer_retraining",
    "look_at_exports",
    "maintain",
)
LOOPS: Final = ("scraping", "probes", "alerts", "jobs", "look_around", "examination")
SEVERITIES: Final = ("critical", "warning", "info")
DIRECTIONS: Final = ("down", "up", "slower")  # of acceptance, of acceptance, of goodput
ARRIVALS: Final = ("accepted", "duplicate", "refused", "rejected_queue_full")
# As driftguard.store.database names its kinds of work that have limits, and what ran out.
WORKS: Final = ("ingest", "fold", "request", "chore", "examination", "maintenance", "check", "jobs")
TIMEOUTS: Final = ("statement", "lock", "idle", "silence")
RUN_OUTCOMES: Final = ("promoted", "nothing_to_do", "rejected", "failed", "rolled_back")

PLACE = ("server", "target")
STREAM = (*PLACE, "draft_version", "method")
INCIDENT = (*STREAM, "direction", "severity")
TRAFFIC = (*STREAM, "segment", "kind")
SOURCE = ("source", "kind")
OTHER: Final = "OTHER"  # for each name, where streams beyond metrics.max_streams are counted together
