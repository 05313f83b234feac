"""Causes named and drafts retrained on labelled faults, by the evidence at hand; keeps the tables it prints.

    python -m tests.benchmarks.bench_diagnosis [--seeds 20] [--first-seed 0] [--quick]

Every case goes through the product's own `diagnose`, and through what an automatic retraining accepts. Faults
marked "engine" were run in the real engine with the bundled models; the others are simulated on the figures
of the healthy engine. The first run measures those figures, which takes some ten minutes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from driftguard.diagnosis import Diagnosis, diagnose
from driftguard.retraining.due import why_not
from driftguard.settings.model import DiagnosisSettings
from tests.benchmarks.diagnosis.cases import ProbesAtHand, case
from tests.benchmarks.diagnosis.engine_figures import figures
from tests.benchmarks.diagnosis.engine_scores import by_answer
from tests.benchmarks.diagnosis.faults import FAULTS, Fault

RESULTS = Path(__file__).parent / "results" / "diagnosis.md"
AT_HAND: Final[Mapping[str, tuple[ProbesAtHand, bool, bool]]] = {  # (probes, captures, their scores)
    "probes and captures": ("twice", True, False),
    "probes and scored captures": ("twice", True, True),
    "probes only": ("twice", False, False),
    "neither": ("none", False, False),
    "captures only": ("none", True, False),
    "scored captures only": ("none", True, True),
    "probes asked once, captures": ("once", True, False),
    "probes asked once": ("once", False, False),
}


@dataclass(frozen=True, slots=True)
class Judged:
    fault: Fault
    at_hand: str
    diagnosis: Diagnosis

    @property
    def is_right(self) -> bool:
        return self.diagnosis.cause in self.fault.right

    @property
    def is_wrong(self) -> bool:
        """Names a cause that is not the truth; "unknown" names none."""
        return not self.is_right and self.diagnosis.cause != "unknown"

    @property
    def is_retrained(self) -> bool:
        return why_not(self.diagnosis, DiagnosisSettings().least_confidence) is None


def judged(seeds: Sequence[int], faults: Sequence[Fault], processes: int) -> Iterator[Judged]:
    """In the order of the faults; each seed in the process that has time."""
    by_answer()  # measured once, before the others read them
    with ProcessPoolExecutor(processes) as pool:
        pending = [(fault, pool.submit(_diagnosed, fault.name, seed)) for fault in faults for seed in seeds]
        for fault, future in pending:
            yield from (Judged(fault, name, diagnosis) for name, diagnosis in future.result())


def _diagnosed(fault: str, seed: int) -> list[tuple[str, Diagnosis]]:
    made = case(next(one for one in FAULTS if one.name == fault), seed, figures(), by_answer())
    return [
        (name, diagnose(made.without(probes=probes, captures=captures, scores=scores)))
        for name, (probes, captures, scores) in AT_HAND.items()
    ]


def summary(found: Sequence[Judged]) -> list[str]:
    lines = [
        "| at hand | right cause | a wrong cause named | no drift, yet retrained | true drift retrained |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in AT_HAND:
        of = [one for one in found if one.at_hand == name]
        other = [one for one in of if not one.fault.is_drift]
        drift = [one for one in of if one.fault.is_drift]
        cells = (
            _share(one.is_right for one in of),
            _share(one.is_wrong for one in of),
            _share(one.is_retrained for one in other),
            _share(one.is_retrained for one in drift),
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def confusion(found: Sequence[Judged], name: str) -> list[str]:
    """One row per fault: the causes named, the most frequent first."""
    lines = [f"### {name[0].upper()}{name[1:]}", "", "| fault | made | right is | named | retrained |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for fault in FAULTS:
        of = [one for one in found if one.at_hand == name and one.fault is fault]
        if not of:
            continue
        named = Counter(f"{one.diagnosis.cause} ({one.diagnosis.confidence})" for one in of)
        told = ", ".join(f"{cause} {count}" for cause, count in named.most_common())
        made = "engine" if fault.measured else "simulated"
        retrained = sum(one.is_retrained for one in of)
        lines.append(f"| {fault.name} | {made} | {' or '.join(fault.right)} | {told} | {retrained} |")
    return [*lines, ""]


def _share(of: Iterator[bool]) -> str:
    values = list(of)
    return f"{100 * sum(values) / len(values):.1f}% ({sum(values)} of {len(values)})" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--fault", help="only faults whose name has this in it; writes nothing")
    parser.add_argument("--quick", action="store_true", help="2 seeds, and writes nothing")
    options = parser.parse_args()
    count = 2 if options.quick else options.seeds
    seeds = range(options.first_seed, options.first_seed + count)
    faults = [fault for fault in FAULTS if (options.fault or "") in fault.name]
    found = list(judged(seeds, faults, options.processes))
    least = DiagnosisSettings().least_confidence
    told = f"{len(faults)} faults by {count} seeds ({seeds.start} to {seeds.stop - 1})."
    lines = [
        f"{told} Retrained: automatically, which needs {least} confidence.",
        "",
        *summary(found),
        "",
        *(line for name in AT_HAND for line in confusion(found, name)),
    ]
    print("\n".join(lines))
    if not options.quick and not options.fault:
        RESULTS.write_text("# Causes named on labelled faults\n\n" + "\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
