"""/alerts/rules.yaml: the alert rules for Prometheus, whose links lead to this sidecar."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from driftguard.alerting.rules.generate import kubernetes_manifest, rules_file
from driftguard.alerting.rules.parameters import RuleParameters
from driftguard.api.context import Context, get_context
from driftguard.errors import BadInput, BadSettings

router = APIRouter(tags=["health"])

YAML: Final = "application/yaml"  # RFC 9512
_DEFAULT: Final = RuleParameters()
_SETTINGS: Final = {"base_url": "alerting.external_url", "grafana_url": "alerting.grafana_url"}
_RULES: Final = {
    "content": {
        YAML: {"schema": {"type": "object"}, "example": {"groups": [{"name": "driftguard-recorded"}]}}
    }
}


class RulesQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal["prometheus", "kubernetes"] = Field(
        "prometheus", description="A rules file for Prometheus, or a PrometheusRule for its operator."
    )
    job_name: str = Field(_DEFAULT.job_name, description="Name of the scrape job of the sidecars.")
    cluster_label: list[str] = Field(
        list(_DEFAULT.cluster_labels),
        description="Labels that distinguish the clusters of one Prometheus: each is judged by itself, and "
        "alerts carry the labels.",
    )


@router.get("/alerts/rules.yaml", response_class=Response, responses={200: _RULES})
def alert_rules(
    query: Annotated[RulesQuery, Query()], request: Request, context: Annotated[Context, Depends(get_context)]
) -> Response:
    """Gives Prometheus the alert rules. Links lead to `alerting.external_url` and `alerting.grafana_url`;
    without the first, to the address of this request. `driftguard alert-rules` sets thresholds too."""
    alerting = context.settings.alerting
    try:
        parameters = RuleParameters(
            base_url=alerting.external_url or str(request.base_url),
            grafana_url=alerting.grafana_url,
            job_name=query.job_name,
            cluster_labels=tuple(query.cluster_label),
        )
    except BadInput as error:
        name, _, wrong = error.detail.partition(": ")
        if name in _SETTINGS:
            raise BadSettings(f"{_SETTINGS[name]}: {wrong}") from None
        raise BadInput(f"{name.replace('labels', 'label')}: {wrong}") from None
    make = kubernetes_manifest if query.format == "kubernetes" else rules_file
    return Response(make(parameters), media_type=YAML, headers={"Cache-Control": "no-store"})
