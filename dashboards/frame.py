"""What all dashboards share: variables, links between them, annotations, rows of 24 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from dashboards.panels import DATASOURCE, Panel

TAG: Final = "driftguard"
FLEET, STREAM = "driftguard-fleet", "driftguard-stream"
ENGINE, RETRAINING = "driftguard-engine", "driftguard-retraining"
TITLES: Final = {FLEET: "Fleet", STREAM: "Stream", ENGINE: "Engine", RETRAINING: "Retraining"}
STATUS_PAGE: Final = "http://127.0.0.1:8200"

Annotation = dashboard.AnnotationQuery
Variable = (
    dashboard.DatasourceVariable | dashboard.QueryVariable | dashboard.TextBoxVariable
)  # all that the dashboards use


@dataclass(frozen=True, slots=True)
class Row:
    """`empty`: what a panel without data says, unless it says something else itself."""

    title: str
    panels: Sequence[Panel]
    empty: str


@dataclass(frozen=True, slots=True)
class Page:
    """One dashboard. `scrape`: a metric that every instance shown here has; its labels are the choices of
    jobs and instances. `choices`: variables beyond those that every dashboard has. `kept`: which of them the
    link to another dashboard carries along."""

    uid: str
    description: str
    scrape: str
    rows: Sequence[Row]
    choices: Sequence[Variable] = ()
    annotations: Sequence[dashboard.AnnotationQuery] = ()
    kept: Mapping[str, Sequence[str]] = field(default_factory=dict)


def build(page: Page) -> models.Dashboard:
    built = (
        dashboard.Dashboard(f"DriftGuard / {TITLES[page.uid]}")
        .uid(page.uid)
        .description(page.description)
        .tags([TAG])
        .readonly()
        .timezone("browser")
        .time("now-6h", "now")
        .refresh("30s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .variables([*_shared_variables(page.scrape), *page.choices])
        .links([*_links(page), _status_page()])
        .annotations(list(page.annotations))
    )
    number = 0
    for row in page.rows:
        number += 1
        built = built.with_row(dashboard.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            built = built.with_panel(panel.id(number))
    return _with_empty_texts(built.build(), [row.empty for row in page.rows])


def _with_empty_texts(made: models.Dashboard, empty: Sequence[str]) -> models.Dashboard:
    texts = iter(empty)
    for panel in made.panels or []:
        if isinstance(panel, models.RowPanel):
            text = next(texts)
        elif panel.field_config is not None and panel.field_config.defaults.no_value is None:
            panel.field_config.defaults.no_value = text
    return made


def choice(
    name: str, label: str, query: str, *, description: str, several: bool = True
) -> dashboard.QueryVariable:
    """A variable with values from Prometheus. `several`: any number of values, initially all."""
    variable = dashboard.QueryVariable(name).label(label).description(description).datasource(DATASOURCE)
    variable = variable.query(query).definition(query)
    variable = variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable = variable.sort(models.VariableSort.ALPHABETICAL_ASC)
    if several:
        everything = models.VariableOption(text="All", value="$__all", selected=True)
        variable = variable.multi(True).include_all(True).all_value(".+").current(everything)
    return variable


def annotation(
    name: str, expression: str, *, colour: str, title: str, text: str, value_is_time: bool = False
) -> dashboard.AnnotationQuery:
    """Marks on the time axis, from a query. `value_is_time`: the series' value is the time, in
    milliseconds; else the mark covers the time in which the query returns a value."""
    built = dashboard.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).hide(False)
    built = built.icon_color(colour).expr(expression).step("60s")
    return built.title_format(title).text_format(text).use_value_for_time(value_is_time)


def address(uid: str, *variables: str) -> str:
    """The URL of a dashboard, with the current values of these variables."""
    return f"/d/{uid}?{'&'.join(f'${{{name}:queryparam}}' for name in ('datasource', 'sidecar', *variables))}"


def _shared_variables(scrape: str) -> list[Variable]:
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    source = source.description("The Prometheus that scrapes DriftGuard.")
    chosen = 'job=~"$job"'
    return [
        source,
        choice("job", "Job", f"label_values({scrape}, job)", description="The scrape job."),
        choice(
            "instance",
            "Instance",
            f"label_values({scrape}{{{chosen}}}, instance)",
            description="The scraped processes.",
        ),
        dashboard.TextBoxVariable("sidecar")
        .label("Status page")
        .description(
            "Address at which the browser reaches the sidecar; the links to its web pages start with it."
        )
        .default_value(STATUS_PAGE)
        .current(models.VariableOption(text=STATUS_PAGE, value=STATUS_PAGE, selected=True)),
    ]


def _links(page: Page) -> list[dashboard.DashboardLink]:
    """The engine is scraped by another job than the sidecar, so its chosen job is not kept in links."""
    sidecars = {FLEET, STREAM, RETRAINING}
    found = []
    for uid, title in TITLES.items():
        if uid == page.uid:
            continue
        kept = ("job", "instance", *page.kept.get(uid, ())) if {uid, page.uid} <= sidecars else ()
        link = dashboard.DashboardLink(title).type(models.DashboardLinkType.LINK).url(address(uid, *kept))
        found.append(link.icon("dashboard").keep_time(True).tooltip(f"DriftGuard / {title}"))
    return found


def _status_page() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Status page").type(models.DashboardLinkType.LINK).url("${sidecar:raw}")
    return link.icon("external link").target_blank(True).tooltip("The sidecar's status page")
