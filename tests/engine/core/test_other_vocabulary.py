"""Drafts with a tokenizer of their own: by the tokens that both have, and by text."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import InvalidModel
from driftguard_engine.drafters.other_vocabulary import TliDrafter
from driftguard_engine.drafters.own_text import OwnText
from driftguard_engine.engine import Engine
from driftguard_engine.models.token_texts import TokenTexts, shared_tokens, token_texts
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.engine.core.every_drafter import LETTERS
from tests.engine.core.other_vocabularies import byte_level, save_translated, sentencepiece
from tests.engine.core.test_batch_independence import together, varied_requests
from tests.engine.core.tiny import drain, finished, letter_tokenizer, request, save, serve, tokens

DRAFTERS = ("tli", "slem")
ASCII = byte_level((), bytes_of=string.ascii_letters)
TURNED = byte_level((), bytes_of=string.ascii_letters, first=20)
JOINING = byte_level(("ab", "cd", "he", "the", "XY"), bytes_of=string.ascii_letters + "<|>/1", first=9)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target, and drafts of it: turned (the same thoughts, other ids),
    joining (also tokens of several letters)."""
    root = tmp_path_factory.mktemp("vocabularies")
    save(root / "target", seed=3, tokenizer=ASCII)
    module = AutoModelForCausalLM.from_pretrained(root / "target")
    for name, own, noise in (("turned", TURNED, 0.0), ("joining", JOINING, 0.02)):
        save_translated(root / name, module, ASCII, own, noise)
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


def composing() -> PreTrainedTokenizerFast:
    """Letters and accents become one, as by Qwen's tokenizers (NFC)."""
    made = byte_level(("ab", "dd"))
    made.backend_tokenizer.normalizer = normalizers.NFC()
    return made


def with_unknown() -> PreTrainedTokenizerFast:
    """As SentencePiece makes one without bytes."""
    vocabulary = {token: place for place, token in enumerate(["<unk>", "\u2581", *"abdm", "ab", "dd"])}
    model = models.BPE(vocab=vocabulary, merges=[("a", "b"), ("d", "d")], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("make", [composing, with_unknown, lambda: byte_level(("ab", "dd"), bytes_of="abdm")])
def test_a_text_that_the_tokens_of_the_draft_do_not_spell_is_read_however_it_arrives(
    tmp_path: Path, make: Callable[[], PreTrainedTokenizerFast]
) -> None:
    ours, theirs = (token_texts(each, tmp_path, field="test") for each in (byte_level(("ab",)), make()))
    written = "\u09df" * 20 + ("abam" * 6 + "e\u0301" + "badd" * 6 + "\u09df" + "bad" * 6) * 2
    token_ids = ours.encode(written.encode())
    for size in (*range(1, 12), 1000):
        text = OwnText(ours, theirs)
        for first in range(0, len(token_ids), size):
            before = text.token_ids
            if before is not None:
                text.unchanged = len(before)
            text.extend(token_ids[first : first + size])
            if before is not None and text.token_ids is not None:
                assert text.token_ids[: text.unchanged] == before[: text.unchanged]
        assert text.token_ids == theirs.encode(written.encode()), size


@pytest.mark.parametrize("letter", ["\u09be", "\u09df"])  # the latter is two to a draft that composes
def test_letters_without_tokens_of_their_own_do_not_cut_the_whole_text_anew_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letter: str
) -> None:
    """Those of many scripts are several bytes, in the middle of which the last tokens may begin."""
    ours, theirs = (token_texts(each, tmp_path, field="test") for each in (byte_level(("ab",)), composing()))
    written = f"\u0986\u09ae{letter}\u09b0 \u65e5\u672c \U0001f642".encode() * 30
    encode, cut = TokenTexts.encode, [0]

    def noted(self: TokenTexts, text: bytes) -> list[int]:
        cut.append(len(text))
        return encode(self, text)

    token_ids = ours.encode(written)
    monkeypatch.setattr(TokenTexts, "encode", noted)
    text = OwnText(ours, theirs)
    for token in token_ids:
        text.extend([token])
    assert max(cut) < 50
    assert text.token_ids == encode(theirs, written)


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


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_special_tokens_of_prompts_stay_special_while_requests_run(made: Path, drafter: str) -> None:
    """The server tokenizes prompts in threads of its own, and a tokenizer is told for all of them at once
    whether what spells a special token is text."""
    engine = new(made, "joining", drafter)
    prompt = "ab<|end|>cd"
    expected = engine.tokenizer.encode(prompt)
    engine.submit(request("a", tuple(range(1, 31)), 20))
    while engine.has_work():
        engine.step()
        # What a thread gets that has told the tokenizer before the step.
        assert engine.tokenizer.backend_tokenizer.encode(prompt).ids == expected


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


def with_fewer_embeddings(model: Path, tokenizer: Any, directory: Path) -> str:
    module = AutoModelForCausalLM.from_pretrained(model)
    module.resize_token_embeddings(30)
    module.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_draft_reads_text_of_tokens_that_it_has_no_embedding_for(
    made: Path, tmp_path: Path, drafter: str
) -> None:
    """Its tokenizer has more tokens than it, as one that tokens were added to."""
    short = with_fewer_embeddings(made / "turned", TURNED, tmp_path / "short")
    prompt = tuple(range(1, 31))
    plain = tokens(Engine(EngineConfig(str(made / "target"), drafter="none")), request("a", prompt, 40))
    done = serve(Engine(EngineConfig(str(made / "target"), short, drafter)), request("a", prompt, 40))["a"]
    assert (done.finish_reason, done.output_token_ids) == ("length", plain["a"])
    assert done.counts.drafted > 0


def test_text_is_guessed_up_to_a_token_that_the_target_has_no_embedding_for(
    made: Path, tmp_path: Path
) -> None:
    """The target's tokenizer has more tokens than the target."""
    short = with_fewer_embeddings(made / "target", ASCII, tmp_path / "short")
    prompt = tuple(range(1, 30))
    plain = tokens(Engine(EngineConfig(short, None, "none")), request("a", prompt, 40))
    done = serve(Engine(EngineConfig(short, str(made / "turned"), "slem")), request("a", prompt, 40))["a"]
    assert (done.finish_reason, done.output_token_ids) == ("length", plain["a"])
    assert done.counts.drafted > 0


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
