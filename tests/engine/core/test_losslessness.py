"""Speculation changes nothing but speed: greedy token for token, sampling in distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.drafters.hybrid import HybridDrafter
from driftguard_engine.engine import Engine
from driftguard_engine.kernels import steps
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.distribution import TokenDistributions
from driftguard_engine.kernels.reference.sampling import EVERY
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.speculation import ReferenceVerification
from scipy import stats

from tests.engine.core.corpora import save_corpus
from tests.engine.core.eagle3_heads import load_target, save_random_head
from tests.engine.core.tiny import letter_tokenizer, new_module, plain_greedy, request, save, serve

pytestmark = pytest.mark.slow

LETTERS = 6
PROMPT = (1, 2, 3, 1, 2)


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3", "ngram", "suffix", "hybrid"])
@pytest.mark.parametrize(
    ("kind", "path", "verification"),
    [
        ("llama", "auto", "token"),
        ("llama", "auto", "block"),
        ("llama", "generic", "token"),
        ("gpt2", "auto", "token"),
        ("odd_llama", "auto", "token"),
    ],
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
    if drafter in ("suffix", "hybrid"):  # of the very answer, with an error in the middle
        answer = plain_greedy(kind, (1, 2, 3, 4) * 5, 40)
        documents = [(*answer[:15], 99, *answer[16:])]
        field = "draft" if drafter == "suffix" else "corpus"
        draft = {field: save_corpus(tmp_path / "corpus", str(models / kind), documents)}
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


def exact_distribution(
    module: Any, temperature: float, top_k: int, top_p: float
) -> dict[tuple[int, ...], float]:
    """Probability of every first three tokens, by enumeration in float64."""

    def distribution(ids: tuple[int, ...]) -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            logits = module(torch.tensor([ids])).logits[0, -1].double().numpy() / temperature
        order = np.argsort(-logits, kind="stable")
        if top_k:
            logits[order[top_k:]] = -np.inf
        p = np.exp(logits - logits.max())
        p /= p.sum()
        before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        p[order[before >= top_p]] = 0.0
        normalised: np.ndarray[Any, Any] = p / p.sum()
        return normalised

    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        joint = {
            (*drawn, token): mass * step[token]
            for drawn, mass in joint.items()
            for step in [distribution(PROMPT + drawn)]
            for token in range(LETTERS)
            if mass > 0
        }
    return joint


def p_value(observed: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]) -> float:
    """Chi-square, cells expected fewer than 5 times merged into one."""
    total = observed.total()
    assert not [drawn for drawn in observed if distribution[drawn] == 0], (
        "a token that the filter excludes was emitted"
    )
    large = [drawn for drawn in distribution if distribution[drawn] * total >= 5]
    counts = [observed[drawn] for drawn in large]
    expected = [distribution[drawn] * total for drawn in large]
    rest = total - sum(expected)
    if rest > 1e-6:
        counts.append(total - sum(counts))
        expected.append(rest)
    return float(stats.chisquare(counts, expected, sum_check=False).pvalue)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("letters")
    for name, noise in (("target", 0.0), ("draft", 0.1)):
        save(root / name, seed=5, noise=noise, tokenizer=letter_tokenizer(LETTERS), num_hidden_layers=1)
    save_corpus(root / "corpus", str(root / "target"), [(1, 2, 3, 4, 5, 0, 2), (1, 2, 5, 3), (2, 4, 4, 1)])
    target = load_target(root / "target")
    save_random_head(root / "head", target, range(LETTERS), (0,))
    save_random_head(root / "pruned_head", target, [0, 2, 3, 5], (0,))
    return root


def first_three(engine: Engine, count: int, **params: Any) -> Counter[tuple[int, ...]]:
    done = serve(
        engine, *(request(str(seed), PROMPT, 4, seed=seed, **params) for seed in range(count))
    ).values()
    assert sum(each.counts.accepted for each in done) > 0
    return Counter(each.output_token_ids[:3] for each in done)


DRAFTERS: dict[str, dict[str, Any]] = {
    "draft_model": {"draft": "draft"},
    "ngram": {"draft": "draft"},
    "eagle3": {"draft": "head"},
    "pruned": {"draft": "pruned_head", "drafter": "eagle3"},
    "suffix": {"draft": "corpus"},
    "hybrid": {"draft": "draft", "corpus": "corpus"},
    "hybrid_with_head": {"draft": "head", "corpus": "corpus", "drafter": "hybrid"},
    "hybrid_with_past": {"draft": "draft", "drafter": "hybrid", "past": 500},
}


def letter_engine(letters: Path, drafter: str, verification: str = "token") -> Engine:
    parts = DRAFTERS[drafter]
    return Engine(
        EngineConfig(
            target=str(letters / "target"),
            draft=str(letters / parts["draft"]),
            corpus=str(letters / parts["corpus"]) if "corpus" in parts else None,
            drafter=parts.get("drafter", drafter),
            verification=verification,  # type: ignore[arg-type]
            max_batch=256,
            max_length=32,
            max_waiting=10_000,
            num_speculative_tokens=2,
            ngram_min_tokens=1,
            suffix_min_match=2,
            suffix_past_tokens=parts.get("past", 0),
        )
    )


# Both rules are compared with enumeration in tests/engine/verify, by every sampling.
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "verification"),
    [(1.0, 0, 1.0, "token"), (1.6, 4, 1.0, "token"), (1.3, 0, 0.85, "token"), (1.6, 4, 1.0, "block")],
)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampled_output_has_the_targets_law(
    letters: Path, drafter: str, temperature: float, top_k: int, top_p: float, verification: str
) -> None:
    module = new_module("llama", seed=5, vocabulary=LETTERS, num_hidden_layers=1)
    engine = letter_engine(letters, drafter, verification)
    observed = first_three(engine, 3000, temperature=temperature, top_k=top_k, top_p=top_p)
    assert p_value(observed, exact_distribution(module, temperature, top_k, top_p)) > 1e-3


def drawn_from_another_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "draw_drafts", lambda logits, *_: logits.argmax(-1))


def q_taken_after_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drawn token then counts as likelier than it was when it was drawn."""
    draw = ReferenceVerification.draw

    def draw_and_raise(self: ReferenceVerification, step: int) -> None:
        draw(self, step)
        tokens = self.draft_tokens[:, step : step + 1].clamp(min=0)
        logits = self.draft_logits[:, step].scatter_add(1, tokens, torch.ones(len(tokens), 1))
        self.draft_logits[:, step] = logits
        given = reference.draft_distributions(logits[:, np.newaxis].numpy(), self._sampling)
        self._distributions.put(EVERY, slice(step, step + 1), given)

    monkeypatch.setattr(ReferenceVerification, "draw", draw_and_raise)


