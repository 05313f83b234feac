"""python -m tests.chaos [--seed N] [--rounds N] [--only NAME ...] [--output FILE]

Attacks a sidecar that is started as users start it, and prints a table of what is counted afterwards. Takes
about a quarter of an hour on two cores; every case is bounded in time. Exit code 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from pathlib import Path

import structlog
from rich.console import Console

from tests.chaos.cases import CASES
from tests.chaos.row import Row, as_markdown, table_of


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=float, default=1.0, help="times the usual number of rounds")
    parser.add_argument("--only", nargs="*", choices=sorted(CASES), help="these cases alone")
    parser.add_argument("--output", type=Path, help="where the table is written as Markdown")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing that was started is left behind
    # The log of this process' own folds, made to compare, is not the sidecar's.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print(f"seed {options.seed}", flush=True)
    rows = []
    for name in options.only or CASES:
        case, rounds = CASES[name]
        begun = time.monotonic()
        try:
            row = case(options.seed, max(1, round(rounds * options.rounds)))
        except Exception as error:  # noqa: BLE001 (the other cases are still worth running)
            row = Row(name, "stopped by an error", wrong=[f"{type(error).__name__}: {error}"[:300]])
        seconds = time.monotonic() - begun
        if row is None:
            print(f"{name}: not possible on this machine", flush=True)
            continue
        print(f"{name}: {seconds:.0f} s; wrong: {'; '.join(row.wrong) or 'nothing'}", flush=True)
        rows.append(row)
    Console(width=220).print(table_of(rows))
    if options.output:
        options.output.write_text(as_markdown(rows))
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
