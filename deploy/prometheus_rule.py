"""Writes alerts/driftguard-rules.yaml as a PrometheusRule for the Prometheus operator: `make kubernetes`.

The text of the rules is kept as it is, comments included, only indented.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import Final

ROOT: Final = Path(__file__).parents[1]
RULES: Final = ROOT / "alerts" / "driftguard-rules.yaml"
PROMETHEUS_RULE: Final = ROOT / "deploy" / "kubernetes" / "monitoring" / "prometheusrule.yaml"

_HEADER: Final = """\
# Made from alerts/driftguard-rules.yaml by `make kubernetes`: change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: driftguard
  labels: {app.kubernetes.io/name: driftguard}
spec:
"""


def prometheus_rule(rules: str) -> str:
    """The manifest of a rules file."""
    _, groups, body = rules.partition("groups:\n")
    return _HEADER + indent(groups + body, "  ")


if __name__ == "__main__":
    PROMETHEUS_RULE.write_text(prometheus_rule(RULES.read_text(encoding="utf-8")), encoding="utf-8")
