"""Makes heads for the bundled target, each in some minutes on two cores, those that are not there yet:
`python engine/bench/make_heads.py mtp peagle --output DIRECTORY`.

They learn Python and English as the bundled EAGLE-3 head does, on text and on the target's own continuations.
That of P-EAGLE begins as the bundled one, which differs from it in the drafts behind the first alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

import torch
from driftguard_engine.models.dflash_head import BlockConfig, BlockHead
from driftguard_engine.models.fused_head import EagleHead, MtpHead
from driftguard_engine.options import BUNDLED
from driftguard_training.heads import Head, frequent_tokens, head_loss, new_head, save_head
from driftguard_training.model_directories import load_model
from driftguard_training.pretraining import Schedule, train
from driftguard_training.streams import batch, continuations, token_streams
from safetensors.torch import load_file
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

_SHARES = {"python": 0.3, "prose": 0.2, "continuations": 0.5}
_FEATURES = (2, 5, 9)
_VOCABULARY = 1024  # of DFlash and DSpark, which have output layers of their own
_LENGTH, _ROWS, _DRAFTS = 128, 8, 4
STEPS = {"mtp": 300, "eagle": 200, "peagle": 300, "dflash": 300, "dspark": 300}


def new(kind: str, target: PreTrainedModel, token_ids: torch.Tensor) -> Head:
    """Of one layer. token_ids: those that it drafts."""
    config: Any = target.config
    family: Any = Qwen3Config if kind in ("dflash", "dspark") else LlamaConfig
    layer = family(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=2,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
    )
    mask: int = config.eos_token_id
    if kind == "mtp":
        return MtpHead(layer, config.num_hidden_layers)
    if kind == "eagle":
        return EagleHead(layer, config.num_hidden_layers, norms=True, bias=False)
    if kind == "peagle":
        parallel = new_head(target, _FEATURES, token_ids, layer, mask)
        begun = load_file(BUNDLED / "eagle3" / "model.safetensors")
        parallel.load_state_dict({"mask_hidden": parallel.mask_hidden} | begun)
        return parallel
    of_kind: dict[str, Any] = {"block": _DRAFTS + 1, "drafts_at_first": False}
    if kind == "dspark":
        of_kind = {"block": _DRAFTS, "drafts_at_first": True, "markov_rank": 32}
    head = BlockHead(
        BlockConfig(layer, len(token_ids), _FEATURES, mask_token_id=mask, **of_kind),
        config.hidden_size,
        embeds=False,
    )
    output = cast("Any", target).get_output_embeddings()
    head.lm_head.weight.data.copy_(output.weight.detach()[token_ids])
    return head


def make(kinds: list[str], output: Path, seed: int, given: int | None) -> None:
    """given: how many steps each learns."""
    loaded = load_model(BUNDLED / "target", "target")
    target: PreTrainedModel = loaded.model
    tokenizer: Any = loaded.tokenizer
    streams = dict(token_streams(tokenizer, ("python", "prose"), "train"))
    streams |= continuations(target, streams, {"python": 0.6, "prose": 0.4}, 256, _LENGTH, seed)
    frequent = frequent_tokens([streams[name] for name in _SHARES], _VOCABULARY, loaded.vocabulary)
    for kind in kinds:
        schedule = Schedule(given or STEPS[kind], learning_rate=4e-3, warmup_steps=50)
        token_ids = frequent if kind in ("dflash", "dspark") else torch.arange(loaded.vocabulary)
        torch.manual_seed(seed)
        head = new(kind, target, token_ids)

        def loss_at(
            step: int, head: Head = head, ids: torch.Tensor = token_ids, steps: int = schedule.steps
        ) -> tuple[torch.Tensor, dict[str, float]]:
            # The last tenth sees whole contexts: a head that never saw one accepts less behind long texts.
            rows, length = (_ROWS, _LENGTH) if step < 0.9 * steps else (1, _ROWS * _LENGTH)
            tokens = batch(streams, _SHARES, rows, length, seed, step)
            by = "lk-hybrid" if step < steps // 3 else "nla"
            loss, accepted = head_loss(head, target, ids, tokens, _DRAFTS, by)  # type: ignore[arg-type]
            return loss, {f"acceptance {place}": each for place, each in enumerate(accepted, 1)}

        checkpoint = output / f"{kind}.checkpoint"
        train(head, loss_at, schedule, checkpoint, kind)
        save_head(output / kind, head, token_ids, torch.bfloat16, {"seed": seed, "steps": schedule.steps})
        checkpoint.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=STEPS)
    parser.add_argument("--output", type=Path, required=True, help="directory for a directory of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="without it as many as docs/drafters.md tells")
    arguments = parser.parse_args()
    missing = [kind for kind in arguments.kinds if not (arguments.output / kind).exists()]
    if missing:
        make(missing, arguments.output, arguments.seed, arguments.steps)


if __name__ == "__main__":
    main()
