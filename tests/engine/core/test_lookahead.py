"""Lookahead decoding in the engine: guesses and window, greedy output, the target's law, reuse, swaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import InvalidModel
from driftguard_engine.drafters.lookahead import LookaheadDrafter
from driftguard_engine.engine import Engine
from driftguard_engine.kernels.reference import philox
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.speculation import TreeVerification, point_masses

from tests.engine.core.eagle3_heads import load_target
from tests.engine.core.engine_laws import exact_distribution, p_value
from tests.engine.core.every_drafter import LETTERS, PROMPT
from tests.engine.core.tiny import letter_tokenizer, new_module, plain_greedy, request, save, serve, tokens
from tests.engine.verify.distributions import Distribution, assert_distribution, runs_of, tables_of
from tests.engine.verify.test_trees import CASE

PROMPTS = {"a": (7,), "b": (1, 2, 3, 4) * 5, "c": tuple(range(30, 60))}
W, N, G = 4, 4, 3


def engine_of(target: Path, drafter: str = "lookahead", **settings: Any) -> Engine:
    sizes = {"lookahead_window": W, "lookahead_ngram": N, "lookahead_candidates": G}
    settings = {"max_batch": 4, "prefill_chunk_tokens": 8} | sizes | settings
    return Engine(EngineConfig(str(target), drafter=drafter, **settings))


class PlainLookahead:
    """The method for one request, by transformers' own forward over the whole text and each context."""

    def __init__(self, module: Any, text: Sequence[int]) -> None:
        self._module = module
        begins = [column * len(text) // W for column in range(W)]
        self._levels = [[text[(begin + level) % len(text)] for begin in begins] for level in range(N - 1)]
        self._pool: dict[int, list[tuple[int, ...]]] = {}

    def guesses(self, newest: int, depth: int) -> set[tuple[int, ...]]:
        known = self._pool.get(newest, [])
        return {ngram[:length] for ngram in known for length in range(1, depth + 1)}

    def contexts(self) -> list[tuple[int, ...]]:
        """Of the last level: what each column sees behind the newest token, itself included."""
        first, *others = self._levels
        return [(*first[1 : column + 1], *(level[column] for level in others)) for column in range(W)]

    def refine(self, text: Sequence[int]) -> None:
        contexts = self.contexts()
        longest = max(map(len, contexts))
        texts = torch.tensor([[*text, *each, *[0] * (longest - len(each))] for each in contexts])
        ends = torch.tensor([len(text) + len(each) - 1 for each in contexts])
        with torch.inference_mode():
            likeliest = self._module(texts).logits[torch.arange(W), ends].argmax(-1).tolist()
        self._levels[0][0] = text[-1]
        self._levels.append(likeliest)
        for first, *ngram in zip(*self._levels, strict=True):
            known = self._pool.setdefault(first, [])
            known[:] = [*(each for each in known if each != tuple(ngram)), tuple(ngram)][-G:]
        del self._levels[0]


def ways(tree: TreeVerification, row: int) -> list[tuple[int, ...]]:
    """Of each column that the row has: the tokens from the newest one, exclusive, down to it; else ()."""
    found: list[tuple[int, ...]] = []
    tokens, parents = tree.tokens[row].tolist(), (tree._parents[row, 1:] - 1).tolist()
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token) if token >= 0 else ())
    return found


