"""The rules and the Alertmanager example of alerts/ as they are committed, for a test that cannot wait."""

from __future__ import annotations

from typing import Any

import yaml

from tests.alerts.committed import ALERTMANAGER, ALERTS, RULES, load, rules

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3_600}

LEAST_GROUP_WAIT = 500  # ms: a busy machine needs that long to receive the alerts of one group


def hastened_rules(times: float) -> str:
    """The committed rules with every `for`, `keep_firing_for` and interval of a group divided by `times`.
    Expressions are as committed, with their ranges and thresholds."""
    document = load(RULES)
    for item in (*document["groups"], *rules(document)):
        _hasten(item, ("interval", "for", "keep_firing_for"), times)
    return yaml.safe_dump(document)


def committed_alertmanager(receiver: str) -> str:
    """The committed routes, inhibitions and messages. What goes to PagerDuty, Slack and the dead man's
    switch goes to `receiver`, under /pagerduty, /slack and /watchdog."""
    return yaml.safe_dump(_redirected(receiver))


def hastened_alertmanager(times: float, receiver: str) -> str:
    """The same with every wait divided by `times`."""
    document = _redirected(receiver)
    for route in (document["route"], *document["route"]["routes"]):
        _hasten(route, ("group_interval", "repeat_interval"), times)
        _hasten(route, ("group_wait",), times, least_milliseconds=LEAST_GROUP_WAIT)
    return yaml.safe_dump(document)


def _redirected(receiver: str) -> dict[str, Any]:
    document = load(ALERTMANAGER)
    document["templates"] = [str(ALERTS / each) for each in document.get("templates", ())]
    document["global"] |= {"slack_api_url": f"{receiver}/slack", "pagerduty_url": f"{receiver}/pagerduty"}
    for named in document["receivers"]:
        for webhook in named.get("webhook_configs", ()):
            webhook["url"] = f"{receiver}/watchdog"
    return document


def _hasten(
    item: dict[str, Any], keys: tuple[str, ...], times: float, *, least_milliseconds: int = 0
) -> None:
    for key in keys:
        if key in item:
            seconds = int(item[key][:-1]) * _UNIT_SECONDS[item[key][-1]]
            hastened = max(round(1_000 * seconds / times), least_milliseconds if seconds else 0)
            item[key] = f"{hastened}ms"
