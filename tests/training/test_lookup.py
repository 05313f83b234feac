"""A corpus of captured answers, and its score, against what an engine that serves it counts."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import FinishedRequest, InvalidModel
from driftguard_engine.drafters.corpus import TEXTS_FILE, read_documents
from driftguard_engine.engine import Engine
from driftguard_engine.options import BUNDLED
from driftguard_training import lookup
from driftguard_training.__main__ import main
from driftguard_training.settings import EvaluateCorporaSettings
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from tests.engine.core.tiny import request, serve

TARGET = BUNDLED / "target"
K = 4


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(*arguments: object) -> Done:
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        code = main([*map(str, arguments)])
    return Done(code, stdout.getvalue(), stderr.getvalue())


def printed(*arguments: object) -> dict[str, Any]:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write(path: Path, lines: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> Path:
    rows = [
        {"segment": segment, "prompt_token_ids": list(prompt), "output_token_ids": list(output)}
        for segment, prompt, output in lines
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def engine_of(draft: Path | None, drafter: str = "suffix") -> Engine:
    return Engine(
        EngineConfig(
            target=str(TARGET),
            draft=None if draft is None else str(draft),
            drafter=drafter,
            max_length=256,
            num_speculative_tokens=K,
            threads=1,
        )
    )


def answers(engine: Engine, seed: int, count: int) -> dict[str, FinishedRequest]:
    draw = random.Random(seed)
    prompts = [
        tuple(tokenizer().encode(f"def test_{draw.randrange(9)}():\n    assert ")) for _ in range(count)
    ]
    return serve(
        engine,
        *(
            request(
                f"{number}", prompt, draw.randrange(2, 60), temperature=(0.0, 0.7)[number % 2], seed=number
            )
            for number, prompt in enumerate(prompts)
        ),
    )


def as_traffic(path: Path, done: dict[str, FinishedRequest]) -> Path:
    rows = [(("even", "odd")[int(name) % 2], one.request.prompt_token_ids, one.output_token_ids)
            for name, one in done.items()]  # fmt: skip
    return write(path, rows)


def test_no_draft_token_takes_less_than_no_time_on_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "seconds_in_turns", lambda _: [1.0, 0.9])
    traffic = as_traffic(tmp_path / "heldout.jsonl", answers(engine_of(None), seed=2, count=3))
    found = lookup.evaluate_corpora(EvaluateCorporaSettings(TARGET, (None,), traffic, K))
    (draft,) = cast("Any", found["drafts"])
    assert 0 < draft["seconds_per_draft_token"] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "plain", "option"),
    [("suffix", "no-corpus", ()), ("ngram", "ngram-2-4", ("--ngram-tokens", 2, 4))],
)
def test_the_score_is_what_an_engine_counts_that_serves_the_same_answers(
    tmp_path: Path, drafter: str, plain: str, option: tuple[object, ...]
) -> None:
    """To the last token, of answers at both temperatures, cut or ended, with a corpus and without one."""
    learned = as_traffic(tmp_path / "train.jsonl", answers(engine_of(None), seed=1, count=40))
    made = printed("corpus", "--target", TARGET, "--train", learned, "--output", tmp_path / "corpus")
    assert made["documents"] == 40
    accepted, greedy = [], []
    for draft in (None, tmp_path / "corpus"):
        engine = engine_of(draft, drafter)
        version = plain if draft is None else made["version"]
        assert (engine.draft.method, engine.draft.version) == (drafter, version)
        served = answers(engine, seed=2, count=30)
        scored = printed(
            *("evaluate-corpora", "--target", TARGET, "--num-speculative-tokens", K, *option),
            *("--corpus", draft or "none", "--traffic", as_traffic(tmp_path / "heldout.jsonl", served)),
        )
        (found,) = scored["drafts"]
        assert min(scored["seconds_per_target_step"], found["seconds_per_draft_token"]) > 0
        for segment, parity in zip(found["segments"], (0, 1), strict=True):
            counts = [one.counts for name, one in served.items() if int(name) % 2 == parity]
            assert segment["proposed"] == [each.drafted for each in counts]
            assert segment["drafted"] == [K * each.steps for each in counts]
            assert segment["accepted"] == [each.accepted for each in counts]
            assert segment["steps"] == sum(each.steps for each in counts)
        accepted.append(sum(each.counts.accepted for each in served.values()))
        greedy.append({name: one.output_token_ids for name, one in served.items() if int(name) % 2 == 0})
    assert greedy[0] == greedy[1]
    assert accepted[1] > 2 * accepted[0] > 0


def test_the_newest_answers_that_fit_are_in_the_corpus_and_then_older_ones(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [("a", [1], [5, 6, 7]), ("a", [1], [8, 9])])
    replay = write(tmp_path / "replay.jsonl", [("b", [1], [10] * 4), ("b", [1], [11] * 50)])
    made = printed(
        *("corpus", "--target", TARGET, "--train", train, "--replay", replay),
        *("--output", tmp_path / "corpus", "--most-tokens", 20),
    )
    documents = read_documents(tmp_path / "corpus", tokenizer().get_vocab(), field="draft")
    assert documents == [[5, 6, 7], [8, 9], [10] * 4]
    assert (made["documents"], made["tokens"]) == (3, 9)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "corpus").iterdir()}
    assert (modes, (tmp_path / "corpus").stat().st_mode & 0o777) == ({0o640}, 0o750)


def test_a_corpus_as_texts_has_the_tokens_that_its_texts_encode_to(tmp_path: Path) -> None:
    text = tokenizer()
    split = [text.convert_tokens_to_ids("a"), text.convert_tokens_to_ids("b"), text.eos_token_id]
    train = write(tmp_path / "train.jsonl", [("a", [1], split), ("a", [1], text.encode("def f():\n  é"))])
    printed(
        *("corpus", "--target", TARGET, "--train", train, "--output", tmp_path / "corpus", "--as-texts"),
    )
    lines = [json.loads(line) for line in (tmp_path / "corpus" / TEXTS_FILE).read_text().splitlines()]
    assert lines == ["ab", "def f():\n  é"]
    documents = read_documents(tmp_path / "corpus", text.get_vocab(), field="draft")
    assert documents == [text.encode(line, add_special_tokens=False) for line in lines]


def test_an_answer_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [("a", [1], [5] * 30), ("a", [1], [6] * 4)])
    arguments = ("corpus", "--target", TARGET, "--train", train, "--output", tmp_path / "corpus")
    done = run(*arguments, "--most-tokens", 4)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no answer has fewer than 4 tokens (--most-tokens)" in done.stderr
    assert printed(*arguments, "--most-tokens", 20)["tokens"] == 4


@pytest.mark.parametrize("nested", [False, True])
def test_an_answer_with_a_token_of_the_model_that_the_tokenizer_lacks_is_left_out_and_counted(
    tmp_path: Path, *, nested: bool
) -> None:
    """Output layers are padded; a fine-tune's additional tokens have ids there that another lacks. Gemma 3
    has the configuration of its language model inside its own."""
    target = tmp_path / "target"
    target.mkdir()
    for file in TARGET.iterdir():
        (target / file.name).symlink_to(file)
    config = json.loads((TARGET / "config.json").read_text())
    tokens = config["vocab_size"]
    (target / "config.json").unlink()
    padded = config | {"vocab_size": tokens + 64}
    if nested:
        text = {
            "model_type": "gemma3_text",
            "vocab_size": tokens + 64,
            "eos_token_id": config["eos_token_id"],
        }
        padded = {"model_type": "gemma3", "text_config": text, "eos_token_id": config["eos_token_id"]}
    (target / "config.json").write_text(json.dumps(padded))
    train = write(tmp_path / "train.jsonl", [("a", [1], [5, tokens + 1]), ("a", [tokens + 2], [6, 7])])
    made = printed("corpus", "--target", target, "--train", train, "--output", tmp_path / "corpus")
    assert (made["documents"], made["out_of_vocabulary"]) == (1, 1)
    assert read_documents(tmp_path / "corpus", tokenizer().get_vocab(), field="draft") == [[6, 7]]
    scoring = ("evaluate-corpora", "--target", target, "--traffic", train, "--single-tokens")
    (found,) = printed(*scoring, "--corpus", tmp_path / "corpus")["drafts"]
    assert found["segments"][0]["positions"] == 4


def test_the_same_answers_make_the_same_version(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [("a", [1], [5, 6, 7])])
    other = write(tmp_path / "other.jsonl", [("a", [1], [5, 6, 8])])
    made = [
        printed("corpus", "--target", TARGET, "--train", path, "--output", tmp_path / name)["version"]
        for path, name in ((train, "one"), (train, "two"), (other, "three"))
    ]
    assert made[0] == made[1] != made[2]


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [("a", [1], [999_999])])
    done = run("corpus", "--target", TARGET, "--train", train, "--output", tmp_path / "corpus")
    assert (done.returncode, done.stdout) == (2, "")
    assert "output_token_ids[0] is 999999" in done.stderr
    done = run("corpus", "--target", tmp_path, "--train", train, "--output", tmp_path / "corpus")
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1)
    assert "its tokenizer cannot be loaded" in done.stderr
    scoring = ("evaluate-corpora", "--target", TARGET, "--corpus", "none", "--traffic", train)
    done = run(*scoring, "--ngram-tokens", 4, 2)
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1)
    assert "--ngram-tokens 4 2: the least is more than the most" in done.stderr


def test_a_corpus_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [("a", [1], [5, 6, 7])])
    corpus = tmp_path / "corpus"
    printed("corpus", "--target", TARGET, "--train", train, "--output", corpus)
    with pytest.raises(InvalidModel, match=r"draft: .*another tokenizer"):
        read_documents(corpus, {"a": 0}, field="draft")
    engine = engine_of(None)
    weights = corpus / "corpus.safetensors"
    assert load_file(weights)["token_ids"].tolist() == [5, 6, 7]
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(InvalidModel, match=r"corpus\.safetensors"):
        engine.load_draft(str(corpus))
    config = json.loads((corpus / "config.json").read_text())
    (corpus / "config.json").write_text(json.dumps(config | {"model_type": "other"}))
    with pytest.raises(InvalidModel, match="draft: "):
        engine.load_draft(str(corpus))
