"""False alarms and delays where observations depend on each other, or acceptance on what their records tell;
prints tables and keeps them.

    python -m tests.benchmarks.bench_dependent [--streams 15] [--quick] [--only covariates]

Every stream has 20,000 observations without a change. An incident that recovers by itself is over, and the
stream goes on, so that one stream can raise several false alarms. Delays of windows are of streams that ran
for RUN_IN of them. What is held back in young streams is what keeps their false alarms few: the last table
shows what it costs where requests are independent.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from driftguard.detection import (
    DetectorConfig,
    DriftClosed,
    DriftOpened,
    Finding,
    ObservationBatch,
    StreamState,
    fold,
)
from driftguard.incidents.opening import from_finding, repeated
from driftguard.store.tables import Incident, Stream
from tests.benchmarks.detection.covariates import COVARIATES, Covariate
from tests.benchmarks.detection.dependent import (
    DEPENDENT,
    FEW_AN_HOUR,
    FEW_REQUESTS,
    INDEPENDENT,
    LIFETIME_TOLD,
    Dependent,
)
from tests.benchmarks.detection.traffic import Change

SEED = 20_261_124
LENGTH = 20_000
RUN_IN, HORIZON, RUNS = 1_500, 5_760, 30
YOUNG_RUN_INS, DROPS, YOUNG_HORIZON = (500, 1_000, 2_000, 4_000), (0.05, 0.1, 0.2), 3_000
DEPENDENCE, TOLD = "Observations that depend on each other", "Acceptance that follows what records tell"
_FOLDER = Path(__file__).parent / "results"
RESULTS = {DEPENDENCE: _FOLDER / "dependent.md", TOLD: _FOLDER / "covariates.md"}
CONFIG = DetectorConfig()
FEW_AN_HOUR_ROW = 200  # of their seeds: beside those of DEPENDENT and of COVARIATES


def alarms(batch: ObservationBatch, state: StreamState) -> Iterator[DriftOpened]:
    return (finding for finding in _findings(batch, state) if isinstance(finding, DriftOpened))


def pages(batch: ObservationBatch) -> tuple[int, int]:
    """(alarms, those among them that are pages): a rise is none, and neither is a fall that repeats one of a
    day or a week before."""
    stream, now = Stream(id=1), datetime.now(UTC)
    earlier: dict[int, Incident] = {}
    paged = 0
    for finding in _findings(batch, StreamState()):
        if isinstance(finding, DriftOpened):
            incident, _ = from_finding(stream, finding, now, 1.0)
            past = [one for one in earlier.values() if one.resolved_at is not None]
            paged += finding.direction == "down" and repeated(incident, past) is None
            earlier[finding.ordinal] = incident
        if isinstance(finding, DriftClosed) and not finding.left:
            earlier[finding.opened_ordinal].resolved_at = datetime.fromtimestamp(finding.ended_at, UTC)
    return len(earlier), paged


def _findings(batch: ObservationBatch, state: StreamState) -> Iterator[Finding]:
    for start in range(0, len(batch), 512):
        state, findings = fold(CONFIG, state, batch[start : start + 512])
        yield from findings


def told(family: Covariate, row: int, streams: int) -> str:
    found = [pages(family.batch([SEED, row, number], LENGTH)) for number in range(streams)]
    total = streams * LENGTH
    alarms_and_pages = [sum(counts) for counts in zip(*found, strict=True)]
    rates = [f"{total / count:,.0f}" if count else "none" for count in alarms_and_pages]
    return f"| {family.name} | {alarms_and_pages[0]} in {total:,} | {rates[0]} | {rates[1]} |"


def false_alarms(family: Dependent, row: int, streams: int, of: str = "") -> str:
    found = [
        len(list(alarms(family.batch([SEED, row, number], LENGTH), StreamState())))
        for number in range(streams)
    ]
    total = streams * LENGTH
    rate = f"{total / sum(found):,.0f}" if sum(found) else f"none in {total:,}"
    return f"| {of or family.name} | {sum(found)} in {total:,} | {rate} |"


def delay(family: Dependent, drop: float, runs: int, run_in: int = RUN_IN, horizon: int = HORIZON) -> str:
    delays: list[float] = []
    before = 0
    for number in range(runs):
        batch = family.batch([SEED, 99, number], run_in + horizon, Change(run_in, drop))
        first = next(alarms(batch, StreamState()), None)
        if first is not None and first.ordinal <= run_in:
            before += 1
        else:
            delays.append(math.inf if first is None else first.ordinal - run_in)
    missed = sum(math.isinf(value) for value in delays)
    late = np.quantile(delays, 0.9, method="higher")
    return f"{drop} | {np.median(delays):.0f} | {late:.0f} | {missed} of {len(delays)} | {before} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="too little of everything, and writes nothing")
    parser.add_argument("--only", choices=("dependence", "covariates"))
    options = parser.parse_args()
    streams, runs = (2, 3) if options.quick else (options.streams, RUNS)
    for title, lines in (
        *([_of_dependence(streams, runs)] if options.only != "covariates" else []),
        *([_of_covariates(streams)] if options.only != "dependence" else []),
    ):
        print("\n".join(lines))
        if not options.quick:
            RESULTS[title].write_text(f"# {title}\n\n" + "\n".join(lines) + "\n")


def _of_dependence(streams: int, runs: int) -> tuple[str, list[str]]:
    return DEPENDENCE, [
        *_head(streams),
        *(false_alarms(family, row, streams) for row, family in enumerate((*DEPENDENT, *LIFETIME_TOLD))),
        "",
        "The same where an hour has few requests.",
        "",
        "| traffic | seconds between requests | false alarms | observations per false alarm |",
        "| --- | --- | --- | --- |",
        *(
            false_alarms(family, row, streams, of=f"{family.name} | {family.apart:g}")
            for row, family in enumerate(FEW_AN_HOUR, start=FEW_AN_HOUR_ROW)
        ),
        "",
        f"A drop after {RUN_IN:,} windows, {runs} streams, watched for {HORIZON:,} more (16 hours).",
        "",
        "| traffic | drop | median windows | nine in ten | missed | alarm before |",
        "| --- | --- | --- | --- | --- | --- |",
        *(f"| {family.name} | {delay(family, drop, runs)}" for family, drop in FEW_REQUESTS),
        "",
        f"A drop in a young stream of independent requests, {runs} streams, {YOUNG_HORIZON:,} more watched.",
        "",
        "| after requests | drop | median requests | nine in ten | missed | alarm before |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {run_in:,} | {delay(INDEPENDENT, drop, runs, run_in, YOUNG_HORIZON)}"
            for run_in in YOUNG_RUN_INS
            for drop in DROPS
        ),
    ]


def _of_covariates(streams: int) -> tuple[str, list[str]]:
    rows = enumerate(COVARIATES, start=len(DEPENDENT))
    head = _head(streams)
    head[2] = f"{head[2]} observations per page |"
    head[3] = f"{head[3]} --- |"
    return TOLD, [*head, *(told(family, row, streams) for row, family in rows)]


def _head(streams: int) -> list[str]:
    return [
        f"Seed {SEED}, A = {CONFIG.false_alarm_every:,.0f}, {streams} streams of {LENGTH:,} observations.",
        "",
        "| traffic | false alarms | observations per false alarm |",
        "| --- | --- | --- |",
    ]


if __name__ == "__main__":
    main()
