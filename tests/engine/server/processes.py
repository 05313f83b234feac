"""The engine as a process of its own, with the options of `driftguard engine`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from driftguard_engine.__main__ import app
from driftguard_engine.drafters import factory
from driftguard_engine.models.loading import LoadedModel, load

from tests.forked import ForkedProcess, Main, forked


def engine_options(models: Path, *options: str) -> list[str]:
    """`models` holds target and poor; a later --draft wins."""
    pair = ["--target", str(models / "target"), "--draft", str(models / "poor")]
    return [*pair, "--threads", "1", *options]


def environment(**extra: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "DRIFTGUARD_API_KEY"} | extra


@contextmanager
def engine_process(models: Path, *options: str, **variables: str) -> Iterator[tuple[ForkedProcess, str, str]]:
    """The process, its URL and its ready line."""
    arguments = engine_options(models, "--port", "0", *options)
    with serving_process(engine_main, arguments, **variables) as found:
        yield found


@contextmanager
def serving_process(
    main: Main, arguments: Sequence[str], **variables: str
) -> Iterator[tuple[ForkedProcess, str, str]]:
    """A process whose first line says `on URL`, that URL and the line."""
    with TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        with forked(main, arguments, log, environment(**variables)) as process:
            ready = process.stdout.readline()
            assert ready, log.read_text()
            yield process, ready.split(" on ")[1].split()[0], ready


def engine_main(arguments: Sequence[str]) -> None:
    app(list(arguments), prog_name="driftguard engine")


def signalled_while_it_loads(arguments: Sequence[str]) -> None:
    """`driftguard engine` that gets the signal of the first argument between its two models."""
    number, *options = arguments

    def load_signalled(*given: Any, **named: Any) -> LoadedModel:
        os.kill(os.getpid(), int(number))
        return load(*given, **named)

    with mock.patch.object(factory, "load", load_signalled):
        engine_main(options)
