from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import driftguard_engine
import pytest
import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.engine import Engine
from driftguard_training import corpus, pretraining
from driftguard_training.make_models import MADE, HeadShape, Recipe, Shape, make_models
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.core.tiny import request, serve

BUNDLED = Path(driftguard_engine.__file__).parent / "bundled"
TINY = Recipe(
    vocabulary=320,
    context=64,
    target=Shape(layers=2, hidden=32, intermediate=48, head=16),
    draft=Shape(layers=1, hidden=16, intermediate=32, head=16),
    head=HeadShape(features=(0, 1), intermediate=16, kv_heads=1, passes=2),
    rows=4,
    length=32,
    target_steps=6,
    draft_steps=6,
    head_steps=6,
    medusa_heads=2,
    medusa_steps=3,
    streaming_layers=1,
    streaming_steps=3,
    continuations=4,
)


@pytest.fixture
def short_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "python": "def f(x):\n    return x\n",
        "prose": "A word is a word.\n",
        "headers": "int f(int);\n",
    }
    monkeypatch.setattr(corpus, "documents", lambda domain, split: [texts[domain] * 50] * 3)


def _digests(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.usefixtures("short_corpus")
def test_the_same_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_models(tmp_path / name, seed, TINY)
    made = {name: _digests(tmp_path / name) for name in ("a", "b", "c")}
    assert made["a"] == made["b"]
    for model in MADE:
        changed = [
            name for name in made["a"] if name.startswith(f"{model}/") and name.endswith(".safetensors")
        ]
        assert changed
        assert all(made["a"][name] != made["c"][name] for name in changed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]  # no work left behind


@pytest.mark.usefixtures("short_corpus")
def test_an_interrupted_training_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_models(tmp_path / "whole", 0, TINY)
    monkeypatch.setattr(pretraining, "_CHECKPOINT_EVERY_STEPS", 2)
    learning_rate_at = pretraining.Schedule.at
    for interrupted_after in (3, 8, 5, 1000):  # in the target, in the draft, in the head, never
        left = [interrupted_after]

        def at(schedule: pretraining.Schedule, step: int, left: list[int] = left) -> float:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return learning_rate_at(schedule, step)

        monkeypatch.setattr(pretraining.Schedule, "at", at)
        if interrupted_after < 1000:
            with pytest.raises(KeyboardInterrupt):
                make_models(tmp_path / "resumed", 0, TINY)
            assert not (tmp_path / "resumed").exists()
        else:
            make_models(tmp_path / "resumed", 0, TINY)
    assert _digests(tmp_path / "resumed") == _digests(tmp_path / "whole")


def test_bundled_models_are_small_and_hold_no_pickles() -> None:
    files = [path for path in BUNDLED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 13_400_000
    assert {path.suffix or path.name for path in files} == {".json", ".safetensors", "SHA256SUMS"}
    tokenizers = [(BUNDLED / name / "tokenizer.json").read_bytes() for name in ("target", "draft")]
    assert tokenizers[0] == tokenizers[1]


@pytest.mark.parametrize("name", MADE)
def test_bundled_directories_tell_the_recipe_that_makes_them(name: str) -> None:
    told = json.loads((BUNDLED / name / "driftguard_training.json").read_text())
    assert (told["seed"], told["recipe"]) == (0, json.loads(json.dumps(asdict(Recipe()))))
    digests = _digests(BUNDLED / name)
    del digests["SHA256SUMS"]
    sums = "".join(f"{digest}  {file}\n" for file, digest in sorted(digests.items()))
    assert (BUNDLED / name / "SHA256SUMS").read_text() == sums


def test_bundled_models_load_and_speak_the_same_tokens() -> None:
    text = "def main():\n\treturn 'ä → 語'\n"
    for name in ("target", "draft"):
        tokenizer = AutoTokenizer.from_pretrained(BUNDLED / name)
        model = AutoModelForCausalLM.from_pretrained(BUNDLED / name, dtype="auto")
        assert model.dtype == torch.bfloat16
        config = model.config
        assert config.max_position_embeddings == 1024
        assert config.vocab_size == len(tokenizer)
        assert tokenizer.eos_token_id == config.eos_token_id
        for dimension in (config.hidden_size, config.intermediate_size, config.vocab_size):
            assert dimension % 16 == 0
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text  # byte-level: nothing is lost
        assert torch.isfinite(model(input_ids=torch.tensor([ids])).logits).all()
        assert json.loads((BUNDLED / name / "driftguard_training.json").read_text())["seed"] == 0


@pytest.mark.parametrize(
    ("method", "temperature", "least"), [("eagle3", 1.0, 0.3), ("medusa", 0.0, 0.2), ("streaming", 0.0, 0.1)]
)
def test_the_bundled_heads_draft_for_the_bundled_target(
    method: str, temperature: float, least: float
) -> None:
    engine = Engine(EngineConfig(str(BUNDLED / "target"), str(BUNDLED / method), method, max_length=256))
    prompt = engine.tokenizer("def main():\n    return ")["input_ids"]
    asked = (request(str(seed), prompt, 60, temperature=temperature, seed=seed) for seed in range(4))
    done = serve(engine, *asked).values()
    drafted, accepted = (sum(getattr(each.counts, name) for each in done) for name in ("drafted", "accepted"))
    assert accepted > least * drafted
