"""The loop's tables."""

from __future__ import annotations

from collections.abc import Sequence

from tests.gpu.check.rows import (
    BatchTime,
    Breakdown,
    Findings,
    LoopModels,
    PeerSpeed,
    PlainTime,
    PrefixTime,
    SpeculativeTime,
    Synchronisations,
)
from tests.gpu.check.tables import NOT_YET, table

MOST_KERNELS = 14
_SPECULATIVE = (
    "acceptance",
    "measured",
    "B",
    "K",
    "tokens a step",
    "ms a step",
    "ms without",
    "tokens/s",
    "without",
    "speed-up",
)


def loop_section(found: Findings) -> list[str]:
    """Paragraphs."""
    return [
        _models(found),
        "### Without speculation",
        _plain(found),
        "### With speculation",
        table(_SPECULATIVE, [_speculative(row) for row in found.of(SpeculativeTime)]),
        "### Other engines",
        _peers(found),
        "### Batches",
        table(_SPECULATIVE, [_speculative(row) for row in found.of(BatchTime)]),
        "### Prompts that begin alike",
        _prefix(found),
        "### Synchronisations",
        _synchronisations(found.of(Synchronisations)),
        "### Parts of a step",
        *_breakdowns(found.of(Breakdown)),
    ]


def _models(found: Findings) -> str:
    models = found.newest(LoopModels)
    name = NOT_YET if models is None else models.name
    return (
        f"Synthetic models ({name}): every layer costs what a real one costs, but adds"
        " nothing, so that the next token follows from the newest alone; the draft has the target's logits"
        " with noise. `acceptance` is the mean of sum(min(p, q)) that the draft was made for, `measured` the"
        " part of the drafts that the engine accepted of those that it tested. One machine, one run,"
        " temperature 1, bfloat16; tokens per second are those of steps in which all requests decode."
    )


def _plain(found: Findings) -> str:
    row = found.newest(PlainTime)
    if row is None:
        return table((), [])
    cells = (
        f"{row.served.milliseconds:.3f}",
        f"{row.served.tokens_per_second:.1f}",
        f"{row.bytes / 1e9:.2f}",
        f"{row.bytes_per_second / 1e12:.2f}",
        f"{row.bound_milliseconds:.3f}",
        f"{row.of_bound:.1%}",
        f"{row.served.context:.0f}",
    )
    head = ("ms a token", "tokens/s", "GB a token", "TB/s of a copy", "ms of the bytes", "reached", "context")
    return table(head, [cells])


def _speculative(row: SpeculativeTime) -> Sequence[str]:
    served, plain = row.served, row.plain
    return (
        f"{row.stated:g}",
        "" if served.acceptance is None else f"{served.acceptance:.3f}",
        str(row.batch),
        f"{row.drafts} ({row.note})" if row.note else row.drafts,
        f"{served.tokens_per_step / row.batch:.2f}",
        f"{served.milliseconds:.2f}",
        f"{plain.milliseconds:.2f}",
        f"{served.tokens_per_second:.0f}",
        f"{plain.tokens_per_second:.0f}",
        f"{row.speedup:.2f}",
    )


def _peers(found: Findings) -> str:
    rows = []
    for peer in found.of(PeerSpeed):
        best = None if peer.stated is None else found.best(peer.stated)
        own = None if best is None else best.served.tokens_per_second
        known = own is not None and peer.tokens_per_second is not None
        rows.append(
            (
                peer.name,
                "" if peer.stated is None else f"{peer.stated:g}",
                NOT_YET if peer.tokens_per_second is None else f"{peer.tokens_per_second:.1f}",
                f"{(own or 0) / (peer.tokens_per_second or 1):.1f}" if known else "",
                peer.note,
            )
        )
    return table(("engine", "acceptance", "tokens/s", "ours / it", "how"), rows)


def _prefix(found: Findings) -> str:
    row = found.newest(PrefixTime)
    if row is None:
        return table((), [])
    cells = (
        str(row.prompt_tokens),
        str(row.reused_tokens),
        f"{row.new_milliseconds:.1f}",
        f"{row.known_milliseconds:.1f}",
        f"{row.speedup:.2f}",
    )
    head = ("prompt tokens", "of them known", "ms to the first token, none known", "some known", "speed-up")
    return table(head, [cells])


def _synchronisations(found: Sequence[Synchronisations]) -> str:
    rows = [
        (
            row.what,
            str(row.steps),
            row.refused or "nothing",
            row.uncounted or _calls(row.waits),
            f"{row.readbacks / row.steps:.2f}",
            f"{row.allocations / row.steps:.2f}",
        )
        for row in found
    ]
    head = ("steps of", "steps", "refused by torch", "waiting calls", "readbacks", "allocations")
    return table(head, rows)


def _calls(waits: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in waits.items()) or "0"


def _breakdowns(found: Sequence[Breakdown]) -> list[str]:
    if not found:
        return [table((), [])]
    groups = list(dict.fromkeys(group for row in found for group in row.groups))
    head = ("microseconds", *(row.what for row in found))
    rows = [(group, *(f"{row.groups.get(group, 0.0):.0f}" for row in found)) for group in groups]
    rows.append(("no kernel", *(f"{row.gaps_microseconds:.0f}" for row in found)))
    rows.append(("a step, unwatched", *(f"{1e3 * row.milliseconds:.0f}" for row in found)))
    return [table(head, rows), *(_kernels(row) for row in found)]


def _kernels(row: Breakdown) -> str:
    longest = [
        (kernel.name[:110], f"{kernel.count:g}", f"{kernel.microseconds:.1f}")
        for kernel in row.kernels[:MOST_KERNELS]
    ]
    launched = sum(kernel.count for kernel in row.kernels)
    head = (f"kernels of {row.what}: {launched:.0f} a step", "a step", "microseconds a step")
    return table(head, longest)
