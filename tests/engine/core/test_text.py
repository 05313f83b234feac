"""Where an output ends, and what text the user gets on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import RequestOutput
from driftguard_engine.detokenizer import Detokenizer, StopFilter
from driftguard_engine.engine import Engine
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tests.engine.core.tiny import CONTEXT, drain, finished, letter_tokenizer, request, save, serve
from tests.engine.server.tiny_models import byte_tokenizer

TEXT = "Grüße, 世界! 🙂🙂 e\u0301 done"


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_text_arrives_in_whole_characters(size: int) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(TEXT)
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("é und "))
    parts = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(parts) == TEXT
    assert "\ufffd" not in "".join(parts)
    assert detokenizer.flush() == ""


def tokenizer_with_bytes() -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma have: two letters, and bytes for all else, which are decoded run by run."""
    tokens = ["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    model.normalizer = normalizers.Replace(" ", "\u2581")
    model.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", unk_token="<unk>")  # type: ignore[no-untyped-call]


def test_characters_of_single_bytes_arrive_however_many_tokens_come_at_once() -> None:
    chance, tokenizer = random.Random(7), tokenizer_with_bytes()

    def some(most: int) -> str:
        return "".join(chance.choice("ab é中你好😀👍") for _ in range(chance.randint(1, most)))

    for _ in range(300):
        prompt, text, size = some(10), some(60), chance.randint(1, 8)
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer, tokenizer.encode(prompt, add_special_tokens=False))
        shown = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert "".join(shown) == text, (prompt, size)


def test_a_character_that_never_ends_is_shown_as_such_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    euro = tokenizer.encode("€")
    detokenizer = Detokenizer(tokenizer, [])
    assert [detokenizer.push([token]) for token in euro[:2]] == ["", ""]
    assert detokenizer.flush() == "\ufffd"


def test_broken_bytes_do_not_hold_back_what_follows() -> None:
    tokenizer = byte_tokenizer()
    broken = tokenizer.encode("€")[1:2] * 100
    detokenizer = Detokenizer(tokenizer, [])
    shown = "".join(detokenizer.push([token]) for token in [*broken, *tokenizer.encode("ok")])
    assert shown == "\ufffd" * 100 + "ok"


def test_special_tokens_are_not_text() -> None:
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer, [])
    assert detokenizer.push([*tokenizer.encode("a"), 0, *tokenizer.encode("b")]) == "ab"


