"""Same seed, same output, whatever else is in the batch: bit for bit, on both model paths."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from driftguard_engine.core import FinishedRequest, Request
from driftguard_engine.engine import Engine
from driftguard_engine.models import linear

from tests.engine.core.corpora import save_corpus
from tests.engine.core.tiny import drain, finished, request, tokens

PATHS = [
    ("llama", "auto"),
    ("odd_llama", "auto"),
    ("llama", "generic"),
    ("gpt2", "auto"),
    ("gpt_neox", "auto"),
]


def varied_requests(count: int) -> list[Request]:
    rng = random.Random(7)
    return [
        request(
            f"r{index}",
            [rng.randrange(256) for _ in range(rng.choice([1, 2, 7, 8, 9, 17, 40]))],
            max_tokens=rng.choice([1, 2, 9, 20]),
            temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
            top_k=rng.choice([0, 0, 5, 40]),
            top_p=rng.choice([1.0, 1.0, 0.8]),
            seed=rng.randrange(2**40),
            num_speculative_tokens=rng.choice([None, 0, 1, 3, 7]),
            ignore_eos=rng.random() < 0.5,
        )
        for index in range(count)
    ]


def together(engine: Engine, requests: list[Request], seed: int) -> dict[str, tuple[int, ...]]:
    return {name: each.output_token_ids for name, each in served_together(engine, requests, seed).items()}


def served_together(engine: Engine, requests: list[Request], seed: int) -> dict[str, FinishedRequest]:
    """All requests, in an order and at steps of their own."""
    rng = random.Random(seed)
    waiting, outputs = rng.sample(requests, len(requests)), []
    while waiting or engine.has_work():
        for _ in range(rng.randrange(4)):
            if waiting:
                engine.submit(waiting.pop())
        outputs += engine.step()
    return finished(outputs + drain(engine))


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3", "hybrid"])
@pytest.mark.parametrize(("kind", "path"), PATHS)
def test_output_does_not_depend_on_the_batch(
    new_engine: Callable[..., Engine], models: Path, tmp_path: Path, kind: str, path: str, drafter: str
) -> None:
    requests = varied_requests(14)
    draft: dict[str, str] = {}
    if drafter == "hybrid":
        answers = tokens(new_engine(kind, model_path=path), *requests[:5]).values()
        draft = {"corpus": save_corpus(tmp_path / "corpus", str(models / kind), list(answers))}
    engine = new_engine(kind, model_path=path, drafter=drafter, max_batch=6, **draft)
    alone: dict[str, tuple[int, ...]] = {}
    for each in requests:
        alone |= tokens(engine, each)
    assert together(engine, requests, seed=1) == alone
    assert together(engine, requests, seed=2) == alone


def test_output_does_not_depend_on_the_batch_on_a_machine_without_packed_layers(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_packed_is_independent", lambda *_: False)
    monkeypatch.setattr(linear, "_checked_shapes", {})
    requests = varied_requests(8)
    engine = new_engine("odd_llama")
    alone = {name: ids for each in requests for name, ids in tokens(engine, each).items()}
    assert together(engine, requests, seed=3) == alone


@pytest.mark.parametrize("drafter", ["draft_model", "ngram"])
def test_output_by_the_block_rule_does_not_depend_on_the_batch(
    new_engine: Callable[..., Engine], drafter: str
) -> None:
    requests = varied_requests(14)
    engine = new_engine(drafter=drafter, verification="block", max_batch=6)
    alone = {name: ids for each in requests for name, ids in tokens(engine, each).items()}
    assert together(engine, requests, seed=1) == alone
    by_token = tokens(new_engine(drafter=drafter, max_batch=6), *requests)
    assert {r.request_id for r in requests if alone[r.request_id] != by_token[r.request_id]}
    assert all(alone[r.request_id] == by_token[r.request_id] for r in requests if r.params.temperature == 0)


def test_another_seed_gives_another_output(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    outputs = tokens(engine, *(request(f"r{seed}", temperature=1.0, seed=seed) for seed in range(4)))
    assert len(set(outputs.values())) == 4
