"""Which prefixes of prompts the slots of a KV cache hold, for requests that begin alike. Plain Python.

A prompt is cut into blocks as it is read: one per whole prefill chunk. A block is named by a digest of its
tokens and of all tokens before it, so that one look-up per block finds who holds a prefix (Kwon et al. 2023).

Only whole chunks of the prompt count, never tokens that were decoded: on a CPU the last bits of keys and
values depend on the bounds of the chunk in which they were computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def blocks_of(prompt_token_ids: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """The names of a prompt's whole blocks.

    The last two tokens belong to none: the last is decoded, and decoding may compute the draft's keys and
    values of the one before a second time.
    """
    names: list[bytes] = []
    name = b""
    for end in range(block_tokens, len(prompt_token_ids) - 1, block_tokens):
        tokens = array("q", prompt_token_ids[end - block_tokens : end])
        name = blake2b(name + tokens.tobytes(), digest_size=32).digest()
        names.append(name)
    return tuple(names)


class PrefixCache:
    """What each slot of one model's cache holds from position 0 on, as names of blocks.

    by_state: the model is recurrent. Then one goes on behind a slot's last written block alone, and writing
    a block loses those behind it.
    """

    def __init__(self, *, by_state: bool = False) -> None:
        self.by_state = by_state
        self._held: dict[int, list[bytes]] = {}
        self._slots: dict[bytes, set[int]] = {}
        self._written: dict[int, bytes] = {}  # by slot: the block behind which it has a state

    def held(self, slot: int) -> Sequence[bytes]:
        return self._held.get(slot, ())

    def slots(self, block: bytes) -> frozenset[int]:
        """The slots that hold this block, and so all blocks before it."""
        return frozenset(self._slots.get(block, ()))

    def ends(self, block: bytes) -> frozenset[int]:
        """Those of these slots behind whose block one can go on."""
        slots = self.slots(block)
        if not self.by_state:
            return slots
        return frozenset(slot for slot in slots if self._written.get(slot) == block)

    def begin(self, slot: int, blocks: Sequence[bytes]) -> None:
        """A prompt of these blocks gets the slot: what it holds beyond the common prefix will be lost."""
        held = self._held.get(slot, [])
        while held and (len(held) > len(blocks) or held[-1] != blocks[len(held) - 1]):
            self._drop(slot, held.pop())

    def hold(self, slot: int, index: int, block: bytes) -> None:
        """The slot's block at this index has been written. Kept only if the slot holds the one before."""
        held = self._held.setdefault(slot, [])
        if self.by_state:
            self._written[slot] = block
            while len(held) > index:
                self._drop(slot, held.pop())
        if index == len(held):
            held.append(block)
            self._slots.setdefault(block, set()).add(slot)

    def clear(self) -> None:
        """Forgets all blocks: what the slots hold cannot be relied on."""
        self._held.clear()
        self._written.clear()
        self._slots.clear()

    def _drop(self, slot: int, block: bytes) -> None:
        slots = self._slots[block]
        slots.discard(slot)
        if not slots:
            del self._slots[block]
