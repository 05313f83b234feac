"""What the demo does with a signal, and with words that look like markup."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from driftguard.demo.stopping import ENDING, Stopped, Stops
from driftguard.demo.view import Screen


@pytest.fixture
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
def test_a_signal_ends_requests_also_where_it_interrupts_a_callback() -> None:
    """An event loop passes most exceptions of its callbacks to a log, and goes on."""

    async def requests() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.2)

    Stops()
    with pytest.raises(Stopped) as stopped:
        asyncio.run(requests())
    assert stopped.value.number == signal.SIGINT


LATE = """
import os, signal
from driftguard.demo.stopping import Stops

class Late:
    def __del__(self, kill=os.kill, own=os.getpid(), number=signal.SIGTERM):
        kill(own, number)

late = Late()  # lives until the modules are torn down
Stops().end()
"""


def test_a_signal_in_the_last_moment_of_the_process_changes_no_exit_code() -> None:
    assert subprocess.run([sys.executable, "-c", LATE], check=False).returncode == 0


def test_what_a_stage_tells_is_shown_as_it_is() -> None:
    console, told = (
        Console(width=200, file=io.StringIO(), record=True),
        "pip install 'driftguard-llm[engine]' [/x]",
    )
    screen = Screen(console)
    screen.step(told)
    with screen.stage("retrain", "Retrain") as stage:
        stage.note = told
    assert console.export_text().count(told) == 2
