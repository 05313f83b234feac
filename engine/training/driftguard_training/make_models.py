"""Make the bundled tokenizer, target, draft, heads and streaming adapter from text of Python and torch.

The target learns every domain of the corpus; the others are distilled from the target on two of
them, so that traffic from the third is a real drift. An interrupted run is resumed by the next one. The same
seed, text, thread count and processor give the same bytes.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from driftguard_engine.models.eagle3_head import Eagle3Head
from driftguard_engine.models.medusa_head import MedusaHeads
from driftguard_engine.models.streaming_adapter import StreamingAdapter
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from driftguard_training import corpus, streaming
from driftguard_training.acceptance import distillation_loss
from driftguard_training.heads import PASSES, head_loss, new_head, save_head
from driftguard_training.medusa import heads_loss, measured_tree, new_heads, save_heads
from driftguard_training.model_directories import load_model, save_model
from driftguard_training.pretraining import Schedule, train
from driftguard_training.settings import Loss
from driftguard_training.streams import TokenStreams, batch, continuations, token_streams
from driftguard_training.tokenization import train_tokenizer

_TARGET_SHARES = {"python": 0.38, "prose": 0.22, "headers": 0.40}
_DRAFT_SHARES = {"python": 0.60, "prose": 0.40}
_DISTILLATION_SHARES = {"python": 0.30, "prose": 0.20, "continuations": 0.50}
MADE = ("target", "draft", "eagle3", "medusa", "streaming")


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of one Llama model; all multiples of 16, the size of a matrix tile."""

    layers: int
    hidden: int
    intermediate: int
    head: int = 32


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The EAGLE-3 head, as wide as the target, whose output layer it shares. passes: drafts of a chain that
    it is trained for."""

    features: tuple[int, ...] = (2, 5, 9)  # behind 2, half, and all but one of the layers
    intermediate: int = 192
    kv_heads: int = 2
    passes: int = PASSES


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the bytes of the models, besides the seed and the text."""

    vocabulary: int = 2048
    context: int = 1024
    target: Shape = Shape(layers=10, hidden=192, intermediate=544)
    draft: Shape = Shape(layers=2, hidden=128, intermediate=320)
    head: HeadShape = HeadShape()
    rows: int = 16
    length: int = 256
    target_steps: int = 900
    draft_steps: int = 900
    head_steps: int = 400
    medusa_heads: int = 4
    medusa_layers: int = 1
    medusa_rows: int = 4
    medusa_steps: int = 250
    streaming_layers: int = 4
    streaming_rank: int = 16
    streaming_steps: int = 120
    # The last tenth of the steps uses whole contexts: the output at untrained positions would be noise.
    long_share: float = 0.1
    # The draft must predict the target's own output, not only human text: half of its rows are these.
    continuations: int = 1024


