"""What a step of decoding does around the passes of the models: reads its rows, feeds the models, appends.

Each function runs one kernel, which can be captured in a CUDA graph; with launcher None torch computes the
same on the CPU: the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels.cuda.launcher import Launcher

_THREADS = 32  # as in csrc
_COUNTS = 4  # columns of the outputs before the tokens


@dataclass(frozen=True, slots=True)
class SlotState:
    """The sequences in S slots of up to N tokens. All [S] but token_ids and eos_token_ids.

    Whatever lengths and limits say, no token beside a slot is read or written.
    """

    token_ids: Tensor  # [S, N] int64
    lengths: Tensor  # int64: tokens of the sequence, 1 .. N
    limits: Tensor  # int64: how many it may have, at most N
    ended: Tensor  # int64: 0 or 1
    heeds_ends: Tensor  # int64: 0, or 1: ends with an end-of-sequence token
    seeds: Tensor  # int64
    temperatures: Tensor  # float32
    scales: Tensor  # float32, see `SamplingBatch.scale`
    top_ps: Tensor  # float32
    top_ks: Tensor  # int32
    eos_token_ids: Tensor  # [E] int64


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Of a draft model. length: positions that it can read, at least 2."""

    length: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """What a draft model reads. The first pass reads the sequence's last two tokens, each further one `next`.

    Ids that the draft does not have are 0: a poor draft, but no error. Beyond its context it reads its last
    positions again, and what it then drafts is not used.
    """

    context: DraftContext
    token_ids: Tensor  # [B, 2] int64
    chosen: Tensor  # [B] int64: which of the 2 B tokens is the row's newest
    starts: Tensor  # [B] int64: position of the first token of the coming pass
    next: Tensor  # [B, 1] int64


@dataclass(frozen=True, slots=True)
class RowState:
    """The B rows of a step with up to K drafts: their state before it, and what the models read."""

    state: SlotState
    slots: Tensor  # [B] int64
    lengths: Tensor  # [B] int64
    seeds: Tensor  # [B] int64
    scales: Tensor  # [B] float32
    top_ps: Tensor  # [B] float32
    top_ks: Tensor  # [B] int32
    starts: Tensor  # [B] int64: position of the newest token
    drafted: Tensor  # [B] int32: how many draft tokens are verified
    fed: Tensor  # [B, K + 1] int64: for the target, the newest token and the draft tokens
    draft: DraftInputs | None


