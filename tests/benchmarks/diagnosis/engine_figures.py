"""Requests and canary probes of the bundled pair in the real engine, healthy and with each planted fault.

Every condition answers the same conversations, so only the fault differs. The figures are kept below build/,
because a run takes some minutes; delete that file to measure again.
"""

from __future__ import annotations

import functools
import itertools
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import msgspec
import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import FinishedRequest, Request, SamplingParams
from driftguard_engine.drafters.draft_model import DraftModelDrafter
from driftguard_engine.engine import Engine
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.llama import LlamaModel
from driftguard_engine.scheduler import PrefillChunk, ReusedPrefix
from driftguard_training.corpus import prompts
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging as transformers_logging

ROOT = Path(__file__).parents[3]
BUNDLED = ROOT / "engine" / "driftguard_engine" / "bundled"
KEPT = ROOT / "build" / "diagnosis-figures.json"
SEED = 20_261_125
K = 4
OUTPUT_TOKENS = 40
CONVERSATIONS, TURNS = 26, 4  # of each domain
PROBES = 8  # of each domain
CHUNK_TOKENS = 32  # the grain of prefix reuse
LONGEST = 960
SLOTS = 32  # more than conversations, so that the next turn finds the one before
SCALED_FROM = 256


class Figures(msgspec.Struct, frozen=True):
    """One answered request. `turn` of its conversation; a probe is a conversation of its own."""

    conversation: int
    turn: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    cached_tokens: int
    steps: int
    drafted: tuple[int, ...]  # per position
    accepted: tuple[int, ...]


class Condition(msgspec.Struct, frozen=True):
    """`traffic` by domain; `probes`: the same prompts, read anew and from the prefix cache."""

    traffic: dict[str, list[Figures]]
    probes: list[Figures]
    warm_probes: list[Figures]


@dataclass(frozen=True, slots=True)
class Plant:
    """How one condition is made: other weights, another template of every prompt, another engine."""

    draft: Callable[[str, Tensor], Tensor] | None = None
    target: Callable[[str, Tensor], Tensor] | None = None
    template: Callable[[str], str] = str
    patches: Callable[[], AbstractContextManager[None]] = nullcontext
    after_loading: Callable[[Engine], None] = id  # type: ignore[assignment]
    domains: tuple[str, ...] = ("python", "prose")


def rounded(bits: int) -> Callable[[str, Tensor], Tensor]:
    """Round to nearest with one scale per matrix, as a careless quantisation does."""

    def weights(name: str, one: Tensor) -> Tensor:
        if one.ndim < 2 or "embed" in name:
            return one
        scale = float(one.abs().max()) / (2 ** (bits - 1) - 1)
        whole: Tensor = torch.round(one / scale)
        return whole.mul(scale)

    return weights


def random_weights(name: str, one: Tensor) -> Tensor:
    """Of the same spread: what a draft that was never loaded, or was lost, computes with."""
    if one.ndim < 2:
        return one
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(one.shape, generator=generator) * one.float().std()


@contextmanager
def stale_draft_cache() -> Iterator[None]:
    """Where a prefix is reused, the draft's keys and values of the prompt are those of other tokens."""
    reuse, prefill = Engine._reuse, Engine._prefill

    def overwrite(engine: Engine, request_id: str, start: int, count: int) -> None:
        sequence = engine._sequences[request_id]
        drafter = sequence.draft.drafter
        if isinstance(drafter, DraftModelDrafter) and sequence.reused_prompt_tokens:
            other = [7 + (start + place) % 1_900 for place in range(count)]
            drafter.prefill(other, [Span(sequence.slot, start, count)], None)

    def reuse_stale(engine: Engine, reused: ReusedPrefix) -> None:
        reuse(engine, reused)
        overwrite(engine, reused.request_id, reused.start, reused.count)

    def prefill_stale(engine: Engine, chunks: Sequence[PrefillChunk]) -> None:
        prefill(engine, chunks)
        for chunk in chunks:
            overwrite(engine, chunk.request_id, chunk.start, chunk.count)

    with (
        mock.patch.object(Engine, "_reuse", reuse_stale),
        mock.patch.object(Engine, "_prefill", prefill_stale),
    ):
        yield


def lost_rope_scaling(engine: Engine) -> None:
    """Beyond SCALED_FROM the draft rotates by four times the position, as without the scaling it needs."""
    drafter = engine._drafts.drafter
    assert isinstance(drafter, DraftModelDrafter)
    assert isinstance(drafter.model, LlamaModel)
    for table in (drafter.model._spans.cos, drafter.model._spans.sin):
        kept = table.clone()
        places = torch.arange(SCALED_FROM, len(kept))
        table[SCALED_FROM:] = kept[(4 * places) % len(kept)]


def escaped(text: str) -> str:
    """A template that is filled with text in which every line break became two characters."""
    return text.replace("\n", "\\n")


PLANTS: Mapping[str, Plant] = {
    "healthy": Plant(domains=("python", "prose", "headers")),
    "draft_random": Plant(draft=random_weights),
    "draft_zeroed": Plant(draft=lambda _, one: torch.zeros_like(one)),
    "draft_quantised": Plant(draft=rounded(3)),
    "target_other": Plant(target=rounded(3)),
    "template_broken": Plant(template=escaped, domains=("python", "prose", "headers")),
    "stale_draft_cache": Plant(patches=stale_draft_cache),
    "rope_scaling_lost": Plant(after_loading=lost_rope_scaling),
}


