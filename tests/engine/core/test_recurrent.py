"""Targets that keep a recurrent state: exact with every kind of draft, in any batch, behind any prefix."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import FinishedRequest, InvalidModel, Request
from driftguard_engine.engine import Engine
from driftguard_engine.models.recurrent import LIVE, SlotStates

from tests.engine.core.corpora import save_corpus
from tests.engine.core.eagle3_heads import load_target
from tests.engine.core.engine_laws import TargetLaw, apart, distance_of_tokens, expected_law, law_of_engine
from tests.engine.core.every_drafter import LETTERS, OURS, OWN, watched
from tests.engine.core.medusa_heads import save_random_heads
from tests.engine.core.other_vocabularies import save_translated
from tests.engine.core.target_mtps import SHAPES, save_with_mtp
from tests.engine.core.test_batch_independence import served_together
from tests.engine.core.tiny import drain, finished, request, save, serve

SEED = 7
CHUNK = 8
ROUNDING = 1e-5
DRAFTERS: dict[str, dict[str, Any]] = {
    "mtp": {},
    "ngram": {"ngram_min_tokens": 1},
    "suffix": {"draft": "corpus"},
    "draft_model": {"draft": "draft"},
    "hybrid": {"draft": "draft", "corpus": "corpus", "suffix_min_match": 2},
    "tli": {"draft": "other"},
}
KINDS = ("qwen3_next", "qwen3_5_text")


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By kind, of six letters: a target with an MTP layer, and drafts that are recurrent too."""
    root = tmp_path_factory.mktemp("recurrent")
    for kind in KINDS:
        save_with_mtp(root / kind / "target", kind, OURS)
        save(root / kind / "draft", kind, seed=3, noise=0.02, tokenizer=OURS, **SHAPES[kind])
        save_corpus(
            root / kind / "corpus", str(root / kind / "target"), [(1, 2, 3, 4, 5, 0, 2), (1, 2, 5, 3)]
        )
    save_translated(root / KINDS[0] / "other", load_target(root / KINDS[0] / "target"), OURS, OWN, 0.1)
    return root


def engine_of(directory: Path, drafter: str, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "max_batch": 3,
        "max_length": 64,
        "prefill_chunk_tokens": CHUNK,
        "num_speculative_tokens": 3,
    } | DRAFTERS.get(drafter, {})
    for part in ("draft", "corpus"):
        if part in settings:
            settings[part] = str(directory / settings[part])
    return Engine(EngineConfig(str(directory / "target"), drafter=drafter, **settings | changes))


def traffic(**params: Any) -> list[Request]:
    """Prompts of one token to four chunks, some of which begin alike; every K; ends at different times."""
    rng = random.Random(SEED)
    shared = [rng.randrange(LETTERS) for _ in range(25)]
    return [
        request(
            f"r{index}",
            [*shared[: rng.choice([0, 8, 16, 25])], *(rng.randrange(LETTERS) for _ in range(1 + index % 5))],
            max_tokens=rng.choice([2, 9, 16]),
            seed=index,
            num_speculative_tokens=(None, 1, 7, None, 0)[index % 5],
            **params,
        )
        for index in range(10)
    ]


def generated(directory: Path, asked: list[Request]) -> dict[str, tuple[int, ...]]:
    """By transformers' own greedy generate."""
    module, found = load_target(directory / "target"), {}
    for each in asked:
        prompt = torch.tensor([each.prompt_token_ids])
        output = module.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=each.params.max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        found[each.request_id] = tuple(output[0, prompt.shape[1] :].tolist())
    return found


def output_of(done: dict[str, FinishedRequest]) -> dict[str, tuple[int, ...]]:
    return {name: each.output_token_ids for name, each in done.items()}


@pytest.mark.parametrize(
    ("kind", "drafter"), [*((KINDS[0], drafter) for drafter in DRAFTERS), (KINDS[1], "mtp")]
)
def test_output_is_transformers_greedy_generate_and_drafts_are_accepted(
    letters: Path, kind: str, drafter: str
) -> None:
    asked = traffic()
    done = served_together(engine_of(letters / kind, drafter), asked, seed=1)
    assert output_of(done) == generated(letters / kind, asked)
    counts = [each.counts for each in done.values()]
    assert 0 < sum(each.accepted for each in counts) < sum(each.drafted for each in counts)


