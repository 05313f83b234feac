"""Greedy output is the target's own on every kind of target; other questions: test_every_drafter.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from driftguard_engine.engine import Engine

from tests.engine.core.corpora import save_corpus
from tests.engine.core.tiny import plain_greedy, request, serve

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3", "hybrid"])
@pytest.mark.parametrize(
    ("kind", "path", "verification"),
    [("llama", "generic", "block"), ("gpt2", "auto", "token"), ("odd_llama", "auto", "token")],
)
def test_greedy_output_is_plain_greedy_decoding(
    new_engine: Callable[..., Engine],
    models: Path,
    tmp_path: Path,
    kind: str,
    path: str,
    verification: str,
    drafter: str,
) -> None:
    draft: dict[str, str] = {}
    if drafter == "hybrid":  # of the very answer, with an error in the middle
        answer = plain_greedy(kind, (1, 2, 3, 4) * 5, 40)
        documents = [(*answer[:15], 99, *answer[16:])]
        draft = {"corpus": save_corpus(tmp_path / "corpus", str(models / kind), documents)}
    engine = new_engine(kind, model_path=path, drafter=drafter, verification=verification, **draft)
    prompts = {"a": (7,), "b": (1, 2, 3, 4) * 5, "c": tuple(range(30, 60))}
    done = serve(
        engine,
        *(
            request(f"{name}{k}", prompt, 40, num_speculative_tokens=k)
            for name, prompt in prompts.items()
            for k in (0, 3, 8)
        ),
    )
    for name, prompt in prompts.items():
        expected = plain_greedy(kind, prompt, 40)
        for k in (0, 3, 8):
            assert done[f"{name}{k}"].output_token_ids == expected, (name, k)
    assert sum(each.counts.accepted for each in done.values()) > 0
    assert any(each.counts.accepted < each.counts.drafted for each in done.values())
