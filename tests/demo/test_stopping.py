"""What the demo does with a signal, and with words that look like markup."""

from __future__ import annotations

import asyncio
import io
import os
import signal
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
