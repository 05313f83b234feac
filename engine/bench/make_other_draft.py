"""Makes a draft of another family for the bundled target, in a few minutes:
`python engine/bench/make_other_draft.py --output DIRECTORY`.

Its tokenizer is byte-level as the target's, with half as many tokens, of other text, and digits one by one.
It begins as the bundled draft, each token with the mean of the embeddings of the target's tokens for its
text, and learns Python and English, and what the target writes, as text: a law over the target's tokens
cannot be distilled into others.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import cast

import torch
from driftguard_engine.options import BUNDLED
from driftguard_training import corpus
from driftguard_training.model_directories import load_model, save_model
from driftguard_training.pretraining import Schedule, train
from driftguard_training.streams import batch, continuations, token_streams
from driftguard_training.tokenization import train_tokenizer
from tokenizers import pre_tokenizers
from torch.nn import functional
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

_DOMAINS = ("python", "prose")
_SHARES = {"python": 0.3, "prose": 0.2, "continuations": 0.5}
_VOCABULARY, _CONTEXT, _LENGTH, _ROWS, _STEPS = 1_024, 1_024, 256, 16, 200
_END = "</s>"


def translated(
    draft: PreTrainedModel, ours: PreTrainedTokenizerBase, own: PreTrainedTokenizerFast
) -> LlamaForCausalLM:
    """The draft with another vocabulary."""
    config = LlamaConfig(
        **draft.config.to_dict() | {"vocab_size": len(own), "eos_token_id": own.eos_token_id}
    )
    model = LlamaForCausalLM(config)
    state = draft.state_dict()
    pieces = [ours.encode(own.decode([token])) or [0] for token in range(len(own))]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.stack([state[name][each].mean(0) for each in pieces])
    model.load_state_dict(state)
    return model


def make(output: Path, seed: int) -> None:
    target = load_model(BUNDLED / "target", "target")
    texts = [text for name in _DOMAINS for text in corpus.documents(name, "train")]
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer = train_tokenizer(texts[::2], _VOCABULARY, _CONTEXT, end=_END, first=digits)
    streams = dict(token_streams(tokenizer, _DOMAINS, "train"))
    theirs = token_streams(cast("PreTrainedTokenizerFast", target.tokenizer), _DOMAINS, "train")
    spoken = continuations(target.model, theirs, {"python": 0.6, "prose": 0.4}, 512, _LENGTH, seed)
    written = target.tokenizer.decode(spoken["continuations"].tolist(), skip_special_tokens=True)
    streams["continuations"] = torch.tensor(tokenizer.encode(written))
    torch.manual_seed(seed)
    model = translated(load_model(BUNDLED / "draft", "draft").model, target.tokenizer, tokenizer)

    def loss_at(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        length = _CONTEXT if step >= _STEPS * 0.9 else _LENGTH  # untrained positions would give noise
        tokens = batch(streams, _SHARES, _ROWS * _LENGTH // length, length, seed, step)
        logits = model(tokens).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss, {"loss": loss.item()}

    with tempfile.TemporaryDirectory() as directory:
        train(model, loss_at, Schedule(_STEPS, 2e-3, 20), Path(directory) / "checkpoint", "draft")
    save_model(output, model, tokenizer, torch.bfloat16, {"parent": None, "seed": seed, "steps": _STEPS})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="new directory for the draft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    make(arguments.output, arguments.seed)


if __name__ == "__main__":
    main()