def steps_are_those_of_the_method(
    target: Path, kind: str, monkeypatch: pytest.MonkeyPatch, path: str = "auto"
) -> bool:
    """Guesses and window of every step, one request after another in one slot; whether the output is plain
    greedy decoding, and no more is accepted than is guessed."""
    module, count = load_target(target), 24
    read: list[tuple[tuple[int, ...], TreeVerification]] = []
    draft_tree = LookaheadDrafter.draft_tree

    def recorded(self: LookaheadDrafter, rows: RowState, tree: TreeVerification) -> None:
        draft_tree(self, rows, tree)
        read.append((tuple(rows.state.token_ids[rows.slots[0], : rows.lengths[0]].tolist()), tree))

    same, accepted = True, 0
    with monkeypatch.context() as patched:
        patched.setattr(LookaheadDrafter, "draft_tree", recorded)
        engine = engine_of(target, model_path=path, max_batch=1)
        for prompt in PROMPTS.values():
            for k in (1, 6):
                read.clear()
                done = serve(engine, request("r", prompt, count, num_speculative_tokens=k))["r"]
                same &= done.output_token_ids == plain_greedy(kind, prompt, count)
                same &= done.counts.accepted <= done.counts.drafted
                accepted += done.counts.accepted
                plain = PlainLookahead(module, read[0][0])
                for text, tree in read:
                    found, probes = ways(tree, 0), set(tree.probes)
                    guessed = {way for column, way in enumerate(found) if way and column not in probes}
                    depth = min(k, N - 1, len(prompt) + count - len(text) - 1)
                    same &= guessed == plain.guesses(text[-1], depth)
                    same &= [found[column] for column in tree.probes[-W:]] == plain.contexts()
                    plain.refine(text)
    return same and accepted > 5


@pytest.mark.parametrize(("kind", "path"), [("llama", "auto"), ("llama", "generic"), ("gpt2", "auto")])
def test_each_step_guesses_and_reads_what_the_method_says_and_output_is_plain_greedy(
    models: Path, monkeypatch: pytest.MonkeyPatch, kind: str, path: str
) -> None:
    assert steps_are_those_of_the_method(models / kind, kind, monkeypatch, path)


def window_rows_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeVerification, "probe", TreeVerification.guess)


def window_rows_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = TreeVerification.verify

    def with_probes(self: TreeVerification, logits: torch.Tensor) -> Any:
        probes, self.probes = self.probes, []
        found = verify(self, logits)
        self.probes = probes
        return found

    monkeypatch.setattr(TreeVerification, "verify", with_probes)


def window_of_the_request_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LookaheadDrafter, "forget", lambda *_: None)


def window_that_sees_its_own_column_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = TreeVerification.probe

    def behind_the_newest(self: TreeVerification, tokens: torch.Tensor, parents: list[int]) -> range:
        return probe(self, tokens, [-1] if tokens.shape[1] == 1 else parents)

    monkeypatch.setattr(TreeVerification, "probe", behind_the_newest)