def make_models(output: Path, seed: int, recipe: Recipe = Recipe()) -> None:
    """Write output/target and output/draft (bf16 safetensors, plain transformers directories), and
    output/eagle3, output/medusa and output/streaming (in the layouts of speculators, of Medusa's authors, and
    ours)."""
    work = output.with_name(f".{output.name}-work")
    texts = [text for name in corpus.domains() for text in corpus.documents(name, "train")]
    tokenizer = train_tokenizer(texts, recipe.vocabulary, recipe.context)
    streams = token_streams(tokenizer, corpus.domains(), "train")
    if not (work / "target").exists():
        target = new_model(recipe.target, recipe, tokenizer, seed)
        train_target(target, streams, recipe, seed, work)
        _save(work / "target", target, tokenizer, recipe, seed, streams)
    # The target is published in bf16, so the draft and the head learn from the rounded target.
    rounded = load_model(work / "target", "target").model
    told = _with_continuations(rounded, streams, recipe, seed)
    if not (work / "draft").exists():
        draft = new_model(recipe.draft, recipe, tokenizer, seed + 1)
        train_draft(draft, rounded, told, recipe, seed, work)
        _save(work / "draft", draft, tokenizer, recipe, seed, streams)
    if not (work / "eagle3").exists():
        head = new_eagle3_head(rounded, recipe, seed)
        train_head(head, rounded, told, recipe, seed, work)
        token_ids, facts = torch.arange(len(tokenizer)), _facts(recipe, seed, streams)
        save_head(work / "eagle3", head, token_ids, torch.bfloat16, facts)
    if not (work / "medusa").exists():
        heads = new_heads(rounded, recipe.medusa_heads, recipe.medusa_layers)
        train_medusa(heads, rounded, told, recipe, seed, work)
        heads.to(torch.bfloat16).to(torch.float32)  # as they are published
        rows = 4 * recipe.rows
        windows = batch(told, _DISTILLATION_SHARES, rows, recipe.length, seed + 3, recipe.medusa_steps)
        choices, facts = measured_tree(heads, rounded, windows), _facts(recipe, seed, streams)
        save_heads(work / "medusa", heads, choices, torch.bfloat16, facts)
    if not (work / "streaming").exists():
        torch.manual_seed(seed + 4)
        adapter = streaming.new_adapter(
            rounded, recipe.streaming_layers, recipe.streaming_rank, recipe.medusa_heads
        )
        train_streaming(adapter, rounded, told, recipe, seed, work)
        adapter.to(torch.bfloat16).to(torch.float32)
        rows = 2 * recipe.rows
        windows = batch(told, _DISTILLATION_SHARES, rows, recipe.length, seed + 4, recipe.streaming_steps)
        choices = streaming.measured_tree(adapter, rounded, windows)
        facts = _facts(recipe, seed, streams)
        streaming.save_adapter(work / "streaming", adapter, choices, torch.bfloat16, facts)
    for name in MADE:
        shutil.rmtree(output / name, ignore_errors=True)
        shutil.copytree(work / name, output / name)
    shutil.rmtree(work)


