"""The rules of alerts/ as they are committed, for a test that cannot wait for minutes."""

from __future__ import annotations

import yaml

from tests.alerts.committed import RULES, load, rules

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3_600}


def hastened_rules(times: float) -> str:
    """The committed rules with every `for`, `keep_firing_for` and interval of a group divided by `times`.
    Expressions are as committed, with their ranges and thresholds."""
    document = load(RULES)
    for item in (*document["groups"], *rules(document)):
        for key in ("interval", "for", "keep_firing_for"):
            if key in item:
                item[key] = _shortened(item[key], times)
    return yaml.safe_dump(document)


def _shortened(duration: str, times: float) -> str:
    seconds = int(duration[:-1]) * _UNIT_SECONDS[duration[-1]]
    return f"{round(1_000 * seconds / times)}ms"
