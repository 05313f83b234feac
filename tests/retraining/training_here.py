"""The real training, in the process that asks for it: one that has imported torch need not start another.

That it runs as a process of its own, which ends with its starter, is tested in test_run, test_kill and
test_end_to_end.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from driftguard_training.__main__ import main


def run_here(
    arguments: Sequence[str], log: Path, should_stop: Callable[[], bool]
) -> Generator[dict[str, Any], None, None]:
    """In place of training_process._run: the same events, all at the end."""
    with redirect_stdout(io.StringIO()) as printed:
        code = main(arguments)
    assert code == 0
    for line in printed.getvalue().splitlines():
        yield json.loads(line)