def begin(
    launcher: Launcher | None, state: SlotState, queued: Tensor, drafts: int, context: DraftContext | None
) -> RowState:
    """The rows of a step. Of `fed` the first token is set, the others are not yet.

    queued [2, B] int64, contiguous: slots, and the most draft tokens of each; only a slot whose sequence has
    ended may be there twice. drafts: K. context: of the draft model; None: there is none.
    """
    if launcher is None:
        return _begin(state, queued, drafts, context)
    batch, device = queued.shape[1], queued.device

    def room(*shape: int, kind: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(*shape, dtype=kind, device=device)

    draft = None
    if context is not None:
        draft = DraftInputs(context, room(batch, 2), room(batch), room(batch), room(batch, 1))
    rows = RowState(
        state=state,
        slots=queued[0],
        lengths=room(batch),
        seeds=room(batch),
        scales=room(batch, kind=torch.float32),
        top_ps=room(batch, kind=torch.float32),
        top_ks=room(batch, kind=torch.int32),
        starts=room(batch),
        drafted=room(batch, kind=torch.int32),
        fed=room(batch, drafts + 1),
        draft=draft,
    )
    launcher.launch(
        "begin_step",
        (-(-batch // _THREADS), 1, 1),
        _THREADS,
        [
            *(queued, np.int32(batch), np.int32(drafts), state.token_ids, np.int64(state.token_ids.shape[1])),
            *(state.lengths, state.limits, state.ended, state.seeds, state.scales),
            *(state.top_ps, state.top_ks, *_numbers(context)),
            *(rows.lengths, rows.seeds, rows.scales, rows.top_ps, rows.top_ks),
            *(rows.starts, rows.drafted, rows.fed),
            *((None, None, None) if draft is None else (draft.token_ids, draft.starts, draft.chosen)),
        ],
    )
    return rows


def feed(launcher: Launcher | None, rows: RowState, draft_tokens: Tensor, first: int, count: int) -> None:
    """Feeds `count` draft tokens of each row, from number `first` on, to the target and to the draft's next
    pass. A token of -1 ends the row's drafts: lowers rows.drafted.

    draft_tokens [B, K] int64, contiguous, K <= 31.
    """
    if launcher is None:
        _feed(rows, draft_tokens[:, first : first + count], first)
        return
    (batch, drafts), draft = draft_tokens.shape, rows.draft
    launcher.launch(
        "feed_drafts",
        (batch, 1, 1),
        _THREADS,
        [
            *(draft_tokens, np.int32(drafts), np.int32(first), np.int32(count), rows.lengths),
            *(*_numbers(None if draft is None else draft.context), rows.drafted, rows.fed),
            *((None, None) if draft is None else (draft.next, draft.starts)),
        ],
    )


def append(
    launcher: Launcher | None, rows: RowState, tokens: Tensor, accepted: Tensor, status: Tensor
) -> Tensor:
    """Appends what a step emits to the sequences, up to an end-of-sequence token and up to their limits.

    tokens [B, K + 1] int64, of which accepted + 1 are emitted; accepted [B] int32; status [B] int32: not 0
    where the target gave no usable logits, which ends the sequence. K <= 31. Rows that had ended stay as they
    are. Returns int64 [B, K + 5]: status, drafted, accepted, emitted, then the K + 1 tokens.
    """
    if launcher is None:
        return _append(rows, tokens, accepted, status)
    state, (batch, steps) = rows.state, tokens.shape
    outputs = torch.empty(batch, _COUNTS + steps, dtype=torch.int64, device=tokens.device)
    launcher.launch(
        "append_step",
        (batch, 1, 1),
        _THREADS,
        [
            *(rows.slots, tokens, np.int32(steps), rows.drafted, accepted, status),
            *(state.eos_token_ids, np.int32(len(state.eos_token_ids)), state.limits, state.heeds_ends),
            *(state.token_ids, np.int64(state.token_ids.shape[1]), state.lengths, state.ended, outputs),
        ],
    )
    return outputs


def _numbers(context: DraftContext | None) -> tuple[np.int64, np.int64]:
    length, vocabulary = (0, 0) if context is None else (context.length, context.vocabulary)
    return np.int64(length), np.int64(vocabulary)


def _begin(state: SlotState, queued: Tensor, drafts: int, context: DraftContext | None) -> RowState:
    slots, most = queued
    lengths = state.lengths[slots]
    most = most.minimum(state.limits[slots] - lengths - 1).clamp(max=drafts)
    draft = None
    if context is not None:
        most = most.minimum(context.length - lengths + 1)
        starts = (lengths.clamp(max=context.length) - 2).clamp(min=0)
        draft = DraftInputs(
            context,
            _known(_tokens_at(state, slots, starts, 2), context),
            2 * torch.arange(len(slots)) + (lengths > starts + 1),
            starts,
            torch.zeros(len(slots), 1, dtype=torch.int64),
        )
    fed = torch.zeros(len(slots), drafts + 1, dtype=torch.int64)
    fed[:, :1] = _tokens_at(state, slots, lengths - 1, 1)
    return RowState(
        state=state,
        slots=slots,
        lengths=lengths,
        seeds=state.seeds[slots],
        scales=state.scales[slots],
        top_ps=state.top_ps[slots],
        top_ks=state.top_ks[slots],
        starts=(lengths - 1).clamp(min=0),
        drafted=torch.where(state.ended[slots] != 0, 0, most.clamp(min=0)).int(),
        fed=fed,
        draft=draft,
    )


def _feed(rows: RowState, tokens: Tensor, first: int) -> None:
    """tokens [B, count]."""
    end = first + tokens.shape[1]
    rows.fed[:, 1 + first : 1 + end] = tokens.clamp(min=0)
    present = (tokens >= 0).int().cumprod(1).sum(1)  # before the first that is absent
    lowered = rows.drafted.minimum(first + present)
    rows.drafted.copy_(torch.where(present < tokens.shape[1], lowered, rows.drafted))
    if (draft := rows.draft) is not None:
        draft.next.copy_(_known(tokens[:, -1:], draft.context))
        draft.starts.copy_((rows.lengths + end - 1).clamp(max=draft.context.length - 1))


def _append(rows: RowState, tokens: Tensor, accepted: Tensor, status: Tensor) -> Tensor:
    state, slots, lengths = rows.state, rows.slots, rows.lengths
    limits = state.limits[slots]
    over, failed = state.ended[slots] != 0, status != 0
    column = torch.arange(tokens.shape[1])
    room = limits.clamp(max=state.token_ids.shape[1]) - lengths
    counts = (accepted + 1).minimum(room).clamp(0, len(column)) * ~(over | failed)
    ends = torch.isin(tokens, state.eos_token_ids) & (state.heeds_ends[slots] != 0)[:, None]
    ends &= column < counts[:, None]
    counts = torch.where(ends.any(1), ends.int().argmax(1) + 1, counts)
    row, place = (column < counts[:, None]).nonzero(as_tuple=True)
    state.token_ids[slots[row], lengths[row] + place] = tokens[row, place].clamp(min=0)
    ended = over | failed | ends.any(1) | (lengths + counts >= limits)
    state.lengths[slots], state.ended[slots] = lengths + counts, ended.long()
    return torch.cat(
        [torch.stack([status.long() * ~over, rows.drafted.long(), accepted.long(), counts], 1), tokens], 1
    )


def _tokens_at(state: SlotState, slots: Tensor, starts: Tensor, count: int) -> Tensor:
    """[B, count] from position starts[b] on; positions beside a slot read its nearest."""
    positions = starts[:, None] + torch.arange(count)
    return state.token_ids[slots[:, None], positions.clamp(0, state.token_ids.shape[1] - 1)]


def _known(token_ids: Tensor, context: DraftContext) -> Tensor:
    return torch.where((token_ids >= 0) & (token_ids < context.vocabulary), token_ids, 0)
