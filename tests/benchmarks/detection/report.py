"""The result as markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.detection.calibration import Calibrated
from tests.benchmarks.detection.competitors import COMPETITORS
from tests.benchmarks.detection.measure import DROPS, EQUAL_RATE, HORIZON, Delays, OursAndOracle, scenarios_of
from tests.benchmarks.detection.ours import Watched
from tests.benchmarks.detection.traffic import FAMILIES, SCENARIOS, Family, Scenario

A = 100_000
MOST_RATIO = {0.05: 1.35, 0.10: 1.35, 0.20: 2.2}
SMALL_SEGMENT = SCENARIOS[4:6]  # under a steady mix, under a wandering one
SMALL_SEGMENT_FACTOR = 5.0
OURS = "DriftGuard"
DELAYS = "Requests from the change to the alarm, median / 95th percentile"
COLUMNS = (OURS, *(detector.name for detector in COMPETITORS))

Compared = dict[tuple[str, str], tuple[Calibrated, list[list[Delays]]]]  # by detector and family


@dataclass(frozen=True, slots=True)
class Results:
    steady: dict[str, Watched]  # by family
    delays: dict[str, list[OursAndOracle]]  # by scenario, per drop
    compared: Compared


def report(results: Results) -> str:
    return "\n\n".join(
        [
            "## Nothing changed: requests to a false alarm at A = 100,000, theory threshold",
            _steady_table(results),
            "## Delay at A = 100,000, beside the exact oracle at the same realised rate",
            f"{DELAYS}; > {HORIZON:,}: none within that.",
            _delay_table(results),
            f"## All at the same realised rate: one false alarm in {EQUAL_RATE:,.0f} requests",
            f"{DELAYS}. Guessing at this rate has a median of {EQUAL_RATE * math.log(2):,.0f}.",
            _equal_rate_table(results),
            "## Calibration: mean requests to a false alarm that each detector realised (its threshold)",
            "Thresholds: log10 of A for DriftGuard, minus log10 of a probability for ADWIN, HDDM, KSWIN.",
            _calibration_table(results),
            "## Goals",
            _goals(results),
        ]
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _requests(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"> {HORIZON:,}" if math.isinf(value) else f"{value:,.0f}"


def _both(delays: Delays) -> str:
    return f"{_requests(delays.quantile(0.5))} / {_requests(delays.quantile(0.95))}"


def _steady_table(results: Results) -> str:
    head = ["traffic", "requests", "false alarms", "requests to one", "95% interval", ">= A", "µs per record"]
    rows = []
    for family in FAMILIES:
        watched = results.steady[family.name]
        alarms = watched.false_alarms
        low, high = alarms.interval
        until = "∞" if math.isinf(high) else f"{high:,.0f}"
        mean = f"{alarms.mean_time:,.0f}" if alarms.alarms else f"none in {alarms.watched:,}"
        cost = f"{watched.cpu_seconds / watched.folded * 1e6:.1f}"
        counts = [f"{alarms.watched:,}", str(alarms.alarms), mean, f"{low:,.0f} to {until}"]
        rows.append([family.name, *counts, "yes" if alarms.mean_time >= A else "NO", cost])
    return _table(head, rows)


def ratio(cell: OursAndOracle) -> float:
    return cell.ours.quantile(0.5) / cell.oracle.quantile(0.5)


def _delay_table(results: Results) -> str:
    head = ["scenario", "drop", OURS, "oracle", "ratio of medians", "goal", "met"]
    rows = []
    for scenario in SCENARIOS:
        for drop, cell in zip(DROPS, results.delays[scenario.name], strict=True):
            goal = MOST_RATIO[drop]
            met = "yes" if ratio(cell) <= goal else "NO"
            numbers = [_both(cell.ours), _both(cell.oracle), f"{ratio(cell):.2f}"]
            rows.append([scenario.name, f"{drop:.2f}", *numbers, f"<= {goal}", met])
    return _table(head, rows)


def _at_equal_rate(results: Results, name: str, scenario: Scenario) -> list[Delays]:
    place = scenarios_of(scenario.family).index(scenario)
    return results.compared[name, scenario.family.name][1][place]


def _equal_rate_table(results: Results) -> str:
    rows = []
    for scenario in SCENARIOS:
        for index, drop in enumerate(DROPS):
            cells = [_both(_at_equal_rate(results, name, scenario)[index]) for name in COLUMNS]
            oracle = _both(results.delays[scenario.name][index].oracle_at_equal_rate)
            rows.append([scenario.name, f"{drop:.2f}", oracle, *cells])
    return _table(["scenario", "drop", "oracle", *COLUMNS], rows)


def _calibration_table(results: Results) -> str:
    return _table(
        ["traffic", *COLUMNS],
        [[family.name, *(_calibration(results, name, family) for name in COLUMNS)] for family in FAMILIES],
    )


def _calibration(results: Results, name: str, family: Family) -> str:
    calibrated = results.compared[name, family.name][0]
    realised = calibrated.realised
    mean = f"{realised.mean_time:,.0f}" if realised.alarms else f"> {realised.watched:,}"
    return f"{mean} ({calibrated.threshold:.3g})"


def _goals(results: Results) -> str:
    rare = [name for name, watched in results.steady.items() if watched.false_alarms.mean_time < A]
    slow = [
        f"{scenario.name} {drop:.2f} ({ratio(cell):.2f})"
        for scenario in SCENARIOS
        for drop, cell in zip(DROPS, results.delays[scenario.name], strict=True)
        if not ratio(cell) <= MOST_RATIO[drop]
    ]
    lines = [
        f"- Requests to a false alarm at least A in every traffic: {_met(rare)}",
        f"- Median delay at most 1.35 (drops .05, .10) and 2.2 (drop .20) times the oracle's: {_met(slow)}",
    ]
    lines += [
        _small_segment_goal(results, scenario, index)
        for scenario in SMALL_SEGMENT
        for index in range(len(DROPS))
    ]
    return "\n".join(lines)


def _small_segment_goal(results: Results, scenario: Scenario, index: int) -> str:
    ours = _at_equal_rate(results, OURS, scenario)[index].quantile(0.5)
    best, name = min(
        (_at_equal_rate(results, detector.name, scenario)[index].quantile(0.5), detector.name)
        for detector in COMPETITORS
    )
    faster = f"more than {HORIZON / ours:.1f}" if math.isinf(best) else f"{best / ours:.1f}"
    met = "met" if min(best, HORIZON) >= SMALL_SEGMENT_FACTOR * ours else "NOT met"
    others = "every aggregate detector" if math.isinf(best) else f"the best aggregate detector ({name})"
    return (
        f"- {scenario.name}, drop of {DROPS[index]:.2f}, at the equal rate: {faster} times as fast as "
        f"{others}; at least {SMALL_SEGMENT_FACTOR:g}: {met}"
    )


def _met(missed: list[str]) -> str:
    return "met" if not missed else f"NOT met: {'; '.join(missed)}"
