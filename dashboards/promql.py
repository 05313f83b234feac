"""The few forms of PromQL queries that the dashboards use.

Every selector asks for the job and instance chosen on the dashboard. Several sidecars may share a database:
their counters add up, because only one folds a record, while their gauges say the same, so gauges are
maximised and never added. One that has lost the database goes on to show its last gauges: those are left out
while another one's are newer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

INTERVAL: Final = "$__rate_interval"
STEP: Final = "$__interval"
WHOLE: Final = "$__range"
SHOWN: Final = 20
LATER: Final = "1e12"  # more than whatever is ranked: seconds, or places
BEHIND_SECONDS: Final = 120  # more than a slow scrape and a slow round explain
PLACES: Final = ("cluster", "namespace")  # where Prometheus has such labels, sidecars of one share a database
CLUSTER: Final = ", ".join(PLACES)


def is_(label: str, value: str) -> str:
    return f'{label}="{value}"'


def any_of(label: str, *values: str) -> str:
    return f'{label}=~"{"|".join(values)}"'


def chosen(variable: str, label: str | None = None) -> str:
    """Matches the chosen values of a variable, which has the name of the label unless given."""
    return f'{label or variable}=~"${variable}"'


def series(name: str, *matchers: str) -> str:
    matched = ", ".join((chosen("job"), chosen("instance"), *matchers))
    return f"{name}{{{matched}}}"


def rate(name: str, *matchers: str) -> str:
    return f"rate({series(name, *matchers)}[{INTERVAL}])"


def summed_rate(name: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """Per second, summed over everything but `by`."""
    return f"{_over('sum', by)}({rate(name, *matchers)})"


def rise(name: str, over: str, *matchers: str, by: Sequence[str]) -> str:
    """How much a counter rose that follows the database, by it and by `by`: all its instances show the same,
    from their start on."""
    found, of = f"{series(name, *matchers)}[{over}]", (*PLACES, *by)
    return f"{_over('max', of)}(max_over_time({found})) - {_over('min', of)}(min_over_time({found}))"


def risen(name: str, *matchers: str, by: Sequence[str]) -> str:
    """The same for each step of a chart: the range reaches over several steps, and yet a rise is in one."""
    of, found = (*PLACES, *by), f"max_over_time({series(name, *matchers)}[{INTERVAL}]"
    now, before = (f"{_over('max', of)}({found}{shift}))" for shift in ("", f" offset {STEP}"))
    return f"clamp_min({now} - {before}, 0)"


def gauge(name: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """By instance, those of every instance."""
    found = series(name, *matchers)
    return f"{_over('max', by)}({found if 'instance' in by else _newest(found)})"


def total(name: str, *matchers: str, of: Sequence[str] = (), by: Sequence[str] = ()) -> str:
    """Of a gauge that counts something of a database, by `of` and `by`: the sum over the databases."""
    return f"{_over('sum', by)}({gauge(name, *matchers, by=(*PLACES, *by, *of))})"


def ratio(over: str, under: str, *matchers: str, by: Sequence[str] = ()) -> str:
    """Of two counters, as a ratio of sums; nothing while the denominator does not grow."""
    return f"{summed_rate(over, *matchers, by=by)} / ({summed_rate(under, *matchers, by=by)} > 0)"


def quantile(q: float, histogram: str) -> str:
    return f"histogram_quantile({q}, {summed_rate(f'{histogram}_bucket', by=('le',))})"


def age(timestamp_gauge: str) -> str:
    """Seconds since that time."""
    return f"time() - {timestamp_gauge}"


def ranked(name: str, label: str, values: Sequence[str], *matchers: str, by: Sequence[str]) -> str:
    """For a gauge that is 1 for one value of `label`: the place of that value in `values`, from 1."""
    selectors = [series(name, *matchers, is_(label, value)) for value in values]
    places = [f"{place} * ({selector} == 1)" for place, selector in enumerate(selectors, start=1)]
    found = " or ".join(places)
    return f"{_over('min', by)}({_newest(f'({found})')})"


def largest(expression: str, *, of: str | None = None, by: Sequence[str] = ()) -> str:
    """The SHOWN series whose value is the largest at the end of the time shown: no chart tells more apart.
    After them come those that had ended by then, as all have where the sidecar has died.
    `of`: another expression that decides, by whose labels `by` they are matched."""
    matched = f" on ({', '.join(by)})" if by else ""
    value = of or expression
    there, gone = (f"last_over_time(({value})[{over}] @ end())" for over in ("1m:30s", f"{WHOLE}:{INTERVAL}"))
    return f"{expression} and{matched} topk({SHOWN}, {there} or {gone} - {LATER})"


def _newest(gauges: str) -> str:
    """Without those of a sidecar whose gauges are older than another's."""
    refreshed = series("driftguard_gauges_last_refresh_timestamp_seconds")
    newest = f"max by ({CLUSTER}) ({refreshed})"
    behind = f"{newest} - on ({CLUSTER}) group_right () {refreshed} > {BEHIND_SECONDS}"
    return f"{gauges} unless on ({CLUSTER}, job, instance) ({behind})"


def _over(operation: str, by: Sequence[str]) -> str:
    return f"{operation} by ({', '.join(by)}) " if by else operation
