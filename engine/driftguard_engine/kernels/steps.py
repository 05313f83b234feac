"""What a step of decoding does around the passes of the models: reads its rows, feeds the models, appends.

Each function runs one kernel, which can be captured in a CUDA graph; with launcher None numpy computes the
same on the CPU: the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.reference.sampling import Integers

_THREADS = 32  # as in csrc
_COUNTS = 4  # columns of the outputs before the tokens
_LAST_TWO = np.arange(2)


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
    """The rows of a step. Of `fed` the first token is set, the others are 0.

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

    draft_tokens [B, K] int64, contiguous; by the kernel K <= 31.
    """
    if launcher is None:
        _feed(rows, draft_tokens.numpy()[:, first : first + count], first)
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
    where the target gave no usable logits, which ends the sequence. By the kernel K <= 31. Rows that had
    ended stay as they are. Returns int64 [B, K + 5]: status, drafted, accepted, emitted, then K + 1 tokens.
    """
    if launcher is None:
        return _append(rows, *(each.numpy() for each in (tokens, accepted, status)))
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
    slots, most = queued.numpy()
    lengths, limits, ended = (each.numpy()[slots] for each in (state.lengths, state.limits, state.ended))
    newest = np.maximum(lengths - 1, 0)
    most = np.minimum(np.minimum(most, drafts), limits - lengths - 1)
    draft = None
    if context is not None:
        most = np.minimum(most, context.length - lengths + 1)
        starts = np.maximum(np.minimum(lengths, context.length) - 2, 0)
        draft = DraftInputs(
            context,
            torch.from_numpy(_known(_tokens_at(state, slots, starts[:, np.newaxis] + _LAST_TWO), context)),
            torch.from_numpy(2 * np.arange(len(slots)) + (lengths > starts + 1)),
            torch.from_numpy(starts),
            torch.zeros(len(slots), 1, dtype=torch.int64),
        )
    fed = np.zeros((len(slots), drafts + 1), np.int64)
    fed[:, :1] = _tokens_at(state, slots, newest[:, np.newaxis])
    seeds, scales, top_ps, top_ks = (
        torch.from_numpy(each.numpy()[slots])
        for each in (state.seeds, state.scales, state.top_ps, state.top_ks)
    )
    return RowState(
        state=state,
        slots=queued[0],
        lengths=torch.from_numpy(lengths),
        seeds=seeds,
        scales=scales,
        top_ps=top_ps,
        top_ks=top_ks,
        starts=torch.from_numpy(newest),
        drafted=torch.from_numpy((np.maximum(most, 0) * (ended == 0)).astype(np.int32)),
        fed=torch.from_numpy(fed),
        draft=draft,
    )


def _feed(rows: RowState, tokens: Integers, first: int) -> None:
    """tokens [B, count]."""
    end, fed = first + tokens.shape[1], rows.fed.numpy()
    np.maximum(tokens, 0, out=fed[:, 1 + first : 1 + end])
    absent = tokens < 0
    if absent.any():
        drafted = rows.drafted.numpy()
        before = np.where(absent.any(1), first + absent.argmax(1), drafted)
        np.minimum(drafted, before, out=drafted)
    if (draft := rows.draft) is not None:
        newest, context = fed[:, end : end + 1], draft.context
        np.multiply(newest, newest < context.vocabulary, out=draft.next.numpy())
        np.minimum(rows.lengths.numpy() + (end - 1), context.length - 1, out=draft.starts.numpy())


def _append(rows: RowState, tokens: Integers, accepted: Integers, status: Integers) -> Tensor:
    state, (batch, steps) = rows.state, tokens.shape
    token_ids, lengths, ended = (each.numpy() for each in (state.token_ids, state.lengths, state.ended))
    limits, heeds_ends = state.limits.tolist(), state.heeds_ends.tolist()
    eos_token_ids, capacity = frozenset(state.eos_token_ids.tolist()), token_ids.shape[1]
    outputs = np.zeros((batch, _COUNTS + steps), np.int64)
    outputs[:, 1], outputs[:, 2], outputs[:, _COUNTS:] = rows.drafted.numpy(), accepted, tokens
    each_row = zip(rows.slots.tolist(), tokens.tolist(), accepted.tolist(), status.tolist(), strict=True)
    for row, (slot, emitted, kept, failed) in enumerate(each_row):
        if ended[slot]:
            continue
        length, limit = int(lengths[slot]), limits[slot]
        room = 0 if failed else min(kept + 1, min(limit, capacity) - length)
        emitted = emitted[: max(room, 0)]
        ends = eos_token_ids if heeds_ends[slot] else ()
        found = next((place for place, token in enumerate(emitted, 1) if token in ends), None)
        emitted = emitted[:found]
        end = length + len(emitted)
        if emitted:
            token_ids[slot, length:end] = [max(token, 0) for token in emitted]
        outputs[row, 0], outputs[row, 3] = failed, len(emitted)
        lengths[slot], ended[slot] = end, failed != 0 or found is not None or end >= limit
    return torch.from_numpy(outputs)


def _tokens_at(state: SlotState, slots: Integers, positions: Integers) -> Integers:
    """[B, N] at positions [B, N] from 0 on; those behind a slot read its last."""
    token_ids = state.token_ids.numpy()
    read: Integers = token_ids[slots[:, np.newaxis], np.minimum(positions, token_ids.shape[1] - 1)]
    return read


def _known(token_ids: Integers, context: DraftContext) -> Integers:
    return np.where((token_ids >= 0) & (token_ids < context.vocabulary), token_ids, 0)
