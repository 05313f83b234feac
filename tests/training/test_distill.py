from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from driftguard_engine.config import EngineConfig
from driftguard_engine.engine import Engine
from driftguard_training.__main__ import main
from driftguard_training.distill import batches
from driftguard_training.evaluate import evaluate
from driftguard_training.model_directories import load_model
from driftguard_training.settings import DistillSettings, EvaluateSettings
from driftguard_training.traffic import TrafficRequest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.engine.core.tiny import request, serve
from tests.forked import forked
from tests.training.conftest import Pair
from tests.training.small_models import (
    VOCABULARY,
    save_directory,
    small_model,
    small_tokenizer,
    write_traffic,
)


def _distill_arguments(pair: Pair, output: Path, *more: str) -> list[str]:
    return [
        "distill", "--target", str(pair.target), "--draft", str(pair.draft), "--train", str(pair.train),
        "--output", str(output), "--steps", "60", "--threads", "1", "--batch-requests", "8", *more,
    ]  # fmt: skip


def _acceptance(pair: Pair, *drafts: Path) -> list[float]:
    report = evaluate(EvaluateSettings(pair.target, drafts, pair.heldout))
    return [draft["segments"][0]["acceptance"] for draft in report["drafts"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss", ["nla", "lk-hybrid", "forward-kl"])
def test_distillation_raises_acceptance_on_heldout_traffic(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str
) -> None:
    output = tmp_path / "candidates" / "one"
    arguments = _distill_arguments(pair, output, "--loss", loss, "--learning-rate", "0.02")
    assert main([*arguments, "--replay", str(pair.train)]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    before, after = _acceptance(pair, pair.draft, output)
    assert after > before + 0.1
    assert [event["event"] for event in events] == ["progress"] * 6 + ["done"]
    assert [event["step"] for event in events[:-1]] == [10, 20, 30, 40, 50, 60]
    assert events[-1]["output"] == str(output)
    provenance = json.loads((output / "driftguard_training.json").read_text())
    assert provenance["version"] == events[-1]["version"]
    assert provenance["parent"] == load_version(pair.draft)
    assert (provenance["loss"], provenance["steps"], provenance["train_requests"]) == (loss, 60, 160)


def test_held_out_traffic_is_measured_and_changes_nothing(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = []
    for number, more in enumerate([(), ("--held-out", str(pair.heldout))]):
        assert main(_distill_arguments(pair, tmp_path / str(number), "--learning-rate", "0.02", *more)) == 0
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        versions.append(events[-1]["version"])
    assert versions[0] == versions[1]
    measured = [event for event in events if event["event"] == "held_out"]
    assert [event["step"] for event in measured] == [*range(0, 61, 6)]
    assert measured[-1]["acceptance"] > measured[0]["acceptance"] + 0.1
    assert measured[-1]["loss"] < measured[0]["loss"]


def test_a_training_that_diverges_says_so_and_writes_nothing(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_distill_arguments(pair, tmp_path / "candidate", "--learning-rate", "1e38")) == 2
    assert "error: the loss is nan at step 10: the training diverged" in capsys.readouterr().err
    assert not (tmp_path / "candidate").exists()


def load_version(directory: Path) -> str:
    import hashlib

    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()[:12]


def test_the_candidate_is_a_plain_directory_and_the_same_seed_gives_the_same_bytes(
    pair: Pair, tmp_path: Path
) -> None:
    outputs = [tmp_path / name for name in ("a", "b", "other-seed")]
    for output, seed in zip(outputs, ("5", "5", "6"), strict=True):
        assert main([*_distill_arguments(pair, output), "--steps", "3", "--seed", seed]) == 0
    weights = [(output / "model.safetensors").read_bytes() for output in outputs]
    assert weights[0] == weights[1] != weights[2]
    candidate = AutoModelForCausalLM.from_pretrained(outputs[0], dtype="auto")
    assert candidate.dtype == load_model(pair.draft, "draft").dtype
    assert AutoTokenizer.from_pretrained(outputs[0]).get_vocab() == small_tokenizer().get_vocab()
    names = {path.name for path in outputs[0].iterdir()}
    assert {name for name in names if not name.endswith((".json", ".safetensors"))} == {"SHA256SUMS"}
    listed = (outputs[0] / "SHA256SUMS").read_text().splitlines()
    assert {line.partition("  ")[2] for line in listed} == names - {"SHA256SUMS"}
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=outputs[0], check=True)


def test_a_quarter_of_every_batch_is_replay_and_every_request_is_seen() -> None:
    train = [TrafficRequest("new", [1], [index]) for index in range(24)]
    replay = [TrafficRequest("old", [2], [index]) for index in range(8)]
    settings = DistillSettings(Path(), Path(), Path(), Path(), batch_requests=16)
    made = batches(train, replay, settings, 0.25)
    first = [next(made), next(made)]
    for batch in first:
        assert sorted(request.segment for request in batch) == ["new"] * 12 + ["old"] * 4
    for requests in (train, replay):  # two batches are exactly one pass over each
        seen = [request for batch in first for request in batch if request in requests]
        assert sorted(seen, key=requests.index) == requests
    assert {request.segment for request in next(batches(train, [], settings, 0.25))} == {"new"}


def _killed_while_writing(arguments: Sequence[str]) -> None:
    setattr(PreTrainedTokenizerFast, "save_pretrained", lambda *_: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010
    main(arguments)


def test_a_run_killed_while_training_or_writing_leaves_no_candidate(pair: Pair, tmp_path: Path) -> None:
    output = tmp_path / "candidates" / "one"
    arguments = _distill_arguments(pair, output)
    with forked(main, [*arguments, "--steps", "100000"], tmp_path / "log") as training:
        assert json.loads(training.stdout.readline())["event"] == "progress"
        training.kill()
        assert training.wait() == -signal.SIGKILL
    assert not output.exists()

    arguments += ["--steps", "2"]
    with forked(_killed_while_writing, arguments, tmp_path / "log") as writing:
        assert writing.wait() == -signal.SIGKILL
    assert not output.exists()

    assert main(arguments) == 0
    assert [path.name for path in output.parent.iterdir()] == ["one"]


def _edited(pair: Pair, path: Path, line: int, **fields: object) -> Path:
    lines = [json.loads(text) for text in pair.train.read_text().splitlines()]
    lines[line - 1] = {key: value for key, value in {**lines[line - 1], **fields}.items() if value != "gone"}
    path.write_text("\n".join(json.dumps(record) for record in lines))
    return path


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"segment": "gone"}, "Object missing required field `segment`"),
        ({"text": "hello"}, "Object contains unknown field `text`"),
        ({"output_token_ids": [1, "2"]}, "Expected `int`, got `str` - at `$.output_token_ids[1]`"),
        ({"output_token_ids": []}, "output_token_ids is empty; at least one token id is needed"),
        ({"prompt_token_ids": [1, 32]}, "prompt_token_ids[1] is 32; token ids are 0 to 31"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids[0] is -1; token ids are 0 to 31"),
        ({"prompt_token_ids": [1] * 60 + [32]}, "prompt_token_ids[60] is 32; token ids are 0 to 31"),
    ],
)
def test_bad_traffic_is_refused_by_line_and_field(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, object], problem: str
) -> None:
    traffic = _edited(pair, tmp_path / "bad.jsonl", 7, **fields)
    for flag in ("--train", "--replay"):
        assert main(_distill_arguments(pair, tmp_path / "out", flag, str(traffic))) == 2
        assert capsys.readouterr().err == f"error: {traffic}, line 7: {problem}\n"
    assert not (tmp_path / "out").exists()


