"""The document that is made of a run's rows."""

from __future__ import annotations

from collections.abc import Sequence

from tests.gpu.check.loop.reporting import loop_section
from tests.gpu.check.reaches import reaches
from tests.gpu.check.rows import (
    Bandwidth,
    Begun,
    BuildTime,
    Checked,
    Counters,
    Ended,
    Findings,
    LeftOut,
    LinearTime,
    Machine,
    PeerTime,
    Resources,
    SamplingTime,
    VerifyTime,
)
from tests.gpu.check.tables import NOT_YET, table


def document(found: Findings, title: str) -> str:
    machine = found.newest(Machine)
    parts = [
        f"# {title}" if machine is None else f"# {machine.gpu}, {title}",
        f"Written by `make gpu-check` from the rows beside it. A number without a run is {NOT_YET}.",
        table(("", ""), [] if machine is None else machine.lines()),
        "## Reaches",
        table(
            ("what", "reach", "measured", ""),
            [(one.what, one.reach, one.measured, one.verdict) for one in reaches(found)],
        ),
        "## Parts",
        _parts(found),
        "## Checks",
        table(("check", "", "outcome"), [_check(row) for row in found.of(Checked)]),
        "## Verification",
        _verification(found),
        "## Linear layers",
        *_linear(found.of(LinearTime)),
        "## Peers",
        _peers(found.of(PeerTime)),
        "## Sampling settings",
        _sampling(found.of(SamplingTime)),
        "## The loop",
        *loop_section(found),
        "## Counters of Nsight Compute",
        *_counters(found.of(Counters)),
        "## Kernels",
        _build(found.newest(BuildTime)),
        _kernels(found.of(Resources)),
    ]
    return "\n\n".join(parts) + "\n"


def _parts(found: Findings) -> str:
    ended = {row.part: row for row in found.of(Ended)}
    rows = [
        (row.part, f"{row.at_seconds:.0f}", f"{row.limit_seconds:.0f}", *_ending(ended.get(row.part)))
        for row in found.of(Begun)
    ]
    left_out = [row.what for row in found.of(LeftOut)]
    told = table(("part", "begun at", "limit", "seconds", "outcome"), rows)
    return f"{told}\n\n{NOT_YET.capitalize()}, out of time: {'; '.join(left_out)}." if left_out else told


def _ending(row: Ended | None) -> tuple[str, str]:
    """Of a part; None: the whole run was ended inside it."""
    return ("", "did not end") if row is None else (f"{row.seconds:.0f}", row.outcome)


def _check(row: Checked) -> tuple[str, str, str]:
    return row.what, "FAILED" if row.failed else "", row.outcome


def _verification(found: Findings) -> str:
    bandwidth = found.newest(Bandwidth)
    copied = (
        NOT_YET if bandwidth is None else f"{bandwidth.bytes_per_second / 1e12:.2f} TB/s read and written"
    )
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
        for row in found.of(VerifyTime)
    ]
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
        ]
    )


def _linear(measured: Sequence[LinearTime]) -> list[str]:
    rows = [
        (
            row.layer,
            f"{row.size} x {row.inner}",
            str(row.tokens),
            f"{row.kernel:.1f}",
            f"{row.library:.1f}",
            f"{row.floor / row.kernel:.0%}",
            f"{row.floor / row.library:.0%}",
        )
        for row in measured
    ]
    how = (
        "bfloat16, M tokens, microseconds in a CUDA graph, median, weights that the cache no longer holds."
        " torch: `F.linear`, and for a gated layer the gate's own kernel after it. The bandwidth is that of a"
        " copy, for the bytes of weights, input and output."
    )
    head = ("layer", "N x K", "M", "kernel", "torch", "kernel, of the bandwidth", "torch, of the bandwidth")
    return [how, table(head, rows)]


def _peers(measured: Sequence[PeerTime]) -> str:
    rows = [
        (
            str(row.batch),
            str(row.drafts),
            row.name,
            NOT_YET if row.microseconds is None else f"{row.microseconds:.1f}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.accepted is None else f"{row.accepted:.2f}",
            row.note,
        )
        for row in measured
    ]
    return table(("B", "K", "peer", "microseconds", "peer / verify", "accepted", "timed"), rows)


def _sampling(measured: Sequence[SamplingTime]) -> str:
    rows = [
        (
            row.name,
            str(row.batch),
            str(row.drafts),
            f"{row.verify:.1f}",
            ", ".join(f"{name} {took:.1f}" for name, took in row.parts.items()),
            f"{row.draw:.1f}",
            f"{row.draw_floor:.1f}",
            f"{row.draw / row.draw_floor:.2f}",
        )
        for row in measured
    ]
    head = ("sampling", "B", "K", "verify", "its kernels apart", "draw one draft", "its floor", "x floor")
    return table(head, rows)


def _counters(measured: Sequence[Counters]) -> list[str]:
    if not measured:
        return [table((), [])]
    head = ("", *(row.kernel for row in measured))
    names = list(dict.fromkeys(name for row in measured for name in row.values))
    rows = [
        (name, *(f"{row.values[name]:g}" if name in row.values else "" for row in measured)) for name in names
    ]
    return [table(head, [("", *(row.what for row in measured)), *rows])]


def _build(time: BuildTime | None) -> str:
    if time is None:
        return f"Build: {NOT_YET}."
    return (
        f"Build: {time.first_start_seconds:.1f} s to compile and load at the first start,"
        f" {time.later_start_seconds:.2f} s from the cache."
    )


def _kernels(found: Sequence[Resources]) -> str:
    rows = [
        (one.kernel, str(one.registers), str(one.stack_bytes), str(one.spill_bytes), str(one.shared_bytes))
        for one in found
    ]
    return table(("kernel", "registers", "stack bytes", "spilled bytes", "shared bytes"), rows)
