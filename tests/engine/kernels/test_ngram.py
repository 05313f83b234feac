"""Drafts from the sequence itself: by the kernel, by the reference, and by trying every place."""

from __future__ import annotations

import random

import pytest
import torch
from driftguard_engine.kernels import ngram
from torch import Tensor

from tests.engine.kernels.emulated import Emulated
from tests.engine.simt.emulator import Module

SIZES = [(1, 1), (1, 3), (2, 4), (3, 3), (1, 12)]  # of n-grams, least and most


def sequences(seed: int, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Over alphabets so small that tokens recur, of any length; other tokens beyond it."""
    chance = random.Random(seed)
    lengths = [chance.choice([0, 1, 2, 3, chance.randint(4, capacity), capacity]) for _ in range(rows)]
    token_ids = torch.full((rows, capacity), 1)
    for row, length in enumerate(lengths):
        alphabet = chance.choice([1, 2, 3, 20, 200_000])
        token_ids[row, :length] = torch.tensor([chance.randrange(alphabet) for _ in range(length)]).long()
    return token_ids, torch.tensor(lengths)


def by_trying(row: list[int], least: int, most: int, drafts: int) -> list[int]:
    for size in range(most, least - 1, -1):
        for end in range(len(row) - 1, size - 1, -1):
            if row[end - size : end] == row[len(row) - size :]:
                return [row[end + offset % (len(row) - end)] for offset in range(drafts)]
    return []


def by_kernel(
    module: Module, token_ids: Tensor, lengths: Tensor, least: int, most: int, drafts: int, seed: int
) -> Tensor:
    """From slots in any order, of which some are not asked for."""
    slots = torch.randperm(len(lengths) + 3, generator=torch.Generator().manual_seed(seed))[: len(lengths)]
    width = token_ids.shape[1]
    there = torch.full((len(lengths) + 3, width + 10), 1, dtype=token_ids.dtype)[:, :width]
    there[slots] = token_ids
    tokens = torch.full((len(lengths), drafts), 777)
    ngram.look_up(Emulated(module, seed), there, slots, lengths, least, most, tokens)
    return tokens


@pytest.mark.parametrize("seed", range(10))
def test_drafts_are_those_of_the_most_recent_longest_match(module: Module, seed: int) -> None:
    least, most = SIZES[seed % len(SIZES)]
    drafts = [1, 4, 31][seed % 3]
    token_ids, lengths = sequences(seed, 8, [4, 60, 700][seed % 3])
    tokens = ngram.reference(token_ids, torch.arange(8), lengths, least, most, drafts)
    found = [row[row >= 0].tolist() for row in tokens]
    for row, ids, length in zip(found, token_ids.tolist(), lengths.tolist(), strict=True):
        assert row == by_trying(ids[:length], least, most, drafts), f"seed {seed}"
    for dtype in (torch.int32, torch.int64):
        kernel_tokens = by_kernel(module, token_ids.to(dtype), lengths, least, most, drafts, seed)
        assert torch.equal(kernel_tokens, tokens), f"seed {seed}, {dtype}"


def test_by_hand(module: Module) -> None:
    rows = [
        [7, 8, 9, 1, 7, 8, 5, 7, 8],  # the later of two matches
        [6, 1, 6, 2, 8, 6],  # what lies before the row, the 8 above, belongs to no match
        [1, 2, 3, 9, 2, 4, 1, 2],  # the longer match before the later one
        [4, 4, 4, 4, 4, 4, 4, 4],  # overlaps its own end
        [6, 1, 2, 6, 1, 2, 6, 1],  # goes round
        [1, 2, 3, 4, 5, 6, 7, 8],  # nothing occurs twice
    ]
    token_ids = torch.tensor([row + [0] * (9 - len(row)) for row in rows])
    lengths = torch.tensor([9, 6, 8, 8, 8, 8])
    tokens = by_kernel(module, token_ids, lengths, 1, 3, 4, 0)
    assert torch.equal(tokens, ngram.reference(token_ids, torch.arange(6), lengths, 1, 3, 4))
    assert tokens.tolist() == [
        [5, 7, 8, 5],
        [2, 8, 6, 2],
        [3, 9, 2, 4],
        [4, 4, 4, 4],
        [2, 6, 1, 2],
        [-1, -1, -1, -1],
    ]


def test_rows_apart_and_a_long_sequence(module: Module) -> None:
    """More tokens than threads, and a match that only the first of them sees."""
    token_ids = torch.arange(3 * 2000, dtype=torch.int32).view(3, 2000)
    token_ids[1, 1989] = token_ids[1, 0]
    lengths = torch.tensor([1990, 1990, 1500])
    tokens = by_kernel(module, token_ids, lengths, 1, 2, 3, 1)
    assert tokens.tolist() == [[-1] * 3, [2001, 2002, 2003], [-1] * 3]