LONG = {"segment": "long", "prompt_token_ids": [1] * 60, "output_token_ids": [2] * 5}  # of a context of 64


def _with_long_requests(traffic: Path, path: Path, *, count: int = 1) -> Path:
    """The same traffic with so many requests in its middle that are one token longer than the context."""
    lines = traffic.read_text().splitlines()
    path.write_text("\n".join([*lines[:20], *[json.dumps(LONG)] * count, *lines[20:]]) + "\n")
    return path


def _only_long_requests(path: Path) -> Path:
    path.write_text((json.dumps(LONG) + "\n") * 2)
    return path


def test_a_request_longer_than_the_context_is_left_out_and_counted_and_changes_nothing_else(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine serves and captures requests that are longer than the context of its draft."""
    train = _with_long_requests(pair.train, tmp_path / "train.jsonl")
    replay = _with_long_requests(pair.train, tmp_path / "replay.jsonl", count=2)
    held_out = _with_long_requests(pair.heldout, tmp_path / "heldout.jsonl")
    told = []
    for number, files in enumerate([(pair.train, pair.train, pair.heldout), (train, replay, held_out)]):
        flags = zip(("--train", "--replay", "--held-out"), map(str, files), strict=True)
        arguments = _distill_arguments(pair, tmp_path / f"{number}", *itertools.chain(*flags))
        assert main([*arguments, "--steps", "10"]) == 0
        told.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    (*without, made), (*reports, candidate) = told
    assert reports == without
    assert {event["event"] for event in reports} == {"progress", "held_out"}
    for name in ("version", "train_requests", "replay_requests"):
        assert candidate[name] == made[name]
    assert (made["left_out_requests"], candidate["left_out_requests"]) == (0, 3)
    provenance = json.loads((tmp_path / "1" / "driftguard_training.json").read_text())
    assert provenance["left_out_requests"] == 3


def test_replayed_traffic_that_is_too_long_altogether_is_left_out(pair: Pair, tmp_path: Path) -> None:
    replay = _only_long_requests(tmp_path / "replay.jsonl")
    arguments = _distill_arguments(pair, tmp_path / "out", "--replay", str(replay), "--steps", "1")
    assert main(arguments) == 0


def test_traffic_of_which_nothing_fits_the_context_is_refused(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = _only_long_requests(tmp_path / "long.jsonl")
    for arguments in (
        _distill_arguments(pair, tmp_path / "out", "--train", str(long)),
        _distill_arguments(pair, tmp_path / "out", "--held-out", str(long)),
        ["evaluate", "--target", str(pair.target), "--draft", str(pair.draft), "--traffic", str(long)],
    ):
        assert main(arguments) == 2
        problem = "no request fits the models' context of 64 tokens (requests that are longer: 2)"
        assert capsys.readouterr().err == f"error: {long}: {problem}\n"
    assert not (tmp_path / "out").exists()


def test_lines_that_are_not_json_are_refused(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traffic = tmp_path / "bad.jsonl"
    traffic.write_text(pair.train.read_text() + '{"segment": "a", \n')
    assert main(_distill_arguments(pair, tmp_path / "out", "--train", str(traffic))) == 2
    assert capsys.readouterr().err.startswith(f"error: {traffic}, line 161: Input data was truncated")


def test_too_little_traffic_is_refused(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traffic = tmp_path / "little.jsonl"
    traffic.write_text("".join(pair.train.read_text().splitlines(keepends=True)[:127]))
    assert main(_distill_arguments(pair, tmp_path / "out", "--train", str(traffic))) == 2
    assert capsys.readouterr().err == (
        f"error: {traffic} has 127 requests; distillation needs at least 128, fewer can make a draft worse\n"
    )
    long = _with_long_requests(traffic, tmp_path / "long.jsonl")
    assert main(_distill_arguments(pair, tmp_path / "out", "--train", str(long))) == 2
    assert capsys.readouterr().err == (
        f"error: {long} has 127 requests; distillation needs at least 128, fewer can make a draft worse "
        "(left out because they are longer than the models' context of 64 tokens: 1)\n"
    )
    allowed = ("--minimum-requests", "127", "--steps", "1")
    assert main(_distill_arguments(pair, tmp_path / "out", "--train", str(traffic), *allowed)) == 0


def test_models_that_cannot_be_used_are_refused(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pickled = save_directory(tmp_path / "pickled", small_model(2))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    foreign = save_directory(tmp_path / "foreign", small_model(2), small_tokenizer(prefix="x"))
    empty = tmp_path / "empty"
    empty.mkdir()
    capsys.readouterr()  # what saving the models has told
    unfit = f"does not fit the target in {pair.target}: "
    for draft, message in {
        tmp_path / "nowhere": f"draft directory {tmp_path / 'nowhere'}: no such directory",
        empty: f"draft directory {empty}: has no config.json; a transformers model directory is needed",
        pickled: f"draft directory {pickled}: holds pickled weights (pytorch_model.bin), which can run code; "
        "only safetensors are read",
        foreign: f"The draft in {foreign} {unfit}their tokenizers differ; both need the same token ids",
    }.items():
        for arguments in (
            _distill_arguments(pair, tmp_path / "out", "--draft", str(draft)),
            ["evaluate", "--target", str(pair.target), "--draft", str(draft), "--traffic", str(pair.heldout)],
        ):
            assert main(arguments) == 2
            assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "out").exists()


def test_pickles_beside_safetensors_are_not_read_nor_in_the_way(pair: Pair, tmp_path: Path) -> None:
    """As Trainer of transformers leaves them, and downloads in both formats. The engine serves them."""
    target, draft = (shutil.copytree(each, tmp_path / each.name) for each in (pair.target, pair.draft))
    for directory in (target, draft):
        for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state.pth"):
            (directory / name).write_bytes(b"not even a pickle")
    given, output = Pair(target, draft, pair.train, pair.heldout), tmp_path / "out"
    assert main(_distill_arguments(given, output, "--steps", "1")) == 0
    assert _acceptance(given, draft, output)[0] == _acceptance(pair, pair.draft, output)[0]
    assert {path.suffix for path in output.iterdir()} <= {".json", ".safetensors", ""}


@pytest.mark.parametrize(
    ("of_target", "of_draft"), [(VOCABULARY, VOCABULARY + 16), (VOCABULARY + 16, VOCABULARY)]
)
def test_a_draft_whose_vocabulary_is_padded_otherwise_is_scored_and_trained_as_the_engine_serves_it(
    tmp_path: Path, of_target: int, of_draft: int
) -> None:
    """As of Qwen2.5 and Gemma 3, whose small models have fewer rows behind the tokens of the tokenizer."""
    model = small_model(1, vocabulary=of_target)
    target = save_directory(tmp_path / "target", model, small_tokenizer())
    draft = save_directory(tmp_path / "draft", small_model(2, vocabulary=of_draft), small_tokenizer())
    traffic = write_traffic(tmp_path / "traffic.jsonl", model, requests=160, seed=3, tokens=(1, of_target))
    given, output = Pair(target, draft, traffic, traffic), tmp_path / "out"
    assert main(_distill_arguments(given, output, "--learning-rate", "0.02")) == 0
    before, after = _acceptance(given, draft, output)
    assert after > before + 0.05
    assert load_model(output, "draft").vocabulary == of_draft
    config = EngineConfig(str(target), str(output), num_speculative_tokens=4)
    served = [
        request(str(number), prompt, 10, temperature=1.0, seed=number)
        for number, prompt in enumerate(_prompts(traffic) * 2)
    ]
    counts = [each.counts for each in serve(Engine(config), *served).values()]
    rate = sum(each.accepted for each in counts) / sum(each.drafted for each in counts)
    assert rate == pytest.approx(after, abs=0.05)


def _prompts(traffic: Path) -> list[list[int]]:
    return [json.loads(line)["prompt_token_ids"] for line in traffic.read_text().splitlines()]


def test_an_existing_output_is_never_overwritten(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").touch()
    assert main(_distill_arguments(pair, tmp_path / "out")) == 2
    error = f"error: --output {tmp_path / 'out'} already exists; name a new directory\n"
    assert capsys.readouterr().err == error
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--steps", "0"], "argument --steps: '0' is not a whole number of at least 1"),
        (["--learning-rate", "nan"], "argument --learning-rate: 'nan' is not a number above 0"),
        (["--threads", "two"], "argument --threads: 'two' is not a whole number of at least 1"),
        (["--loss", "mse"], "argument --loss: invalid choice: 'mse'"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(_distill_arguments(pair, tmp_path / "out", *arguments))
    assert stopped.value.code == 2
    assert problem in capsys.readouterr().err
