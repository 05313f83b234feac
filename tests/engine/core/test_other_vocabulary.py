"""Drafts with a tokenizer of their own: by the tokens that both have, and by text."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import InvalidModel
from driftguard_engine.drafters.other_vocabulary import SlemDrafter, TliDrafter
from driftguard_engine.drafters.own_text import OwnText
from driftguard_engine.engine import Engine
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.sampling import EVERY
from driftguard_engine.models.token_texts import shared_tokens, token_texts
from driftguard_engine.speculation import ReferenceVerification
from transformers import AutoModelForCausalLM

from tests.engine.core.other_vocabularies import byte_level, save_translated, sentencepiece
from tests.engine.core.test_batch_independence import together, varied_requests
from tests.engine.core.test_losslessness import LETTERS, PROMPT, exact_distribution, p_value
from tests.engine.core.tiny import drain, finished, letter_tokenizer, new_module, request, save, serve, tokens

DRAFTERS = ("tli", "slem")
# The target has <|end|>, a to e; the draft f instead of e, and two of its tokens are two of the target's.
OURS = byte_level((), bytes_of="abcde")
OWN = byte_level(("ab", "dd"), bytes_of="abcdf", first=2)
ASCII = byte_level((), bytes_of=string.ascii_letters)
TURNED = byte_level((), bytes_of=string.ascii_letters, first=20)
JOINING = byte_level(("ab", "cd", "he", "the", "XY"), bytes_of=string.ascii_letters + "<|>/1", first=9)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """letters, letters_draft: of six tokens. target, and drafts of it: turned (the same thoughts, other ids),
    joining (also tokens of several letters)."""
    root = tmp_path_factory.mktemp("vocabularies")
    save(root / "letters", seed=5, tokenizer=OURS, num_hidden_layers=1)
    save(root / "target", seed=3, tokenizer=ASCII)
    for name, target, ours, own, noise in (
        ("letters_draft", "letters", OURS, OWN, 0.1),
        ("turned", "target", ASCII, TURNED, 0.0),
        ("joining", "target", ASCII, JOINING, 0.02),
    ):
        module = AutoModelForCausalLM.from_pretrained(root / target)
        save_translated(root / name, module, ours, own, noise)
    return root


def new(made: Path, draft: str, drafter: str, target: str = "target", **settings: Any) -> Engine:
    settings = {"max_batch": 4, "prefill_chunk_tokens": 8, "max_waiting": 10_000} | settings
    return Engine(EngineConfig(str(made / target), str(made / draft), drafter, **settings))


def test_tokens_are_compared_by_the_bytes_that_they_stand_for(tmp_path: Path) -> None:
    byte = byte_level(("Ġa", "ab", "Ã©"))
    piece = sentencepiece(("▁a", "ab"))
    ours, theirs = (token_texts(each, tmp_path, field="draft") for each in (byte, piece))
    shared = {
        byte.convert_ids_to_tokens(a): piece.convert_ids_to_tokens(b) for a, b in shared_tokens(ours, theirs)
    }
    assert (shared["Ġa"], shared["ab"], shared["Ġ"]) == ("▁a", "ab", "▁")
    assert (shared["a"], shared["Ċ"], shared["Ã"]) == ("a", "<0x0A>", "<0xC3>")
    assert "Ã©" not in shared
    assert "<|end|>" not in shared
    assert theirs.begin == (1,)


TEXT = "ab cd abcd\n é日本 🙂 the XY ab</s>cdcd  ab"


@pytest.mark.parametrize("target", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("own", ["byte_level", "sentencepiece"])
def test_a_draft_reads_what_its_tokenizer_makes_of_the_text_however_it_arrives(
    tmp_path: Path, target: str, own: str
) -> None:
    made = {
        "byte_level": (
            byte_level(("ab", "cd", "Ġab", "abcd")),
            byte_level(("bc", "dc", "Ã©", "Ġa"), first=77),
        ),
        "sentencepiece": (sentencepiece(("ab", "▁a")), sentencepiece(("cd", "▁c"))),
    }
    ours = token_texts(made[target][0], tmp_path, field="target")
    theirs = token_texts(made[own][1], tmp_path, field="draft")
    token_ids, expected = (
        ours.encode((TEXT * 3).encode()),
        [*theirs.begin, *theirs.encode((TEXT * 3).encode())],
    )
    for size in (1, 2, 3, 7, 1000):
        text = OwnText(ours, theirs)
        for first in range(0, len(token_ids), size):
            before, text.unchanged = text.token_ids or [], len(text.token_ids or [])
            text.extend(token_ids[first : first + size])
            assert (text.token_ids or [])[: text.unchanged] == before[: text.unchanged]
        found = text.token_ids
        assert found is not None
        if own == target == "byte_level":
            assert found == expected
        assert b"".join(theirs.texts.get(token, b"") for token in found).strip() == (
            b"".join(ours.texts.get(token, b"") for token in token_ids).strip()
        )


def test_spaces_at_the_beginning_are_read_however_they_arrive(tmp_path: Path) -> None:
    """Of those that a SentencePiece tokenizer gives, one was put before the text."""
    ours = token_texts(sentencepiece(("ab",)), tmp_path, field="target")
    theirs = token_texts(byte_level(("ab",)), tmp_path, field="draft")
    for size in (1, 2, 1000):
        text, token_ids = OwnText(ours, theirs), ours.encode(b"  ab")
        for first in range(0, len(token_ids), size):
            text.extend(token_ids[first : first + size])
        assert text.token_ids == theirs.encode(b"  ab"), size


def test_special_tokens_are_the_drafts_own_or_left_out(tmp_path: Path) -> None:
    ours = token_texts(byte_level(("ab",), specials=("<|end|>", "<|user|>", "<s>")), tmp_path, field="target")
    own = sentencepiece(("ab",))
    text = OwnText(ours, token_texts(own, tmp_path, field="draft"))
    text.extend([2, *ours.encode(b"ab"), 1, *ours.encode(b"ba"), 2, *ours.encode(b"b")])
    assert own.convert_ids_to_tokens(text.token_ids or []) == ["<s>", "▁", "ab", "b", "a", "<s>", "▁", "b"]


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_output_is_what_the_target_gives_alone(made: Path, drafter: str, verification: str) -> None:
    prompts = {"a": (7,), "b": (1, 2, 3, 4) * 5, "c": tuple(range(20, 45))}
    asked = [
        request(f"{n}{k}", p, 40, num_speculative_tokens=k) for n, p in prompts.items() for k in (0, 3, 8)
    ]
    done = serve(new(made, "joining", drafter, verification=verification), *asked)
    for name in prompts:
        plain = done[f"{name}0"]
        assert plain.counts.drafted == 0
        for k in (3, 8):
            assert done[f"{name}{k}"].output_token_ids == plain.output_token_ids, (name, k)
    assert sum(each.counts.accepted for each in done.values()) > 50
    assert any(each.counts.accepted < each.counts.drafted for each in done.values())
    assert done["a3"].draft.method == drafter


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_draft_that_thinks_as_the_target_is_always_right(made: Path, drafter: str) -> None:
    """It has read everything: reused prompts, steps without drafts, accepted and emitted tokens."""
    engine = new(made, "turned", drafter)
    prompt = tuple(range(1, 31))
    serve(engine, request("first", prompt, 5))
    for name, each in {"a": prompt, "b": (*prompt[:20], 3, 4), "c": (9,)}.items():
        engine.submit(request(name, each, 60))
    outputs = engine.step()
    rows = [*engine._sequences.values()]
    for step in range(1000):
        for index, row in enumerate(rows):
            row.num_speculative_tokens = 3 if (step // 3 + index) % 2 else 0
        if not engine.has_work():
            break
        outputs += engine.step()
    done = finished(outputs + drain(engine))
    assert done["a"].reused_prompt_tokens > 0
    for ended in done.values():
        assert ended.counts.accepted == ended.counts.drafted > 20


def test_stale_text_is_seen(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: a draft that has not read what was emitted in its place is wrong."""
    extend = OwnText.extend

    def extend_late(self: OwnText, token_ids: Sequence[int]) -> None:
        extend(self, token_ids[:-1] if self.read else token_ids)
        self.read += len(token_ids[-1:]) if self.read else 0

    monkeypatch.setattr(OwnText, "extend", extend_late)
    done = serve(new(made, "turned", "tli"), request("a", tuple(range(1, 31)), 60))["a"]
    assert done.counts.accepted < done.counts.drafted / 2


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_output_does_not_depend_on_the_batch(
    new_engine: Callable[..., Engine], models: Path, tmp_path: Path, drafter: str
) -> None:
    """Of any bytes, of which many are no characters."""
    module = AutoModelForCausalLM.from_pretrained(models / "llama")
    own = byte_level(("aa", "Ġa"), first=40)
    draft = save_translated(tmp_path / "draft", module, byte_level(()), own, 0.02)
    engine, requests = new_engine(drafter=drafter, draft=draft, max_batch=6), varied_requests(14)
    alone: dict[str, tuple[int, ...]] = {}
    for each in requests:
        alone |= tokens(engine, each)
    assert together(engine, requests, seed=1) == alone
    assert together(engine, requests, seed=2) == alone


