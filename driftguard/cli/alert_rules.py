"""The command that writes the rules."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from driftguard.alerting.rules.parameters import RuleParameters, thresholds
from driftguard.errors import BadInput

_DEFAULT = RuleParameters()
_THRESHOLDS = "\n\n".join(f"{each.name}={each.default}: {each.metadata['meaning']}." for each in thresholds())


class Format(StrEnum):
    PROMETHEUS = "prometheus"
    KUBERNETES = "kubernetes"


def alert_rules(
    job_name: Annotated[
        str, typer.Option(help="Name of the scrape job of the sidecars.")
    ] = _DEFAULT.job_name,
    base_url: Annotated[
        str, typer.Option(help="Address under which people reach the sidecar; links lead there.")
    ] = _DEFAULT.base_url,
    grafana_url: Annotated[
        str | None,
        typer.Option(help="Address of the Grafana that has the dashboards; without it alerts link none."),
    ] = _DEFAULT.grafana_url,
    cluster_label: Annotated[
        list[str] | None,
        typer.Option(
            help="A label that distinguishes the clusters of one Prometheus: each is judged by itself, and "
            "alerts carry the label; several times for several (default: "
            f"{' and '.join(_DEFAULT.cluster_labels)}).",
            metavar="NAME",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="Give every alert this label; several times for several.", metavar="NAME=VALUE"),
    ] = None,
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Another threshold; several times for several. The defaults:\n\n{_THRESHOLDS}",
            metavar="NAME=VALUE",
        ),
    ] = None,
    format: Annotated[  # noqa: A002 (the name of the option)
        Format,
        typer.Option(
            help="A rules file for Prometheus, or a PrometheusRule for the Prometheus operator in Kubernetes."
        ),
    ] = Format.PROMETHEUS,
    output: Annotated[
        Path | None, typer.Option(help="File to write (default: standard output).", dir_okay=False)
    ] = None,
) -> None:
    """Write the alert rules for Prometheus.

    With your names, addresses and thresholds.
    """
    from driftguard.alerting.rules.generate import kubernetes_manifest, rules_file

    parameters = RuleParameters(
        job_name=job_name,
        base_url=base_url,
        grafana_url=grafana_url,
        cluster_labels=tuple(cluster_label or _DEFAULT.cluster_labels),
        extra_labels=_pairs("--label", label),
        **_numbers(threshold),
    )
    make = kubernetes_manifest if format is Format.KUBERNETES else rules_file
    if output is None:
        typer.echo(make(parameters), nl=False)
        return
    try:
        output.write_text(make(parameters), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--output: {output} cannot be written: {error.strerror}") from error


def _pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise BadInput(f"{option}: {text!r} is not NAME=VALUE")
        if name in pairs:
            raise BadInput(f"{option}: {name} is given twice")
        pairs[name] = value
    return pairs


def _numbers(texts: list[str] | None) -> dict[str, int]:
    """Threshold -> value. A number that is not whole is a float, which only some fields accept."""
    known = [each.name for each in thresholds()]
    numbers: dict[str, int] = {}
    for name, text in _pairs("--threshold", texts).items():
        if name not in known:
            raise BadInput(f"--threshold: unknown threshold {name!r}; the thresholds are: {', '.join(known)}")
        try:
            numbers[name] = int(text) if text.strip("-").isdecimal() else float(text)  # type: ignore[assignment]
        except ValueError as error:
            raise BadInput(f"--threshold: {name}={text} is not a number") from error
    return numbers
