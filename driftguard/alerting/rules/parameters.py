"""The parameters of the alert rules: names, labels, links and thresholds of an installation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from math import inf
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from driftguard.errors import BadInput

# The labels of the alerts and of the series behind them: setting one of these would change the meaning of an
# alert.
RULE_LABELS: Final = frozenset(
    {
        *(
            "alertname",
            "bound",
            "chore",
            "condition",
            "direction",
            "draft_version",
            "instance",
            "job",
            "judged",
        ),
        *("kind", "loop", "method", "outcome", "positions", "problem", "segment", "server", "severity"),
        *("source", "target", "told_by", "trigger", "verdict"),
    }
)

_LABEL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # of Prometheus' data model
_JOB_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:-]*")
_URL: Final = re.compile(r"[A-Za-z0-9._~:/\[\]%+-]+")  # no character with a meaning in YAML or a template

Number = TypeVar("Number", int, float)


def _threshold(default: Number, meaning: str, *, least: float = 1, below: float = inf) -> Number:
    """A field whose values are from `least` to less than `below`, whole numbers where its default is one."""
    threshold: Number = field(default=default, metadata={"meaning": meaning, "least": least, "below": below})
    return threshold


@dataclass(frozen=True, kw_only=True)
class RuleParameters:
    """Raises BadInput, which names the field, where one has a value that it cannot have.

    The fields from `min_draft_tokens` on are thresholds; each carries its meaning with it.
    """

    job_name: str = "driftguard"
    """Of the scrape job of the sidecars: `job_name` in Prometheus' configuration."""

    base_url: str = "http://driftguard:8200"
    """Address under which people reach the sidecar; every link and `runbook_url` begins with it."""

    grafana_url: str | None = None
    """Address of the Grafana that has the dashboards; without it alerts link none."""

    cluster_labels: tuple[str, ...] = ("cluster", "namespace")
    """Labels that distinguish the clusters, or other places, of one Prometheus. Each place is judged by
    itself, and alerts carry these labels; a label that metrics do not have changes nothing. The alerts for no
    sidecar and for no stream fire only if it is so in every place. All sidecars on one database must have the
    same values."""

    extra_labels: Mapping[str, str] = field(default_factory=dict)
    """Label -> value that every alert gets, for example for the routes of Alertmanager."""

    min_draft_tokens: int = _threshold(
        1_000, "ThroughputCost: a stream with fewer in half an hour is not judged", least=0
    )
    low_acceptance: float = _threshold(
        0.4,
        "ThroughputCost: fires as info below this acceptance, if no cost is measured",
        least=0.01,
        below=1,
    )
    retired_days: int = _threshold(7, "SourceSilent: a source silent for longer counts as retired")
    unread_seconds: int = _threshold(900, "SourceSilent: metrics that were not read for longer")
    nightly_hours: int = _threshold(36, "NightlyJobStale: the nightly retraining ended longer ago")
    rejections: int = _threshold(3, "CandidateRejectedRepeatedly: this many in a row")
    unacknowledged_seconds: int = _threshold(30, "SidecarUnhealthy: a batch waits longer for its commit")
    detector_seconds: int = _threshold(300, "SidecarUnhealthy, Watchdog: the detector's last round is older")
    gauges_seconds: int = _threshold(300, "SidecarUnhealthy: gauges were last set longer ago")
    lag_records: int = _threshold(100_000, "SidecarUnhealthy: more records wait for the detector")
    failures: int = _threshold(5, "SidecarUnhealthy: more failures of a loop in 10 minutes", least=0)
    chore_seconds: int = _threshold(600, "SidecarUnhealthy: a chore last succeeded longer ago")
    maintenance_hours: int = _threshold(3, "SidecarUnhealthy: the chore maintain last succeeded longer ago")

    def __post_init__(self) -> None:
        if not _JOB_NAME.fullmatch(self.job_name):
            raise BadInput(f"job_name: {self.job_name!r} has other characters than A-Z a-z 0-9 _ . / : -")
        _check_url("base_url", self.base_url)
        if self.grafana_url is not None:
            _check_url("grafana_url", self.grafana_url)
        if not self.cluster_labels or len(set(self.cluster_labels)) < len(self.cluster_labels):
            raise BadInput(f"cluster_labels: {', '.join(self.cluster_labels)!r} is empty or names one twice")
        for name in self.cluster_labels:
            _check_label_name("cluster_labels", name)
        for name, value in self.extra_labels.items():
            _check_label_name("extra_labels", name)
            if name in self.cluster_labels:
                raise BadInput(
                    f"extra_labels: {name} is a cluster label, whose value metrics carry; to set it, name "
                    "other cluster labels"
                )
            if not value or not value.isprintable():
                raise BadInput(f"extra_labels: {name}={value!r} is empty or has control characters")
        for threshold in thresholds():
            _check_threshold(threshold, getattr(self, threshold.name))


def thresholds() -> list[Field[Any]]:
    """The fields that are thresholds; `metadata["meaning"]` says of what."""
    return [each for each in fields(RuleParameters) if "meaning" in each.metadata]


def _check_url(field_name: str, url: str) -> None:
    """http or https, a host, and nothing behind the path, so that a path can be put behind it."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or not _URL.fullmatch(url):
        raise BadInput(
            f"{field_name}: {url!r} is not http:// or https:// with a host, and a port and a path "
            "where needed"
        )


def _check_label_name(field_name: str, name: str) -> None:
    if not _LABEL_NAME.fullmatch(name) or name.startswith("__"):
        raise BadInput(
            f"{field_name}: {name!r} is not a label name: letters, digits and _ only, "
            "not beginning with a digit or __"
        )
    if name in RULE_LABELS:
        raise BadInput(f"{field_name}: the rules need the label {name} for themselves")


def _check_threshold(threshold: Field[Any], value: object) -> None:
    whole = isinstance(threshold.default, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise BadInput(f"{threshold.name}: {value!r} is not a {'whole ' if whole else ''}number")
    least, below = threshold.metadata["least"], threshold.metadata["below"]
    if not least <= value < below:
        limit = "" if below == inf else f" and below {below}"
        raise BadInput(f"{threshold.name}: {value} is out of range: it must be at least {least}{limit}")