def test_beyond_the_drafts_own_context_nothing_is_drafted(made: Path, tmp_path: Path) -> None:
    own = byte_level((), bytes_of=string.ascii_letters, first=20)
    module = AutoModelForCausalLM.from_pretrained(made / "target")
    module.config.max_position_embeddings = 32
    draft = save_translated(tmp_path / "short", module, ASCII, own)
    config = EngineConfig(str(made / "target"), draft, "tli", max_batch=2)
    done = serve(Engine(config), request("a", (1, 2, 3), 60), request("b", tuple(range(1, 41)), 9))
    assert done["a"].counts.accepted == done["a"].counts.drafted > 15
    assert 3 + done["a"].counts.drafted < 33
    assert done["b"].counts.drafted == 0


def letters(made: Path, drafter: str, **settings: Any) -> Engine:
    settings = {"max_batch": 256, "max_length": 32, "num_speculative_tokens": 2} | settings
    return new(made, "letters_draft", drafter, "letters", **settings)


def masked(engine_draft: Any, own_ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """By the definition: the draft's law over the target's ids, the tokens that only one has masked."""
    with torch.inference_mode():
        logits = engine_draft(torch.tensor([own_ids])).logits[0, -1].double()
    pairs = {
        OURS.convert_tokens_to_ids(name): OWN.convert_tokens_to_ids(name) for name in ("<|end|>", *"abcd")
    }
    q = np.zeros(LETTERS)
    for ours, own in pairs.items():
        q[ours] = float(logits[own].exp())
    return np.asarray(q / q.sum())


def joint_law(made: Path) -> dict[tuple[int, ...], float]:
    """Of the first step with two drafts: how many are accepted, and the tokens that it emits."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(made / each) for each in ("letters", "letters_draft")
    )

    def p(drawn: tuple[int, ...]) -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            return np.asarray(target(torch.tensor([PROMPT + drawn])).logits[0, -1].double().softmax(-1))

    def chain(drawn: tuple[int, ...], mass: float) -> None:
        p_now = p(drawn)
        if len(drawn) == 2:
            for token, part in enumerate(p_now):
                law[2, *drawn, token] = mass * part
            return
        own: Any = OWN.convert_tokens_to_ids(OURS.convert_ids_to_tokens(list(drawn)))
        q = masked(draft, [*OWN.encode("abcab"), *own])
        residual = np.maximum(p_now - q, 0)
        rejected = 1 - np.minimum(p_now, q).sum()
        for token in range(LETTERS):
            law[len(drawn), *drawn, token] = mass * rejected * residual[token] / residual.sum()
            if q[token]:
                chain((*drawn, token), mass * min(p_now[token], q[token]))

    law: dict[tuple[int, ...], float] = {}
    chain((), 1.0)
    return law


@pytest.mark.slow
def test_accepted_tokens_have_the_law_of_the_masked_draft(made: Path) -> None:
    law = joint_law(made)
    assert sum(law.values()) == pytest.approx(1)
    engine = letters(made, "tli")
    for seed in range(1000):
        engine.submit(request(str(seed), PROMPT, 3, seed=seed, temperature=1.0))
    seen: dict[str, tuple[int, ...]] = {}
    while engine.has_work():
        for output in engine.step():
            if output.request_id not in seen and output.token_ids:
                seen[output.request_id] = (len(output.token_ids) - 1, *output.token_ids)
    assert p_value(Counter(seen.values()), law) > 1e-3


def first_three(engine: Engine, **params: Any) -> Counter[tuple[int, ...]]:
    done = serve(
        engine, *(request(str(seed), PROMPT, 4, seed=seed, **params) for seed in range(700))
    ).values()
    assert sum(each.counts.accepted for each in done) > 50
    return Counter(each.output_token_ids[:3] for each in done)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "verification"), [(1.0, 0, 1.0, "token"), (1.6, 4, 0.9, "block")]
)
def test_sampled_output_has_the_targets_law(
    made: Path, drafter: str, temperature: float, top_k: int, top_p: float, verification: str
) -> None:
    module = new_module("llama", seed=5, vocabulary=LETTERS, num_hidden_layers=1)
    engine = letters(made, drafter, verification=verification)
    observed = first_three(engine, temperature=temperature, top_k=top_k, top_p=top_p)
    assert p_value(observed, exact_distribution(module, temperature, top_k, top_p)) > 1e-3


def mass_where_the_map_reaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's token that the draft has not is never drawn, but has a part of q."""
    replaced(monkeypatch, lambda logits, tokens: logits.clamp(min=0))


def residual_over_the_law_that_is_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """q as if the draft had drawn from all of its tokens: what it gives those of two letters is nowhere."""
    draw = reference.draft_distributions

    def leaky(logits: Any, *given: Any) -> Any:
        found = draw(logits, *given)
        found.normaliser[...] *= 1.6
        return found

    monkeypatch.setattr(reference, "draft_distributions", leaky)


def q_taken_after_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, lambda logits, tokens: logits.scatter_add(1, tokens, torch.ones(len(tokens), 1)))