@pytest.mark.parametrize("drafter", ["mtp", "draft_model"])
def test_output_does_not_depend_on_the_batch_nor_on_what_is_held_of_a_prompt(
    letters: Path, drafter: str
) -> None:
    """Bit for bit: also the drafts are the same, and what of them is accepted."""
    directory, asked = letters / KINDS[0], traffic(temperature=1.0)
    fresh = engine_of(directory, drafter, prefix_reuse=False)
    expected = {name: each for one in asked for name, each in serve(fresh, one).items()}
    assert {each.reused_prompt_tokens for each in expected.values()} == {0}
    engine = engine_of(directory, drafter)
    serve(engine, *asked[:3])
    done = served_together(engine, asked, seed=1)
    assert output_of(done) == output_of(expected)
    assert all(done[name].counts == each.counts for name, each in expected.items())
    assert {each.reused_prompt_tokens for each in done.values()} >= {0, CHUNK}


def test_a_model_that_drafts_for_itself_is_always_right(letters: Path) -> None:
    """So a recurrent draft goes back to the right state, too."""
    directory = letters / KINDS[0]
    engine = engine_of(directory, "draft_model", draft=str(directory / "target"))
    for each in serve(engine, *traffic()).values():
        assert each.counts.accepted == each.counts.drafted