def q_of_tokens_that_the_map_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are never drawn, but have a part of q that is verified by."""
    draw = ReferenceVerification.draw

    def draw_and_fill(self: ReferenceVerification, step: int) -> None:
        draw(self, step)
        logits = self.draft_logits[:, step].clamp(min=0)
        self.draft_logits[:, step] = logits
        given = reference.draft_distributions(logits[:, np.newaxis].numpy(), self._sampling)
        self._distributions.put(EVERY, slice(step, step + 1), given)

    monkeypatch.setattr(ReferenceVerification, "draw", draw_and_fill)


def cut_by_the_confidence_of_drawn_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain ends before the first token that was drawn with a probability below a third."""
    draw = ReferenceVerification.draw

    def draw_and_cut(self: ReferenceVerification, step: int) -> None:
        draw(self, step)
        tokens = self.draft_tokens[:, step : step + 1]
        q = self.draft_logits[:, step].softmax(-1).gather(1, tokens.clamp(min=0))
        tokens[q < 1 / 3] = -1

    monkeypatch.setattr(ReferenceVerification, "draw", draw_and_cut)


def hybrid_that_drafts_all_rows(
    guesses_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], certain: bool
) -> Callable[[pytest.MonkeyPatch], None]:
    """The model draws for every row, then guesses_of(guesses, draws) says which rows are guessed after all.
    certain: they are verified as guesses, else by the model's distribution."""

    def draft(
        self: HybridDrafter, rows: RowState, verification: ReferenceVerification, launcher: None
    ) -> None:
        tokens = verification.draft_tokens
        self.model.draft(rows, verification, launcher)
        found = self._suffix.look_up(rows, tokens.shape[1], self._least_match)
        chosen = ((found >= 0).sum(1) == rows.drafted) & guesses_of(found, tokens) & (rows.drafted > 0)
        index = chosen.nonzero()[:, 0].tolist()
        if certain:
            verification._guessed[index] = True
            known = TokenDistributions.certain(verification._sampling, tokens.shape[1], LETTERS)
            at = np.array(index, np.int64)
            verification._distributions.put(at, EVERY, known.rows(at))
        tokens[index] = found[index]
        steps.feed(launcher, rows, tokens, 0, tokens.shape[1])

    return lambda monkeypatch: monkeypatch.setattr(HybridDrafter, "draft", draft)


guesses_verified_by_the_models_q = hybrid_that_drafts_all_rows(
    lambda guesses, draws: torch.ones(len(guesses), dtype=torch.bool), certain=False
)
guesses_chosen_after_the_draw = hybrid_that_drafts_all_rows(
    lambda guesses, draws: guesses[:, 0] == draws[:, 0], certain=True
)


@pytest.mark.parametrize(
    ("drafter", "plant"),
    [
        ("draft_model", drawn_from_another_law),
        ("eagle3", drawn_from_another_law),
        ("eagle3", q_taken_after_the_draw),
        ("eagle3", cut_by_the_confidence_of_drawn_tokens),
        ("pruned", q_of_tokens_that_the_map_cannot_reach),
        ("hybrid", drawn_from_another_law),
        ("hybrid", q_taken_after_the_draw),
        ("hybrid", guesses_verified_by_the_models_q),
        ("hybrid", guesses_chosen_after_the_draw),
    ],
)
def test_the_law_is_missed_with_a_mistake_in_how_drafts_are_drawn(
    letters: Path,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    plant(monkeypatch)
    module = new_module("llama", seed=5, vocabulary=LETTERS, num_hidden_layers=1)
    observed = first_three(letter_engine(letters, drafter), 3000, temperature=1.0)
    assert p_value(observed, exact_distribution(module, 1.0, 0, 1.0)) < 1e-6


def test_the_hybrid_of_these_tests_keeps_the_law_where_every_row_is_drawn(
    letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what is caught above is the mistake, not the way in which it is planted."""
    hybrid_that_drafts_all_rows(
        lambda guesses, draws: torch.zeros(len(guesses), dtype=torch.bool), certain=True
    )(monkeypatch)
    module = new_module("llama", seed=5, vocabulary=LETTERS, num_hidden_layers=1)
    observed = first_three(letter_engine(letters, "hybrid"), 3000, temperature=1.0)
    assert p_value(observed, exact_distribution(module, 1.0, 0, 1.0)) > 1e-3


def test_all_sequences_of_three_are_enumerated(letters: Path) -> None:
    module = new_module("llama", seed=5, vocabulary=LETTERS, num_hidden_layers=1)
    distribution = exact_distribution(module, 1.0, 0, 1.0)
    assert set(distribution) == set(itertools.product(range(LETTERS), repeat=3))
    assert sum(distribution.values()) == pytest.approx(1.0)