def replaced(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """What is verified by is changed behind the draw."""
    draw = ReferenceVerification.draw

    def draw_and_change(self: ReferenceVerification, step: int) -> None:
        draw(self, step)
        changed = change(self.draft_logits[:, step], self.draft_tokens[:, step : step + 1].clamp(min=0))
        self.draft_logits[:, step] = changed
        given = reference.draft_distributions(changed[:, np.newaxis].numpy(), self._sampling)
        self._distributions.put(EVERY, slice(step, step + 1), given)

    monkeypatch.setattr(ReferenceVerification, "draw", draw_and_change)


def guesses_that_know_what_verifies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other guess is dropped where it would be rejected: by the random number that verifies it."""
    draft = SlemDrafter.draft

    def choose(self: SlemDrafter, rows: Any, verification: ReferenceVerification, launcher: None) -> None:
        unlucky = verification._noise.accept[:, 0] > 0.5
        rows.drafted[torch.from_numpy(unlucky)] = 0
        draft(self, rows, verification, launcher)

    monkeypatch.setattr(SlemDrafter, "draft", choose)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "plant"),
    [
        ("tli", mass_where_the_map_reaches_nothing),
        ("tli", residual_over_the_law_that_is_not_masked),
        ("tli", q_taken_after_the_draw),
        ("slem", guesses_that_know_what_verifies_them),
    ],
)
def test_the_law_is_missed_with_a_mistake(
    made: Path, monkeypatch: pytest.MonkeyPatch, drafter: str, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    module = new_module("llama", seed=5, vocabulary=LETTERS, num_hidden_layers=1)
    observed = first_three(letters(made, drafter), temperature=1.0)
    assert p_value(observed, exact_distribution(module, 1.0, 0, 1.0)) < 1e-6


def test_a_draft_with_another_tokenizer_needs_a_drafter_for_that(made: Path) -> None:
    with pytest.raises(
        InvalidModel, match=r"another tokenizer than the target .*, except with --drafter tli or slem"
    ):
        new(made, "turned", "draft_model")


def test_what_cannot_be_compared_is_refused(made: Path, tmp_path: Path) -> None:
    save(tmp_path / "words", seed=5, tokenizer=letter_tokenizer(LETTERS), num_hidden_layers=1)
    with pytest.raises(
        InvalidModel, match=r"draft: the tokenizer in .*words is neither byte-level nor like Sente"
    ):
        Engine(EngineConfig(str(made / "target"), str(tmp_path / "words"), "slem"))
    save(tmp_path / "digits", seed=5, tokenizer=byte_level((), bytes_of="0123", specials=("<eot>",)))
    with pytest.raises(InvalidModel, match="draft: its tokenizer has no token of the target's"):
        Engine(EngineConfig(str(made / "target"), str(tmp_path / "digits"), "tli"))


def test_another_draft_is_put_into_service_as_the_same_method(made: Path) -> None:
    engine = new(made, "turned", "tli")
    engine.swap_draft(engine.load_draft(str(made / "joining")).version)
    done = serve(engine, request("a", (1, 2, 3), 20))["a"]
    assert (done.draft.method, done.draft.name) == ("tli", "joining")
    assert isinstance(engine._drafts.drafter, TliDrafter)
