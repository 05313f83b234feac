"""A head that drafts a block at once, with its slot cache: DFlash (Chen, Liang, Liu 2026, arXiv:2602.06036),
and DSpark, which adds a Markov head.

The target's features of a position, fused to one vector, give each layer its keys and values there. Behind
them the head reads a block: the newest token, and mask tokens for those behind it, each of which sees all of
the block and all positions before it. A place drafts its own token, or where `drafts_at_first` the next one.

Bits on the CPU: as in `span_layers`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from driftguard_engine.kernels import layers
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.dflash_head import BlockHead, MarkovHead
from driftguard_engine.models.linear import choose
from driftguard_engine.models.llama_weights import heads_of, layer_of, norm_of
from driftguard_engine.models.span_layers import SpanLayers, filled


class BlockModel:
    """features: the layers of the target that it reads. most: tokens that a block drafts.

    A block is written behind the positions whose features are known, and overwritten by theirs later.
    """

    def __init__(
        self, head: BlockHead, token_ids: Tensor, embedding: Tensor, vocabulary: int, slots: int, room: int
    ) -> None:
        """As `read_block_head` gives the head and token_ids. embedding: the target's. room: positions of a
        slot; a block has as many more."""
        config, own = head.config, head.embed_tokens
        heads = heads_of(config.layer)
        self.features, self.block = config.features, config.block
        self.most = config.block - (not config.drafts_at_first)
        self._mask_token_id = config.mask_token_id
        self._embedding = embedding if own is None else own.weight.detach()
        self._fuse, self._hidden_norm = choose(head.fc.weight, None), norm_of(head.hidden_norm)
        self._layers = [layer_of(each, heads, layers) for each in head.layers]
        self._norm, self._head = norm_of(head.norm), choose(head.lm_head.weight, None)
        self._token_ids, self._vocabulary = token_ids.to(embedding.device), vocabulary
        self._spans = SpanLayers(
            heads, len(self._layers), slots, room + config.block, head.rotary_emb, self._embedding
        )
        self._cache = self._spans.cache
        self.markov = None if head.markov_head is None else MarkovBias(head.markov_head)

    @torch.inference_mode()
    def keep(self, features: Tensor, places: Tensor) -> None:
        """features [N, F]: of the target, for these rows [N] of the cache."""
        fused = self._hidden_norm.apply(self._fuse.apply(filled(features)))
        for index, layer in enumerate(self._layers):
            self._spans.store(index, layer, fused, places)

    def places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Rows of the cache."""
        return self._cache.rows(slots, positions)

    @torch.inference_mode()
    def read(self, spans: Sequence[Span], newest: Tensor) -> Tensor:
        """What the output layer reads of blocks, [B, block, hidden]. spans: the places of each block; newest
        [B]: the tokens at the first ones."""
        batch = self._spans.batch(spans, causal=False)
        masks = [self._mask_token_id] * (self.block - 1)
        token_ids = [each for token in newest.tolist() for each in (token, *masks)]
        hidden = self._embedding[self._spans.filled(token_ids, batch)]
        for index, layer in enumerate(self._layers):
            hidden = self._spans.run(index, layer, layer.attention_norm.apply(hidden), hidden, batch)
        return self._norm.apply(hidden)[: batch.tokens].view(len(spans), self.block, -1)

    @torch.inference_mode()
    def predict(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """Of what the output layer reads [N, hidden]: logits [N, V], -inf for tokens that it has not. bias
        [N, D]: of the Markov head."""
        found = self._head.apply(filled(hidden))[: len(hidden)]
        logits = found.new_full((len(hidden), self._vocabulary), -torch.inf)
        logits[:, self._token_ids] = found if bias is None else found + bias
        return logits

    def copy(self, source: int, span: Span) -> None:
        self._cache.copy(source, span)


class MarkovBias:
    """What DSpark adds to the logits of each place, by the token before it: place after place of a block."""

    def __init__(self, head: MarkovHead) -> None:
        self._kind = head.kind
        self._before, self._output = head.markov_w1.weight.detach(), choose(head.markov_w2.weight, None)
        if head.kind == "gated":
            self._inner = choose(head.gate_proj.weight, head.gate_proj.bias)
        if head.kind == "rnn":
            self._inner = choose(head.joint_proj.weight, head.joint_proj.bias)

    @torch.inference_mode()
    def bias(self, tokens: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[N, D], and the state for the next place. tokens [N]: those before; hidden [N, H]: what the output
        layer reads; state: None at the first place of a block."""
        given, before = len(tokens), filled(self._before[tokens])
        hidden = filled(hidden)
        if self._kind == "gated":
            before = torch.sigmoid(self._inner.apply(torch.cat([hidden, before], -1))) * before
        if self._kind == "rnn":
            state = torch.zeros_like(before) if state is None else filled(state)
            read = torch.cat([state, before, hidden], -1)
            gate, candidate, output = self._inner.apply(read).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state, before = gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(output)
        return self._output.apply(before.contiguous())[:given], None if state is None else state[:given]
