"""The kinds of panels, each with its queries, unit and description. The dashboards fill them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from types import MappingProxyType
from typing import Any, Final, TypeVar

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards import colours, promql
from dashboards.words import Words

Query = tuple[str, str]  # PromQL, and how its series are called: words with {{labels}}
Panel = timeseries.Panel | stat.Panel | table.Panel | statetimeline.Panel
AnyPanel = TypeVar("AnyPanel", timeseries.Panel, stat.Panel, table.Panel, statetimeline.Panel)
Properties = Mapping[str, object]  # id of a field's property -> its value

MIN_COLUMN_PX: Final = 80  # so that eleven columns fit into a window; Grafana's 150 pushes the last ones out
COUNTED: Final = ("none", "short", "cps", "ops", "reqps")  # else an axis of zeros goes up to 100
DATASOURCE: Final = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def lines(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    words: Words = MappingProxyType({}),
    width: int = 12,
    height: int = 8,
) -> timeseries.Panel:
    """Curves over time. Gaps stay gaps: no traffic is not an acceptance of 0. `words`: for series that are
    named after a state."""
    one_each = not any("{{" in name for _, name in queries)
    modes = common_models.LegendDisplayMode
    few = one_each or words  # in a table, more than two would have to be scrolled to
    legend = common.VizLegendOptions().show_legend(True).calcs([] if one_each else ["lastNotNull"])
    legend = legend.display_mode(modes.LIST if few else modes.TABLE)
    legend = legend.placement(common_models.LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    panel = _common(timeseries.Panel(), title, description, width, height).unit(unit)
    panel = panel.legend(legend).tooltip(tooltip.sort(common_models.SortOrder.DESCENDING))
    if unit in COUNTED:
        panel = panel.axis_soft_min(0).axis_soft_max(1)
    panel = panel.line_width(1).show_points(common_models.VisibilityMode.AUTO).span_nulls(False)
    panel = panel.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
    for letter, (expression, name) in zip(ascii_uppercase, queries, strict=False):
        panel = panel.with_target(_query(letter, expression).legend_format(name).range())
    if one_each:
        for (_, name), shade in zip(queries, colours.SERIES, strict=False):
            panel = where(panel, name, colour(shade))
    return _worded(panel, words)


def bars(title: str, description: str, *queries: Query, unit: str, words: Words) -> timeseries.Panel:
    """Counts of rare events, stacked."""
    panel = lines(title, description, *queries, unit=unit, words=words)
    stacking = common.StackingConfig().mode(common_models.StackingMode.NORMAL)
    return panel.draw_style(common_models.GraphDrawStyle.BARS).stacking(stacking).fill_opacity(80).min(0)


def shares(title: str, description: str, parts: str, whole: str, name: str) -> timeseries.Panel:
    """Fractions of a total over time. `whole`: the total, one series without labels."""
    part = f"{parts} / on () group_left () ({whole} > 0)"
    panel = lines(title, description, (part, name), unit="percentunit")
    stacking = common.StackingConfig().mode(common_models.StackingMode.NORMAL)
    return panel.stacking(stacking).fill_opacity(60).min(0).max(1)


def number(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    bad_above: float | None = None,
    colour: str = colours.MAIN,
    words: Words = MappingProxyType({}),
    width: int = 4,
    height: int = 4,
) -> stat.Panel:
    """Current numbers. Above `bad_above` in the colour BAD."""
    steps = [models.Threshold(value=None, color=colour if bad_above is None else colours.GOOD)]
    if bad_above is not None:
        steps.append(models.Threshold(value=bad_above, color=colours.BAD))
    thresholds = dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
    panel = _common(stat.Panel(), title, description, width, height).unit(unit).thresholds(thresholds)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel = panel.graph_mode(common_models.BigValueGraphMode.NONE)
    for letter, (expression, name) in zip(ascii_uppercase, queries, strict=False):
        panel = panel.with_target(_query(letter, expression).legend_format(name).instant())
    return _worded(panel, words)


def states(
    title: str,
    description: str,
    *queries: Query,
    mappings: list[models.ValueMapping],
    width: int = 24,
    height: int = 8,
) -> statetimeline.Panel:
    """A band per series that changes its colour and word with the state."""
    panel = _common(statetimeline.Panel(), title, description, width, height).unit("none").mappings(mappings)
    panel = panel.show_value(common_models.VisibilityMode.AUTO).merge_values(True).fill_opacity(80)
    panel = panel.legend(common.VizLegendOptions().show_legend(False))
    panel = panel.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    for letter, (expression, name) in zip(ascii_uppercase, queries, strict=False):
        panel = panel.with_target(_query(letter, expression).legend_format(name).range())
    return panel


def rows_of(
    title: str,
    description: str,
    columns: Mapping[str, str],
    labels: Mapping[str, str],
    sort_by: str,
    *,
    descending: bool = False,
    leading: str = "",
    labels_only: bool = False,
    width: int = 24,
    height: int = 8,
) -> table.Panel:
    """A table: one row per combination of `labels` (label -> heading), one column per query of `columns`
    (heading -> PromQL). All queries have to keep the same labels, or their rows would not be merged.
    `leading`: the column of values in front of the labels. `labels_only`: the values are hidden."""
    panel = _common(table.Panel(), title, description, width, height).unit("none")
    panel = where_like(panel.min_width(MIN_COLUMN_PX), ".*", {"noValue": "–"})  # of a cell; of a table: Row
    panel = panel.sort_by([common.TableSortByFieldState().display_name(sort_by).desc(descending)])
    letters = ascii_uppercase[: len(columns)]
    for letter, expression in zip(letters, columns.values(), strict=True):
        target = _query(letter, expression).format(PromQueryFormat.TABLE).instant()
        panel = panel.with_target(target)
    values = ["Value"] if len(columns) == 1 else [f"Value #{letter}" for letter in letters]
    shown = dict(zip(values, columns, strict=True))
    first = {value: heading for value, heading in shown.items() if heading == leading}
    names = {**first, **labels, **shown}
    organized = {
        "excludeByName": {"Time": True, **dict.fromkeys(values, labels_only)},
        "indexByName": {name: index for index, name in enumerate(names)},
        "renameByName": names,
    }
    panel = panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    return panel.with_transformation(models.DataTransformerConfig(id_val="organize", options=organized))


def process(scrape: str) -> list[Panel]:
    """CPU and memory of each instance with the metric `scrape`: if all jobs are chosen, Prometheus has the
    processes of other programs too."""
    by = ("job", "instance")
    ours = f"and on (job, instance) {promql.series(scrape)}"
    return [
        lines(
            "CPU time",
            "Seconds of CPU time per second, per process: 1 is one core.",
            (f"{promql.summed_rate('process_cpu_seconds_total', by=by)} {ours}", "{{instance}}"),
            unit="none",
        ),
        lines(
            "Memory",
            "Resident memory, per process.",
            (f"{promql.gauge('process_resident_memory_bytes', by=by)} {ours}", "{{instance}}"),
            unit="bytes",
        ),
    ]


def where(panel: AnyPanel, field: str, properties: Properties) -> AnyPanel:
    """Settings of one series or column, by its displayed name."""
    values = [models.DynamicConfigValue(id_val=name, value=value) for name, value in properties.items()]
    panel.override_by_name(field, values)
    return panel


def where_like(panel: AnyPanel, pattern: str, properties: Properties) -> AnyPanel:
    """The same for every series or column whose name matches."""
    values = [models.DynamicConfigValue(id_val=name, value=value) for name, value in properties.items()]
    panel.override_by_regexp(pattern, values)
    return panel


def colour(value: str) -> Properties:
    return {"color": {"mode": "fixed", "fixedColor": value}}


def dashed(value: str) -> Properties:
    return {**colour(value), "custom.lineStyle": {"fill": "dash", "dash": [8, 6]}}


def filled(words: Sequence[models.ValueMapping]) -> Properties:
    """A table's cell in the colour of its state, aligned left (Grafana aligns numbers, such as ranks,
    right)."""
    cell = {"type": "color-background", "mode": "basic"}
    return {"mappings": list(words), "custom.cellOptions": cell, "custom.align": "left"}


def link(title: str, url: str) -> Properties:
    return {"links": [{"title": title, "url": url, "targetBlank": False}]}


def _worded(panel: AnyPanel, words: Words) -> AnyPanel:
    for state, (word, shade) in words.items():
        panel = where(panel, state, {"displayName": word, **colour(shade)})
    return panel


def _common(panel: AnyPanel, title: str, description: str, width: int, height: int) -> AnyPanel:
    panel.title(title).description(description).datasource(DATASOURCE).span(width).height(height)
    return panel


def _query(letter: str, expression: str) -> Any:
    return prometheus.Dataquery().ref_id(letter).datasource(DATASOURCE).expr(expression)
