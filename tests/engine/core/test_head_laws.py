"""Heads of every kind change nothing but speed, on six letters; a step has the law of its drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import Request
from driftguard_engine.engine import Engine

from tests.engine.core.eagle3_heads import load_target
from tests.engine.core.heads import KINDS, reference_of, save_random
from tests.engine.core.test_batch_independence import together
from tests.engine.core.test_losslessness import (
    LETTERS,
    PROMPT,
    cut_by_the_confidence_of_drawn_tokens,
    exact_distribution,
    p_value,
    q_of_tokens_that_the_map_cannot_reach,
    q_taken_after_the_draw,
)
from tests.engine.core.tiny import letter_tokenizer, new_module, request, save, serve, tokens

DRAFTS = 2


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("letters")
    save(root / "target", seed=5, tokenizer=letter_tokenizer(LETTERS), num_hidden_layers=1)
    target = load_target(root / "target")
    for kind in KINDS:
        features = {} if kind in ("mtp", "eagle") else {"features": (0,)}
        save_random(
            root / kind, kind, target, None if kind in ("mtp", "eagle") else [0, 1, 2, 3, 5], **features
        )
    return root


def engine_of(letters: Path, kind: str, **changes: Any) -> Engine:
    settings: dict[str, Any] = {"max_batch": 256, "max_length": 48, "max_waiting": 10_000} | changes
    draft = None if kind == "none" else str(letters / kind)
    return Engine(
        EngineConfig(str(letters / "target"), draft, kind, num_speculative_tokens=DRAFTS, **settings)
    )


def law_of_a_step(letters: Path, kind: str) -> dict[tuple[int, ...], float]:
    """Probability of what the first step behind PROMPT emits, accepted drafts and one token more, by
    enumeration of all drafts and of the rule of Leviathan, Kalman and Matias, in float64."""
    target = load_target(letters / "target")
    reference = reference_of(letters / kind, target)
    law = dict.fromkeys(
        (each for length in range(1, DRAFTS + 2) for each in product(range(LETTERS), repeat=length)), 0.0
    )
    for drafts in product(range(LETTERS), repeat=DRAFTS):
        with torch.inference_mode():
            told = target(torch.tensor([[*PROMPT, *drafts]])).logits[0, len(PROMPT) - 1 :]
        p, q = told.double().softmax(-1), reference.logits(PROMPT, drafts).double().softmax(-1)
        drawn = float(torch.tensor([q[place, token] for place, token in enumerate(drafts)]).prod())
        kept = 1.0
        for place, token in enumerate(drafts):
            rejecting = (p[place] - q[place]).clamp(min=0)
            accepting = min(1.0, float(p[place, token] / q[place, token])) if q[place, token] else 0.0
            for own, mass in enumerate((rejecting / rejecting.sum()).tolist()):
                law[(*drafts[:place], own)] += drawn * kept * (1 - accepting) * mass
            kept *= accepting
        for own, mass in enumerate(p[DRAFTS].tolist()):
            law[(*drafts, own)] += drawn * kept * mass
    return law


def observed(engine: Engine, count: int) -> tuple[Counter[tuple[int, ...]], Counter[tuple[int, ...]]]:
    """What first steps of so many requests emitted, and their first three tokens."""
    firsts: dict[str, tuple[int, ...]] = {}
    three: list[tuple[int, ...]] = []
    for seed in range(count):
        engine.submit(request(str(seed), PROMPT, 3, seed=seed, temperature=1.0))
    while engine.has_work():
        for output in engine.step():
            if output.token_ids:
                firsts.setdefault(output.request_id, tuple(output.token_ids))
            if output.finished is not None:
                three.append(output.finished.output_token_ids[:3])
    return Counter(firsts.values()), Counter(three)


def the_law_of_three() -> dict[tuple[int, ...], float]:
    module = new_module("llama", seed=5, vocabulary=LETTERS, num_hidden_layers=1)
    return exact_distribution(module, 1.0, 0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_joint_law_of_its_drafts_and_the_output_that_of_the_target(
    letters: Path, kind: str
) -> None:
    steps, three = observed(engine_of(letters, kind), 2000)
    found = p_value(steps, law_of_a_step(letters, kind)), p_value(three, the_law_of_three())
    print(f"{kind}: p-values of the first step and of three tokens: {found[0]:.3f}, {found[1]:.3f}")
    assert min(found) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        ("peagle", q_taken_after_the_draw),
        ("dflash", q_of_tokens_that_the_map_cannot_reach),
        ("dspark", q_taken_after_the_draw),
        ("dspark", cut_by_the_confidence_of_drawn_tokens),
    ],
)
def test_the_laws_are_missed_with_a_mistake_in_how_drafts_are_drawn(
    letters: Path, monkeypatch: pytest.MonkeyPatch, kind: str, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    _, three = observed(engine_of(letters, kind), 3000)
    assert p_value(three, the_law_of_three()) < 1e-6


def varied(count: int) -> list[Request]:
    rng = random.Random(7)
    return [
        request(
            f"r{index}",
            [rng.randrange(LETTERS) for _ in range(rng.choice([1, 2, 8, 9, 17]))],
            max_tokens=rng.choice([1, 2, 9, 16]),
            temperature=rng.choice([0.0, 0.7]),
            top_k=rng.choice([0, 0, 4]),
            seed=rng.randrange(2**40),
            num_speculative_tokens=rng.choice([None, 0, 1, 3, 7]),
            ignore_eos=True,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_output_does_not_depend_on_the_batch_and_is_plain_decoding_where_it_is_greedy(
    letters: Path, kind: str
) -> None:
    engine, asked = engine_of(letters, kind, max_batch=6, prefill_chunk_tokens=8), varied(14)
    done = {name: each for one in asked for name, each in serve(engine, one).items()}
    alone = {name: each.output_token_ids for name, each in done.items()}
    assert together(engine, asked, seed=1) == alone
    counts = [each.counts for each in done.values()]
    assert 0 < sum(each.accepted for each in counts) < sum(each.drafted for each in counts)
    greedy = [each for each in asked if each.params.temperature == 0]
    plain = tokens(engine_of(letters, "none"), *greedy)
    assert plain == {name: alone[name] for name in plain}
    assert len(greedy) > 4