def test_the_model_of_a_hybrid_has_read_what_came_of_guesses_and_of_steps_without_drafts(
    letters: Path, tmp_path: Path
) -> None:
    """As with adaptive K, in any order. The draft is the target itself: all that it draws is right."""
    directory, rng = letters / KINDS[0], random.Random(SEED)
    prompts = [[rng.randrange(LETTERS) for _ in range(count)] for count in (3, 9, 17)]
    asked = [request(f"r{index}", prompt, 60) for index, prompt in enumerate(prompts)]
    expected = generated(directory, asked)
    parts = [answer[at : at + 8] for answer in expected.values() for at in range(2, 60, 15)]
    corpus = save_corpus(tmp_path / "corpus", str(directory / "target"), parts)
    changes = {"draft": str(directory / "target"), "corpus": corpus, "suffix_min_match": 6, "max_length": 80}
    engine = engine_of(directory, "hybrid", **changes)
    for each in asked:
        engine.submit(each)
    with watched(engine) as drafts:
        outputs = engine.step()
        rows = [*engine._sequences.values()]
        for step in range(200):
            for index, row in enumerate(rows):
                row.num_speculative_tokens = 3 if (step // 3 + index) % 2 else 0
            outputs += engine.step()
    assert output_of(finished(outputs)) == expected
    whole = {each.request_id: (*each.prompt_token_ids, *expected[each.request_id]) for each in asked}
    drawn = [each for each in drafts if each.logits is not None and each.tokens]
    assert 0 < len(drawn) < len([each for each in drafts if each.tokens])
    for draft in drawn:
        text = (*draft.text, *draft.tokens)
        assert text == whole[draft.request_id][: len(text)]


def test_a_prompt_is_gone_on_with_where_its_whole_chunks_end(letters: Path) -> None:
    """There alone a slot has kept the state; in another slot it is copied."""
    engine = engine_of(letters / KINDS[0], "mtp", max_batch=2)

    def reused(*prompts: list[int]) -> list[int]:
        asked = [request(str(index), prompt, 4) for index, prompt in enumerate(prompts)]
        done = serve(engine, *asked)
        assert output_of(done) == generated(letters / KINDS[0], asked)
        return [done[each.request_id].reused_prompt_tokens for each in asked]

    first, other = [1, 2, 3, 4] * 5, [5, 5, 4, 1] * 5
    assert reused(first) == [0]
    assert reused([*first, 1, 2]) == [16]
    assert reused([*first, 1, 2, 3, 4, 1, 2]) == [16]
    assert reused([*first, 1, 2, 3, 4, 5, 2], [*first, 1, 2, 3, 4, 2, 2]) == [24, 24]
    assert reused([*first[:16], 5, 5]) == [0]  # what lies behind 16 tokens was lost with those behind 24
    assert reused(other, [*other, 1]) == [0, 16]


def test_a_prefix_that_is_longer_than_the_context_of_the_draft_is_gone_on_with(tmp_path: Path) -> None:
    """Where one slot holds its beginning, and another one what follows."""
    kind, shorter = KINDS[0], {"max_position_embeddings": 4 * CHUNK}
    save(tmp_path / "target", seed=5, tokenizer=OURS)
    draft = save(tmp_path / "draft", kind, seed=3, tokenizer=OURS, **SHAPES[kind] | shorter)
    engine = engine_of(tmp_path, "draft_model", draft=draft, max_length=100)
    prompt = [1, 2, 3, 4, 5] * 12
    engine.submit(request("short", prompt[:42], 1))
    engine.submit(request("long", prompt[:50], 40))
    outputs = [each for _ in range(18) for each in engine.step()]
    assert engine.running == 1
    engine.submit(request("longest", prompt[:58], 4))
    done = finished(outputs + drain(engine))
    assert [done[name].reused_prompt_tokens for name in ("short", "long", "longest")] == [0, 40, 48]
    plain = engine_of(tmp_path, "none", max_length=100)
    assert output_of(done) == output_of(serve(plain, *(each.request for each in done.values())))


def test_drafts_are_swapped_under_traffic(letters: Path) -> None:
    directory = letters / KINDS[0]
    engine, outputs, used = engine_of(directory, "mtp"), [], {}
    engine.load_draft(str(directory / "draft"), "model")
    engine.load_draft(str(directory / "corpus"), "corpus")
    asked = traffic()[:6]
    for each, version in zip(asked, (engine.draft.version, "model", "corpus") * 2, strict=True):
        if version == "model" and "model" not in {draft.version for draft in engine.drafts}:
            engine.load_draft(str(directory / "draft"), "model")
        if version == "corpus" and "corpus" not in {draft.version for draft in engine.drafts}:
            engine.load_draft(str(directory / "corpus"), "corpus")
        used[each.request_id] = engine.swap_draft(version)
        engine.submit(each)
        outputs += engine.step() + engine.step()
    done = finished(outputs + drain(engine))
    assert output_of(done) == generated(directory, asked)
    drafted = {each.draft.method for each in done.values() if each.counts.drafted}
    assert drafted == {"mtp", "draft_model", "suffix"}


@pytest.fixture(params=["mtp", "ngram"])
def enumerated(letters: Path, request: pytest.FixtureRequest) -> Engine:
    sizes = {"max_batch": 64, "prefill_chunk_tokens": 64, "num_speculative_tokens": 2}
    return engine_of(letters / KINDS[0], request.param, **sizes)


def test_three_steps_have_exactly_the_law_of_the_rule_and_the_target(
    letters: Path, enumerated: Engine
) -> None:
    """Accepted counts and tokens, with a K that changes from step to step."""
    assert law_is_missed_by(enumerated, letters) < ROUNDING


def law_is_missed_by(engine: Engine, letters: Path) -> float:
    shaping = {"temperature": 1.2, "top_k": 2}
    target = TargetLaw(load_target(letters / KINDS[0] / "target"), **shaping)
    with watched(engine) as seen:
        law = law_of_engine(engine, 3, **shaping)
    assert sum(law.values()) == pytest.approx(1)
    missed = max(distance_of_tokens(law, target), apart(law, expected_law(seen, target, 3)))
    print(f"{engine.draft.method}: {len(law)} outcomes of three steps, off by {missed:.2g}")
    return missed


def test_a_state_that_was_not_put_back_is_not_in_the_exact_law(
    letters: Path, enumerated: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = SlotStates.cut

    def kept(self: SlotStates, slot: int, start: int) -> int:
        if self._behind[slot][LIVE] > start:
            self._behind[slot][LIVE] = start
        return cut(self, slot, start)

    monkeypatch.setattr(SlotStates, "cut", kept)
    assert law_is_missed_by(enumerated, letters) > 100 * ROUNDING


def test_drafters_of_trees_are_refused_by_name(letters: Path, tmp_path: Path) -> None:
    directory = letters / KINDS[0]
    save_random_heads(tmp_path / "medusa", 32, LETTERS)
    reads = "which the target cannot read: Qwen3NextForCausalLM keeps a recurrent state"
    with pytest.raises(InvalidModel, match=f"^drafter: 'lookahead' drafts trees, {reads}"):
        engine_of(directory, "lookahead")
    with pytest.raises(InvalidModel, match=f"^draft: .*medusa drafts trees, {reads}"):
        engine_of(directory, "medusa", draft=str(tmp_path / "medusa"))
    with pytest.raises(
        InvalidModel, match=r"^draft: .* runs on the generic path, and --drafter mirror takes"
    ):
        engine_of(directory, "mirror", draft=str(directory / "draft"))