@functools.cache
def figures() -> dict[str, Condition]:
    """Of every condition; measured where they are not kept."""
    found = msgspec.json.decode(KEPT.read_bytes(), type=dict[str, Condition]) if KEPT.exists() else {}
    if found.keys() >= PLANTS.keys():
        return found
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for name, plant in PLANTS.items():
        if name in found:
            continue
        found[name] = _condition(plant)
        print(f"engine, {name}: {_told(found[name])}", file=sys.stderr, flush=True)
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_bytes(msgspec.json.encode(found))
    return found


def acceptance(requests: Sequence[Figures]) -> float:
    return sum(sum(one.accepted) for one in requests) / sum(sum(one.drafted) for one in requests)


def _told(condition: Condition) -> str:
    parts = [f"{domain} {acceptance(of):.3f}" for domain, of in condition.traffic.items()]
    return ", ".join([*parts, f"probes {acceptance(condition.probes):.3f}"])


def _condition(plant: Plant) -> Condition:
    with planted(plant) as engine:
        probes = _probe_prompts(engine, plant)
        cold = _ask(engine, probes, temperature=0.0)
        warm = _ask(engine, probes, temperature=0.0)
        return Condition({name: _conversations(engine, plant, name) for name in plant.domains}, cold, warm)


@contextmanager
def planted(plant: Plant) -> Iterator[Engine]:
    """An engine that would refuse some of these weights otherwise."""
    unchecked = mock.patch("driftguard_engine.models.loading.check_weights", return_value=None)
    with tempfile.TemporaryDirectory() as directory, unchecked, plant.patches():
        draft = changed(BUNDLED / "draft", plant.draft, Path(directory))
        target = changed(BUNDLED / "target", plant.target, Path(directory))
        config = EngineConfig(
            str(target),
            str(draft),
            threads=1,
            max_batch=SLOTS,
            num_speculative_tokens=K,
            prefill_chunk_tokens=CHUNK_TOKENS,
        )
        engine = Engine(config)
        plant.after_loading(engine)
        yield engine


def changed(model: Path, weights: Callable[[str, Tensor], Tensor] | None, directory: Path) -> Path:
    if weights is None:
        return model
    copy = directory / model.name
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("SHA256SUMS"))
    kept = load_file(model / "model.safetensors")
    changed = {name: weights(name, one).to(one.dtype).contiguous() for name, one in kept.items()}
    save_file(changed, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def _conversations(engine: Engine, plant: Plant, domain: str) -> list[Figures]:
    """Turns of a conversation begin with all before them; some conversations are long from the start."""
    random_ = random.Random(f"{SEED}:{domain}")
    said = [
        prompts(domain, TURNS, SEED + number, characters=random_.choice((100, 160, 300, 700)))
        for number in range(CONVERSATIONS)
    ]
    found: list[Figures] = []
    histories: list[list[int]] = [[] for _ in said]
    for turn in range(TURNS):
        asked: list[tuple[int, int, list[int]]] = []
        for number, texts in enumerate(said):
            prompt = histories[number] + _tokens(engine, plant.template(texts[turn]))
            if len(prompt) + OUTPUT_TOKENS <= LONGEST:
                asked.append((number, turn, prompt))
        answers = _ask(engine, asked, temperature=1.0)
        for one in answers:
            histories[one.conversation] = [*one.prompt, *one.output]
        found += answers
    return found


def _probe_prompts(engine: Engine, plant: Plant) -> list[tuple[int, int, list[int]]]:
    """Of each domain as many short as long ones."""
    found = []
    for place, domain in enumerate(("python", "prose")):
        for number, text in enumerate(prompts(domain, PROBES, SEED - 1, characters=1_300)):
            shown = text if number % 2 else text[:200]
            tokens = _tokens(engine, plant.template(shown))
            found.append((place * PROBES + number, 0, tokens))
    return found


def _tokens(engine: Engine, text: str) -> list[int]:
    return list(engine.tokenizer.encode(text, add_special_tokens=False))


def _ask(engine: Engine, asked: Sequence[tuple[int, int, list[int]]], temperature: float) -> list[Figures]:
    """As many at a time as the engine has slots, in order."""
    done: dict[str, FinishedRequest] = {}
    for start in itertools.count(0, engine.config.max_batch):
        part = asked[start : start + engine.config.max_batch]
        if not part:
            break
        for number, turn, prompt in part:
            params = SamplingParams(
                max_tokens=OUTPUT_TOKENS, temperature=temperature, seed=SEED + number, ignore_eos=True
            )
            engine.submit(Request(f"{number}:{turn}", tuple(prompt), params, datetime.now(UTC)))
        while engine.has_work():
            for output in engine.step():
                if output.finished is not None:
                    done[output.request_id] = output.finished
    return [_figures(number, turn, done[f"{number}:{turn}"]) for number, turn, _ in asked]


def _figures(conversation: int, turn: int, finished: FinishedRequest) -> Figures:
    counts = finished.counts
    return Figures(
        conversation,
        turn,
        finished.request.prompt_token_ids,
        finished.output_token_ids,
        finished.reused_prompt_tokens,
        counts.steps,
        tuple(counts.drafted_per_position),
        tuple(counts.accepted_per_position),
    )


if __name__ == "__main__":
    figures()