@pytest.mark.parametrize(
    "mistake",
    [
        window_rows_guessed,
        window_rows_accepted,
        window_of_the_request_before,
        window_that_sees_its_own_column_alone,
    ],
)
def test_a_mistake_is_caught(
    models: Path, mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    assert not steps_are_those_of_the_method(models / "llama", "llama", monkeypatch)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("letters") / "target"
    save(directory, seed=5, tokenizer=letter_tokenizer(LETTERS), num_hidden_layers=1)
    return directory


def letter_engine(letters: Path) -> Engine:
    return engine_of(letters, max_batch=256, max_length=32, max_waiting=10_000, prefill_chunk_tokens=128)


def first_three(engine: Engine, count: int) -> Counter[tuple[int, ...]]:
    asked = (request(str(seed), PROMPT, 4, seed=seed, temperature=1.0) for seed in range(count))
    return Counter(each[:3] for each in tokens(engine, *asked).values())


def is_of_the_law(letters: Path, observed: Counter[tuple[int, ...]], *shaping: Any) -> bool:
    module = new_module("llama", seed=5, vocabulary=LETTERS, num_hidden_layers=1)
    p = p_value(observed, exact_distribution(module, *shaping))
    print(f"p = {p:.3g}")
    assert p > 1e-3 or p < 1e-6, f"p = {p} tells neither"
    return p > 1e-3


def assert_a_step_has_the_enumerated_law() -> None:
    """The joint law of how many are accepted and of the tokens, three deep, beside other tokens as probes."""
    rows = 10_000
    ngrams: list[tuple[int, ...]] = [(3, 1, 2), (3, 1, 0), (1, 4, 4), (3, 0, 3)]
    seed, before = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    sampling = SamplingBatch.of(torch.ones(rows), torch.zeros(rows).long(), torch.ones(rows), seed)
    drafted, places = torch.full((rows,), 3, dtype=torch.int32), np.full(rows, 9)
    tree = TreeVerification(sampling, places, drafted, np.full(rows, 99), CASE.size)
    LookaheadDrafter(2, 4, 4)._guess(tree, [ngrams] * rows)
    tree.probe(torch.tensor([[2, 4]]).expand(rows, -1), [-1, -1])
    inputs = tree.inputs(before)
    found = tree.verify(CASE.target[0, inputs.token_ids])
    assert inputs.parents[0] == (-1, 0, 0, 1, 2, 1, 3, 3, 4, 5, 0, 0)
    p = tables_of(CASE)[0][0]
    guessed = {ngram[:depth] for ngram in ngrams for depth in range(1, 4)}
    law: Distribution = {}
    going: Distribution = {(): 1.0}
    while going:
        run, mass = going.popitem()
        for token, share in enumerate(p[run[-1] if run else 0]):
            longer = (*run, token)
            (going if longer in guessed else law)[longer] = mass * share
    assert torch.equal((found.tokens >= 0).sum(1), found.accepted + 1)
    counts = {tuple(t for t in run if t >= 0): count for run, count in runs_of(found.tokens).items()}
    assert_distribution(counts, law, "lookahead")


@pytest.mark.slow
def test_a_step_has_the_enumerated_law() -> None:
    assert_a_step_has_the_enumerated_law()


@pytest.mark.slow
def test_an_accepted_row_of_the_window_is_not_in_the_enumerated_law(monkeypatch: pytest.MonkeyPatch) -> None:
    window_rows_accepted(monkeypatch)
    with pytest.raises(AssertionError, match="rules out"):
        assert_a_step_has_the_enumerated_law()


def guessing_by_noise(monkeypatch: pytest.MonkeyPatch, *, drawn: bool) -> None:
    """The first token is guessed by the word that verifies drawn tokens, and verified as a guess or as drawn
    from a law that is certain of it."""

    def guess(_self: LookaheadDrafter, tree: TreeVerification, ngrams: list[Any]) -> None:
        words = tree._noise.words(np.arange(len(ngrams)), 0, philox.ACCEPT)
        token = torch.from_numpy(np.where(philox.uniforms_of(words[0]) < 0.5, 1, 2))
        if drawn:
            tree.draw(point_masses(token, LETTERS, torch.float32), [-1], [1])
        else:
            tree.guess(token[:, None], [-1])

    monkeypatch.setattr(LookaheadDrafter, "_guess", guess)


@pytest.mark.slow
def test_a_guess_that_reads_the_noise_of_the_step_is_caught_where_it_could_matter(
    letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def observed() -> Counter[tuple[int, ...]]:
        return first_three(letter_engine(letters), 300)

    plain = observed()
    guessing_by_noise(monkeypatch, drawn=True)
    assert not is_of_the_law(letters, observed(), 1.0, 0, 1.0)
    guessing_by_noise(monkeypatch, drawn=False)
    assert observed() == plain


def sampled(letters: Path, names: Sequence[int], **settings: Any) -> dict[str, tuple[int, ...]]:
    engine = engine_of(letters, max_length=80, **settings)
    asked = (
        request(str(name), PROMPT[: 1 + name % 5], 30, temperature=1.2 * (name != 4), seed=name % 3)
        for name in names
    )
    return tokens(engine, *asked)


def test_a_request_gets_the_same_tokens_whatever_is_guessed(
    letters: Path,
) -> None:
    together = sampled(letters, range(8), max_batch=3)
    for settings in (
        {"lookahead_window": 1, "lookahead_ngram": 3, "lookahead_candidates": 9},
        {"adaptive_k": True},
        {"drafter": "none"},
    ):
        assert sampled(letters, range(8), **settings) == together


def test_a_window_is_read_up_to_the_end_of_the_slot(models: Path) -> None:
    engine = engine_of(models / "llama", max_batch=2, max_length=31, lookahead_window=9)
    done = serve(engine, *(request(name, PROMPTS["b"], 11, num_speculative_tokens=8) for name in "xy"))
    assert {each.output_token_ids for each in done.values()} == {plain_greedy("llama", PROMPTS["b"], 11)}


def test_it_is_refused_where_trees_are_not_verified(models: Path) -> None:
    with pytest.raises(InvalidModel, match=r"drafter: 'lookahead' drafts trees, .* not by 'block'"):
        engine_of(models / "llama", verification="block")