def tokenizer_that_strips() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral have: the space in front of the first word is no text."""
    vocabulary = {"<unk>": 0, "<end>": 1, "\u2581a": 2, "\u2581b": 3, "\u2581": 4}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    model.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", unk_token="<unk>")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("size", [1, 3, 40])
def test_words_behind_many_special_tokens_keep_their_space(size: int) -> None:
    chance, tokenizer = random.Random(3), tokenizer_that_strips()

    def some(most: int) -> list[int]:
        ends = ([1] * chance.choice([0, 1, 6, 7, 9, 20]) for _ in range(chance.randint(1, most)))
        return [token for end in ends for token in (chance.choice([2, 3, 4]), *end)]

    for _ in range(100):
        prompt, ids = some(4), some(12)
        detokenizer = Detokenizer(tokenizer, prompt)
        shown = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        whole, before = (str(tokenizer.decode(of, skip_special_tokens=True)) for of in (prompt + ids, prompt))
        assert before + "".join(shown) + detokenizer.flush() == whole, (prompt, ids)


def test_a_stop_string_is_found_over_pushes_and_never_shown() -> None:
    stop = StopFilter(("STOP", "##"))
    assert [stop.push(part) for part in ("one ST", "ART two S", "TO", "P three")] == [
        "one ",
        "START two ",
        "",
        "",
    ]
    assert stop.stopped
    assert stop.flush() == ""


def test_the_earliest_of_several_stop_strings_cuts() -> None:
    stop = StopFilter(("late", "a"))
    assert stop.push("xx a late") == "xx "


def test_text_held_back_for_a_stop_string_that_does_not_come_is_shown() -> None:
    stop = StopFilter(("abc",))
    assert stop.push("zab") == "z"
    assert not stop.stopped
    assert stop.flush() == "ab"


def streamed(outputs: list[RequestOutput], name: str) -> tuple[str, tuple[int, ...]]:
    own = [output for output in outputs if output.request_id == name]
    return "".join(output.text for output in own), tuple(
        token for output in own for token in output.token_ids
    )


@pytest.mark.parametrize("speculative", [0, 6])
def test_output_ends_at_a_stop_string_that_spans_tokens(tmp_path: Path, speculative: int) -> None:
    tokenizer = letter_tokenizer(27)
    target = save(tmp_path / "target", seed=8, tokenizer=tokenizer)
    engine = Engine(
        EngineConfig(target=target, draft=save(tmp_path / "draft", seed=8, noise=0.03, tokenizer=tokenizer))
    )
    free = serve(engine, request("free", (1, 2, 3), 40))["free"]
    stop = free.text[13:16]  # a letter, a space, a letter: the end of one token and the next one
    end = free.text.find(stop)
    engine.submit(request("cut", (1, 2, 3), 40, stop=("zz", stop), num_speculative_tokens=speculative))
    outputs = drain(engine)
    cut = finished(outputs)["cut"]
    assert (cut.finish_reason, cut.text) == ("stop", free.text[:end])
    assert cut.output_token_ids == free.output_token_ids[: len(cut.output_token_ids)]
    assert str(tokenizer.decode(list(cut.output_token_ids))).strip() == (free.text[:end] + stop).strip()
    assert streamed(outputs, "cut") == (cut.text, cut.output_token_ids)
    assert cut.counts.emitted == len(cut.output_token_ids)
    assert cut.counts.accepted <= cut.counts.emitted


def test_eos_ends_the_output_unless_it_is_ignored(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    runs = {
        f"{seed}": request(
            f"{seed}", "xyz", 60, temperature=1.5, seed=seed, ignore_eos=False, num_speculative_tokens=5
        )
        for seed in range(40)
    }
    done = serve(engine, *runs.values())
    stopped = [each for each in done.values() if each.finish_reason == "stop"]
    assert stopped
    assert all(each.output_token_ids.index(0) == len(each.output_token_ids) - 1 for each in stopped)
    assert all(0 not in each.output_token_ids for each in done.values() if each.finish_reason == "length")
    for each in done.values():
        counts = each.counts
        assert counts.emitted == len(each.output_token_ids) <= counts.accepted + counts.steps
        assert counts.accepted <= counts.drafted
    ignoring = serve(
        engine, request("i", "xyz", 60, temperature=1.5, seed=int(stopped[0].request.request_id))
    )["i"]
    assert len(ignoring.output_token_ids) == 60


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_a_token_that_ends_the_output_is_no_text(
    new_engine: Callable[..., Engine], stop: tuple[str, ...]
) -> None:
    """Also where the tokenizer does not call it special."""
    engine = new_engine()
    free = serve(engine, request())["r"]
    end = free.output_token_ids[5]
    count = free.output_token_ids.index(end)
    engine = Engine(engine.config, target=replace(engine._target, eos_token_ids=frozenset({end})))
    cut = serve(engine, request(stop=stop, ignore_eos=False))["r"]
    assert (cut.finish_reason, cut.output_token_ids) == ("stop", free.output_token_ids[: count + 1])
    assert cut.text == engine.tokenizer.decode(free.output_token_ids[:count])


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_is_met_exactly(new_engine: Callable[..., Engine], max_tokens: int) -> None:
    done = serve(new_engine(), request(max_tokens=max_tokens, num_speculative_tokens=5))["r"]
    assert (len(done.output_token_ids), done.finish_reason) == (max_tokens, "length")


@pytest.mark.parametrize("speculative", [0, 5])
def test_output_ends_with_length_at_the_end_of_the_context(
    new_engine: Callable[..., Engine], speculative: int
) -> None:
    prompt = tuple(range(1, 141))
    done = serve(new_engine(), request("r", prompt, 500, num_speculative_tokens=speculative))["r"]
    assert (len(done.output_token_ids), done.finish_reason) == (CONTEXT - 140, "length")


def test_the_last_token_of_the_context_can_be_used(new_engine: Callable[..., Engine]) -> None:
    done = serve(new_engine(), request("r", tuple(range(1, CONTEXT)), 500))["r"]
    assert len(done.output_token_ids) == 1


def test_what_is_streamed_is_what_is_finished(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    for seed in range(6):
        engine.submit(request(f"{seed}", "hello", 30, temperature=1.0, seed=seed))
    outputs = drain(engine)
    for name, each in finished(outputs).items():
        assert streamed(outputs, name) == (each.text, each.output_token_ids)
        assert each.ended_at >= each.started_at
        assert each.time_to_first_token_seconds is not None
        assert each.time_to_first_token_seconds >= 0
        assert each.time_per_output_token_seconds is not None
        assert 1 <= each.concurrency <= 4
