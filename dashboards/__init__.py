"""Grafana dashboards: Python that `make dashboards` turns into the JSON beside it. Not part of the wheel."""
