"""What making a graph leaves behind where it fails."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driftguard_engine.decode.graphs import Runners
from driftguard_engine.decode.step import Shape


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_the_memory_of_a_broken_capture_is_used_by_no_other(
    monkeypatch: pytest.MonkeyPatch, kind: type[RuntimeError]
) -> None:
    """The device is played: captures fail on it. Without memory there is no step at all."""
    pools = count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    used: list[int] = []

    def fail(runners: Runners, step: object, batch: int, idle: object, pool: int, side: object) -> None:
        used.append(pool)
        raise kind("broken")

    monkeypatch.setattr(Runners, "_captured", fail)
    runners, step = (
        Runners(torch.device("cuda")),
        SimpleNamespace(table=SimpleNamespace(spare=4), shape=Shape(2, 0, narrows=False)),
    )
    made: list[Any] = []
    for _ in range(2):
        try:
            made.append(runners.runner(step))  # type: ignore[arg-type]
        except torch.OutOfMemoryError:
            continue
    assert used == [0, 1]
    assert (len(made), runners.capture_failure) == (
        (0, None) if kind is torch.OutOfMemoryError else (2, "RuntimeError: broken")
    )
