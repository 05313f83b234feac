"""Traffic for heads, and what each draft of it should have been drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.engine import Engine
from torch import Tensor

from tests.engine.core.eagle3_heads import Reference
from tests.engine.core.tiny import request

PROMPTS = {"one": (7,), "two": (5, 6), "chunk": tuple(range(9)), "long": (1, 2, 3, 4) * 6}


@dataclass(frozen=True, slots=True)
class Drafted:
    sequence: list[int]
    asked: int
    drafts: list[int]
    logits: Tensor  # [drafts, V]


def engine_of(target: Path, head: Path | None, drafter: str, **changes: Any) -> Engine:
    settings: dict[str, Any] = {"max_batch": 3, "prefill_chunk_tokens": 8} | changes
    return Engine(EngineConfig(str(target), None if head is None else str(head), drafter, **settings))


def traffic() -> list[Any]:
    """More requests than slots, of every way to draft; some prompts begin like others."""
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"num_speculative_tokens": 1}, {"max_tokens": 2}]
    return [
        request(f"{name}{way}", prompt, seed=way, **{"max_tokens": 14} | ways[way])
        for way in range(len(ways))
        for name, prompt in PROMPTS.items()
    ]


def check(drafted: list[Drafted], reference: Reference, least: int = 100) -> None:
    assert sum(len(each.drafts) for each in drafted) > least
    for each in drafted:
        assert len(each.drafts) == reference.drafts(each.sequence, each.asked), "drafts are missing"
        if each.drafts:
            expected = reference.logits(each.sequence, each.drafts)
            torch.testing.assert_close(each.logits, expected, rtol=1e-3, atol=1e-3)
