"""The table that is printed, and kept in engine/bench/results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from driftguard_engine.kernels.layer_kernels import MOST_TOKENS_BY_KERNEL

from tests.gpu.check.benchmarks import Measured
from tests.gpu.check.loop.reporting import loop_section
from tests.gpu.check.peers import PeerTime
from tests.gpu.check.reaches import reaches
from tests.gpu.check.resources import Resources
from tests.gpu.check.tables import NOT_YET, table

RESULTS = Path(__file__).parents[3] / "engine" / "bench" / "results"


@dataclass(slots=True)
class Findings:
    """What one run found out, as far as it came."""

    machine: list[tuple[str, str]]
    resources: list[Resources] = field(default_factory=list)
    build: str = NOT_YET
    steps: list[tuple[str, str]] = field(default_factory=list)  # tests and checks: name, outcome
    measured: Measured = field(default_factory=Measured)
    quick: bool = False


def path_of(day: date, slug: str) -> Path:
    return RESULTS / f"{day.isoformat()}-{slug}.md"


def document(found: Findings, title: str) -> str:
    parts = [
        f"# {title}",
        "Written by `make gpu-check`. A number without a run is written as not yet measured.",
        *(["This was a quick run: fewer draws, fewer batches."] if found.quick else []),
        table(("", ""), found.machine),
        "## Reaches",
        table(
            ("what", "reach", "measured", ""),
            [(one.what, one.reach, one.measured, one.verdict) for one in reaches(found.measured)],
        ),
        "## Checks",
        table(("check", "outcome"), found.steps),
        "## Verification",
        _verification(found.measured),
        "## Linear layers",
        *_linear(found.measured),
        "## Peers",
        _peers(found.measured),
        "## Sampling settings",
        _sampling(found.measured),
        "## The loop",
        *loop_section(found.measured.loop),
        "## Kernels",
        f"Build: {found.build}.",
        _kernels(found.resources),
    ]
    return "\n\n".join(parts) + "\n"


def _verification(measured: Measured) -> str:
    bandwidth = measured.copy_bytes_per_second
    copied = NOT_YET if bandwidth is None else f"{bandwidth / 1e12:.2f} TB/s read and written"
    rows = [
        (
            str(row.batch),
            str(row.drafts),
            f"{row.cold:.1f}",
            f"{row.warm:.1f}",
            f"{row.bytes / 1e6:.1f}",
            f"{row.floor:.1f}",
            f"{row.over_floor:.2f}",
            f"{row.parts['row_statistics']:.1f}",
            f"{row.parts['verify_chain']:.1f}",
            f"{row.accepted:.2f}",
        )
        for row in measured.verify
    ]
    left_out = [f"{NOT_YET.capitalize()}, out of time: {'; '.join(measured.left_out)}."]
    how = (
        "bfloat16 logits, V = 128,256, temperature 1, microseconds in a CUDA graph, median. Cold: each"
        " call reads logits that the cache no longer holds; warm: the same ones again. The floor is the bytes"
        f" of K + 1 target rows and one draft row per request, at the bandwidth of a copy ({copied})."
    )
    return "\n\n".join(
        [
            how,
            table(
                (
                    "B",
                    "K",
                    "cold",
                    "warm",
                    "MB",
                    "floor",
                    "x floor",
                    "statistics",
                    "accept, draw",
                    "accepted",
                ),
                rows,
            ),
            *(left_out if measured.left_out else []),
        ]
    )


def _linear(measured: Measured) -> list[str]:
    rows = [
        (
            row.layer.name,
            f"{row.layer.size} x {row.layer.inner}",
            str(row.tokens),
            f"{row.kernel:.1f}",
            f"{row.library:.1f}",
            f"{row.floor / row.kernel:.0%}",
            f"{row.floor / row.library:.0%}",
        )
        for row in measured.linear
    ]
    how = (
        "bfloat16, M tokens, microseconds in a CUDA graph, median, weights that the cache no longer holds."
        " torch: `F.linear`, and for a gated layer the gate's own kernel after it. The bandwidth is that of a"
        " copy, for the bytes of weights, input and output. The engine leaves layers of more than"
        f" {MOST_TOKENS_BY_KERNEL} tokens to torch."
    )
    head = ("layer", "N x K", "M", "kernel", "torch", "kernel, of the bandwidth", "torch, of the bandwidth")
    return [how, table(head, rows)]


def _peers(measured: Measured) -> str:
    rows = [
        (str(row.batch), str(row.drafts), peer.name, _peer_time(peer), _ratio(peer, row.cold), peer.note)
        for row in measured.verify
        for peer in row.peers
    ]
    return table(("B", "K", "peer", "microseconds", "peer / verify", "how"), rows)


def _peer_time(peer: PeerTime) -> str:
    return NOT_YET if peer.microseconds is None else f"{peer.microseconds:.1f}"


def _ratio(peer: PeerTime, ours: float) -> str:
    return "" if peer.microseconds is None else f"{peer.microseconds / ours:.1f}"


def _sampling(measured: Measured) -> str:
    rows = [
        (
            row.name,
            str(row.batch),
            str(row.drafts),
            f"{row.verify:.1f}",
            f"{row.draw:.1f}",
            f"{row.draw_floor:.1f}",
            f"{row.draw / row.draw_floor:.2f}",
        )
        for row in measured.sampling
    ]
    return table(("sampling", "B", "K", "verify", "draw one draft", "its floor", "x floor"), rows)


def _kernels(found: Sequence[Resources]) -> str:
    rows = [
        (one.kernel, str(one.registers), str(one.stack_bytes), str(one.spill_bytes), str(one.shared_bytes))
        for one in found
    ]
    return table(("kernel", "registers", "stack bytes", "spilled bytes", "shared bytes"), rows)
