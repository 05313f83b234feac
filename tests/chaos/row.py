"""One row of the table: what was done, what was counted afterwards, and what of it is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.table import Table

from tests.chaos.accounts import Accounts
from tests.chaos.sidecar import Watch

HEALTHZ_SECONDS: Final = 1.0
MEMORY_MB: Final = 300.0
RECOVERY_SECONDS: Final = 60.0


@dataclass(slots=True)
class Row:
    """`recoveries`: seconds from when the obstacle was gone until a record was acknowledged and the sidecar
    ready. `pages`: how many of how many planted falls were told."""

    case: str
    did: str
    accounts: Accounts | None = None
    pages: tuple[int, int] | None = None
    recoveries: list[float] = field(default_factory=list)
    watch: Watch | None = None
    wrong: list[str] = field(default_factory=list)

    def judge(self) -> Row:
        """Adds to `wrong` each number that misses its limit."""
        if self.accounts is not None and not self.accounts.are_right:
            self.wrong.append(f"records: {self.accounts}")
        if self.accounts is not None and not self.accounts.acknowledged:
            self.wrong.append("nothing was acknowledged, so nothing was shown")
        if self.pages is not None and self.pages[0] != self.pages[1]:
            self.wrong.append(f"{self.pages[0]} of {self.pages[1]} falls were told")
        if any(seconds > RECOVERY_SECONDS for seconds in self.recoveries):
            self.wrong.append(f"recovery took {max(self.recoveries):.0f} s")
        if self.watch is not None:
            if self.watch.most_memory_mb > MEMORY_MB:
                self.wrong.append(f"{self.watch.most_memory_mb:.0f} MB of memory")
            if self.watch.p99_seconds > HEALTHZ_SECONDS:
                self.wrong.append(f"/healthz took {self.watch.p99_seconds:.1f} s")
            if not self.watch.seconds:
                self.wrong.append("/healthz was never asked")
        return self


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title="What was counted after each attack")
    for name in ("case", "done", "acknowledged", "lost", "doubled", "rollups off", "states off"):
        table.add_column(name)
    for name in ("falls told", "recovery s", "/healthz p99 ms", "memory MB", "wrong"):
        table.add_column(name)
    for row in rows:
        table.add_row(*cells(row))
    return table


def cells(row: Row) -> list[str]:
    counted = row.accounts
    records = (
        [counted.acknowledged, counted.lost, counted.doubled, counted.rollups_off, counted.states_off]
        if counted
        else ["-"] * 5
    )
    return [
        row.case,
        row.did,
        *map(str, records),
        "-" if row.pages is None else f"{row.pages[0]} of {row.pages[1]}",
        f"{max(row.recoveries):.1f}" if row.recoveries else "-",
        f"{1_000 * row.watch.p99_seconds:.0f}" if row.watch else "-",
        f"{row.watch.most_memory_mb:.0f}" if row.watch else "-",
        "; ".join(row.wrong) or "nothing",
    ]


def as_markdown(rows: Sequence[Row]) -> str:
    head = [str(column.header) for column in table_of([]).columns]
    lines = [head, ["---"] * len(head), *map(cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