def new_model(
    shape: Shape, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int
) -> LlamaForCausalLM:
    """A randomly initialised Llama with tied embeddings."""
    torch.manual_seed(seed)
    heads = shape.hidden // shape.head
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=shape.head,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def train_target(
    model: LlamaForCausalLM, streams: TokenStreams, recipe: Recipe, seed: int, work: Path
) -> None:
    """Next-token cross-entropy on all domains."""

    def loss_at(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        rows, length = _rows_and_length(recipe, step, recipe.target_steps)
        tokens = batch(streams, _TARGET_SHARES, rows, length, seed, step)  # [rows, length]
        logits = model(input_ids=tokens).logits  # [rows, length, V]
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss, {"loss": loss.item()}

    schedule = Schedule(recipe.target_steps, learning_rate=2e-3, warmup_steps=min(100, recipe.target_steps))
    train(model, loss_at, schedule, work / "target.checkpoint", "target")


def train_draft(
    model: LlamaForCausalLM,
    target: PreTrainedModel,
    streams: TokenStreams,
    recipe: Recipe,
    seed: int,
    work: Path,
) -> None:
    """Distil on text and on the target's own continuations of it: first with LK-hybrid, then with NLA."""

    def loss_at(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        rows, length = _rows_and_length(recipe, step, recipe.draft_steps)
        tokens = batch(streams, _DISTILLATION_SHARES, rows, length, seed + 1, step)  # [rows, length]
        with torch.no_grad():
            p = torch.softmax(target(input_ids=tokens).logits.flatten(0, 1), dim=-1)  # [rows x length, V]
        logits = model(input_ids=tokens).logits.flatten(0, 1)  # [rows x length, V]
        cold = step < recipe.draft_steps // 3
        loss, accepted = distillation_loss(p, logits, "lk-hybrid" if cold else "nla")
        return loss, {"loss": loss.item(), "acceptance": accepted.mean().item()}

    schedule = Schedule(recipe.draft_steps, learning_rate=4e-3, warmup_steps=min(100, recipe.draft_steps))
    train(model, loss_at, schedule, work / "draft.checkpoint", "draft")


def new_eagle3_head(target: PreTrainedModel, recipe: Recipe, seed: int) -> Eagle3Head:
    """A head of one layer like the target's own, that drafts all tokens."""
    shape = recipe.head
    layer = LlamaConfig(
        **target.config.to_diff_dict()
        | {
            "num_hidden_layers": 1,
            "num_key_value_heads": shape.kv_heads,
            "intermediate_size": shape.intermediate,
            "tie_word_embeddings": False,
        }
    )
    torch.manual_seed(seed + 2)
    return new_head(target, shape.features, torch.arange(layer.vocab_size), layer)


def train_head(
    head: Eagle3Head,
    target: PreTrainedModel,
    streams: TokenStreams,
    recipe: Recipe,
    seed: int,
    work: Path,
) -> None:
    """Distil as `train_draft`, in chains of drafts as they are drafted later."""
    token_ids = torch.arange(head.config.layer.vocab_size)

    def loss_at(step: int, kind: Loss) -> tuple[torch.Tensor, list[float]]:
        rows, length = _rows_and_length(recipe, step, recipe.head_steps)
        tokens = batch(streams, _DISTILLATION_SHARES, rows, length, seed + 2, step)  # [rows, length]
        return head_loss(head, target, token_ids, tokens, recipe.head.passes, kind)

    schedule = Schedule(recipe.head_steps, learning_rate=4e-3, warmup_steps=min(50, recipe.head_steps))
    _distil_places(head, loss_at, schedule, work, "eagle3")


def _distil_places(
    module: torch.nn.Module,
    loss_at: Callable[[int, Loss], tuple[torch.Tensor, list[float]]],
    schedule: Schedule,
    work: Path,
    name: str,
) -> None:
    """Of what drafts several places at once. loss_at(step, kind of loss): the loss and the acceptance of each
    place."""

    def both(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        loss, accepted = loss_at(step, "lk-hybrid" if step < schedule.steps // 3 else "nla")
        shown = {f"acceptance {place}": each for place, each in enumerate(accepted, 1)}
        return loss, {"loss": loss.item(), **shown}

    train(module, both, schedule, work / f"{name}.checkpoint", name)


def train_medusa(
    heads: MedusaHeads, target: PreTrainedModel, streams: TokenStreams, recipe: Recipe, seed: int, work: Path
) -> None:
    """Distil as `train_draft`."""

    def loss_at(step: int, kind: Loss) -> tuple[torch.Tensor, list[float]]:
        tokens = batch(streams, _DISTILLATION_SHARES, recipe.medusa_rows, recipe.length, seed + 3, step)
        return heads_loss(heads, target, tokens, kind)

    schedule = Schedule(recipe.medusa_steps, learning_rate=4e-3, warmup_steps=min(50, recipe.medusa_steps))
    _distil_places(heads, loss_at, schedule, work, "medusa")


def train_streaming(
    adapter: StreamingAdapter,
    target: PreTrainedModel,
    streams: TokenStreams,
    recipe: Recipe,
    seed: int,
    work: Path,
) -> None:
    """Distil as `train_draft`."""

    def loss_at(step: int, kind: Loss) -> tuple[torch.Tensor, list[float]]:
        tokens = batch(streams, _DISTILLATION_SHARES, recipe.medusa_rows, recipe.length, seed + 4, step)
        return streaming.adapter_loss(adapter, target, tokens, kind)

    target.requires_grad_(False)  # what it would take to compute its gradients is saved
    schedule = Schedule(
        recipe.streaming_steps, learning_rate=5e-3, warmup_steps=min(30, recipe.streaming_steps)
    )
    _distil_places(adapter, loss_at, schedule, work, "streaming")


def _with_continuations(
    target: PreTrainedModel, streams: TokenStreams, recipe: Recipe, seed: int
) -> TokenStreams:
    """The streams, and the target's own continuations of them as one more."""
    print(f"the target continues {recipe.continuations} texts", flush=True)
    spoken = continuations(target, streams, _DRAFT_SHARES, recipe.continuations, recipe.length, seed)
    return {**streams, **spoken}


def _rows_and_length(recipe: Recipe, step: int, steps: int) -> tuple[int, int]:
    """Batches of about the same number of tokens; whole contexts at the end."""
    length = recipe.context if step >= steps * (1 - recipe.long_share) else recipe.length
    return max(1, recipe.rows * recipe.length // length), length


def _save(
    directory: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    seed: int,
    streams: TokenStreams,
) -> None:
    save_model(directory, model, tokenizer, torch.bfloat16, _facts(recipe, seed, streams))


def _facts(recipe: Recipe, seed: int, streams: TokenStreams) -> dict[str, object]:
    tokens = {name: len(stream) for name, stream in streams.items()}
    return {"parent": None, "seed": seed, "recipe": asdict(recipe), "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory for " + ", ".join(MADE))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    make_models(arguments.output, arguments.seed)


if __name__ == "__main__":
    main()
