"""/dashboards/{name}: a dashboard in Grafana, which runbooks link without knowing the address."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import RedirectResponse

from driftguard.alerting.places import DASHBOARD
from driftguard.api.context import Context, get_context
from driftguard.api.pages.errors import PageRoute
from driftguard.errors import NotFound

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/dashboards/{name}")
def dashboard(name: str, context: Annotated[Context, Depends(get_context)]) -> RedirectResponse:
    """404: no such dashboard, or nobody said where Grafana is."""
    if name not in DASHBOARD:
        raise NotFound(f"there is no dashboard {name!r}; the dashboards are: {', '.join(DASHBOARD)}")
    grafana_url = context.settings.alerting.grafana_url
    if grafana_url is None:
        raise NotFound("alerting.grafana_url is not set: the address of the Grafana that has the dashboards")
    return RedirectResponse(f"{grafana_url.rstrip('/')}/d/{DASHBOARD[name]}")
