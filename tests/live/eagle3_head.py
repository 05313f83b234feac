"""Trains a small EAGLE-3 head for a Llama model in a minute: `python -m tests.live.eagle3_head TARGET OUT`.

The head reads three hidden states of the target at a token and the embedding of the next token, and predicts
the one after that; from the second draft token on, its own state stands for the target's (Li et al. 2025,
arXiv:2503.01840). It is trained here on the target's states only, so later draft tokens are kept less often.
The weights are named, and the layers read, as vLLM does (`model_executor/models/llama_eagle3.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from driftguard_training.corpus import prompts
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

STEPS, BATCH, TOKENS = 100, 8, 128


class Head(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = LlamaDecoderLayer(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            out = getattr(self.midlayer.self_attn, name).out_features
            setattr(self.midlayer.self_attn, name, nn.Linear(2 * hidden, out, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.norm = LlamaRMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)

    def forward(
        self, embeds: torch.Tensor, features: torch.Tensor, rotary: LlamaRotaryEmbedding
    ) -> torch.Tensor:
        """Logits [B, T, V] of embeddings [B, T, H] and the target's states [B, T, 3H]."""
        layer, residual = self.midlayer, self.fc(features)
        both = torch.cat(
            [layer.input_layernorm(embeds), layer.get_submodule("hidden_norm")(residual)], dim=-1
        )
        positions = torch.arange(both.shape[1])[None]
        mask = torch.full((both.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        attended, _ = layer.self_attn(both, position_embeddings=rotary(both, positions), attention_mask=mask)
        residual = residual + attended
        residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
        logits: torch.Tensor = self.lm_head(self.norm(residual))
        return logits


def main() -> None:
    source, out = map(Path, sys.argv[1:])
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(source)
    config = LlamaConfig.from_pretrained(source)
    middle = config.num_hidden_layers // 2
    layers = (2, middle, config.num_hidden_layers - 3)  # whose inputs vLLM gives to the head
    head, rotary = Head(config), LlamaRotaryEmbedding(config)
    embed = target.get_input_embeddings()
    head.lm_head.weight.data.copy_(embed.get_parameter("weight"))
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3)
    texts = prompts("python", STEPS * BATCH, seed=0, characters=8 * TOKENS)
    ids = torch.tensor([tokenizer(text)["input_ids"][:TOKENS] for text in texts])
    for batch in torch.split(ids, BATCH):
        told = target(batch, output_hidden_states=True)
        features = torch.cat([told.hidden_states[layer] for layer in layers], dim=-1)[:, :-1]
        logits = head(embed(batch[:, 1:]), features, rotary)
        wanted = told.logits[:, 1:].softmax(-1)
        loss = -(wanted * logits.log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"the target's likeliest token: {(logits.argmax(-1) == wanted.argmax(-1)).float().mean():.2f}")
    out.mkdir()
    save_file(head.state_dict(), out / "model.safetensors", metadata={"format": "pt"})
    config.architectures, config.num_hidden_layers = ["LlamaForCausalLMEagle3"], 1
    config.tie_word_embeddings, config.draft_vocab_size = False, config.vocab_size
    config.save_pretrained(out)


if __name__ == "__main__":
    main()
