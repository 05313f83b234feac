"""The weights of an MTP or EAGLE (1) head, from a directory in the layout of speculators.

Both fuse the target's last hidden state with the next token's embedding by a linear layer, in front of a
decoder layer of usual width, and share the target's embedding and output layer.

    config.json    speculators_model_type "mtp" or "eagle", transformer_layer_config; of EAGLE layernorms and
                   fusion_bias
    *.safetensors  MTP: mtp_layers.0: hidden_layernorm, token_layernorm, input_proj, final_layernorm and a
                   layer of Llama or Qwen3, as speculators converts the `mtp.*` of a target
                   EAGLE: fusion_fc, transformer (a layer, without input_layernorm unless layernorms are
                   told), embedding_layernorm and pre_lm_head_layernorm where they are

The last hidden state is what the target's output layer reads, behind its final norm: that is what vLLM gives
to either, and the original EAGLE and Qwen's MTP were trained with.

(github.com/vllm-project/speculators, August 2026: models.mtp, and convert.eagle up to release 0.3)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from driftguard_engine.models.speculators import LAYERS, HeadDirectory, TargetSizes, head_kind

SHARED = ("embed_tokens.weight", "lm_head.weight", "lm_head.bias")  # the target's


@dataclass(frozen=True, slots=True)
class Parts:
    """layer: of transformers. Norms are None where there are none. feeds_normed: whether a pass gives its
    normalised output to the next one."""

    layer: Any
    fuse: nn.Linear
    token_norm: Any
    state_norm: Any
    output_norm: Any
    feeds_normed: bool


class FusedHead(nn.Module):
    """features: the target's last state."""

    parts: Parts

    def __init__(self, layer: Any, target_layers: int) -> None:
        super().__init__()
        self.layer_config, self.features = layer, (target_layers,)
        self.rotary_emb = LAYERS[layer.model_type][2](layer)

    def fused(self, features: Tensor) -> Tensor:
        """What is kept of features [..., hidden]: all."""
        return features

    def entered(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As `Eagle3Head.entered`."""
        parts = self.parts
        embedded = embedded if parts.token_norm is None else parts.token_norm(embedded)
        hidden = hidden if parts.state_norm is None else parts.state_norm(hidden)
        fused = parts.fuse(torch.cat([embedded, hidden], -1))
        return parts.layer.input_layernorm(fused), fused

    def left(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As `Eagle3Head.left`."""
        norm = self.parts.output_norm
        normed = hidden if norm is None else norm(hidden)
        return normed, normed if self.parts.feeds_normed else hidden


class MtpHead(FusedHead):
    """Named as in the checkpoint."""

    def __init__(self, layer: Any, target_layers: int) -> None:
        super().__init__(layer, target_layers)
        decoder_layer, norm, _ = LAYERS[layer.model_type]
        only = decoder_layer(layer, 0)
        for name in ("hidden_layernorm", "token_layernorm", "final_layernorm"):
            setattr(only, name, norm(layer.hidden_size, layer.rms_norm_eps))
        only.input_proj = nn.Linear(2 * layer.hidden_size, layer.hidden_size, bias=False)
        self.mtp_layers = nn.ModuleList([only])

    @property
    def parts(self) -> Parts:  # type: ignore[override]
        only: Any = self.mtp_layers[0]
        norms = only.token_layernorm, only.hidden_layernorm, only.final_layernorm
        return Parts(only, only.input_proj, *norms, feeds_normed=True)


class EagleHead(FusedHead):
    """Named as in the checkpoint."""

    def __init__(self, layer: Any, target_layers: int, *, norms: bool, bias: bool) -> None:
        super().__init__(layer, target_layers)
        decoder_layer, norm, _ = LAYERS[layer.model_type]
        hidden, epsilon = layer.hidden_size, layer.rms_norm_eps
        self.embedding_layernorm = norm(hidden, epsilon) if norms else None
        self.fusion_fc = nn.Linear(2 * hidden, hidden, bias=bias)
        self.transformer = decoder_layer(layer, 0)
        if not norms:
            self.transformer.input_layernorm = nn.Identity()
        self.pre_lm_head_layernorm = norm(hidden, epsilon) if norms else None

    @property
    def parts(self) -> Parts:  # type: ignore[override]
        norms = self.embedding_layernorm, None, self.pre_lm_head_layernorm
        return Parts(self.transformer, self.fusion_fc, *norms, feeds_normed=False)


def read_fused_head(directory: Path, target: TargetSizes, *, field: str) -> FusedHead:
    """The head, in the target's type and on its device.

    Raises InvalidModel: what does not fit, by its name.
    """
    source = HeadDirectory(directory, field)
    layer, told = source.layer_config(), source.config
    tensors = source.tensors(target)
    if layer.hidden_size != target.hidden:
        raise source.refused(
            f"transformer_layer_config.hidden_size: {layer.hidden_size}, the target's is {target.hidden}"
        )
    with torch.device("meta"):
        if head_kind(directory) == "mtp":
            if told.get("num_nextn_predict_layers", 1) != 1:
                raise source.refused(
                    f"num_nextn_predict_layers: {told['num_nextn_predict_layers']!r}, only 1 is computed"
                )
            head: FusedHead = MtpHead(layer, target.layers)
        else:
            norms, bias = bool(told.get("layernorms")), bool(told.get("fusion_bias"))
            head = EagleHead(layer, target.layers, norms=norms, bias=bias)
    return source.filled(head, tensors, target, *SHARED)
