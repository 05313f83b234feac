"""From token ids to text while they arrive: never half a character, nothing after a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

# A UTF-8 character has at most 4 bytes, so at most 3 tokens of an unfinished one can be at the end.
_UNFINISHED_TOKENS = 3
_CONTEXT_TOKENS = 6
# The window must not grow without bound where bytes never become a character.
_MAX_WINDOW_TOKENS = 64
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental decoding of one sequence.

    A window of the newest tokens is decoded again at each push, since a token's text can depend on the ones
    before it (spaces, bytes of one character). Text is returned once later tokens cannot change it.

    Tokenizers with tokens for single bytes (`ByteFallback`) decode a run of such tokens at once: while its
    last character is unfinished, they give U+FFFD for each byte of the run. So the text of a run is that
    without the tokens of its last character.

    Special tokens, which are no text, are in no window: some tokenizers decode the first word of what they
    get without the space in front of it, and the context must have a word before.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._special = _special_tokens(tokenizer)
        words = (token for token in reversed(prompt_token_ids) if token not in self._special)
        self._window = self._context([*islice(words, _CONTEXT_TOKENS + _UNFINISHED_TOKENS)][::-1])
        self._read = len(self._window)  # tokens of the window whose text was returned in full
        # Characters of the window that were returned; a character that the prompt left unfinished was not.
        self._out = len(self._settled()[0])

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._window.extend(token for token in token_ids if token not in self._special)
        text, waiting = self._settled()
        new = text[self._out :]
        self._out = max(self._out, len(text))
        if waiting is not None:
            self._advance(waiting)
        return new

    def flush(self) -> str:
        """What is left at the end of the sequence, unfinished characters as U+FFFD."""
        text = self._decode(self._window)[self._out :]
        self._out += len(text)
        return text

    def _settled(self) -> tuple[str, int | None]:
        """The text of the window that no later token can change, and how many of its newest tokens are of an
        unfinished character; None: that is not known."""
        whole = self._decode(self._window)
        if not whole.endswith(_REPLACEMENT) or len(self._window) - self._read > _MAX_WINDOW_TOKENS:
            return whole, 0
        finished = whole.rstrip(_REPLACEMENT)
        for waiting in range(1, min(_UNFINISHED_TOKENS, len(self._window)) + 1):
            text = self._decode(self._window[:-waiting])
            if not text.endswith(_REPLACEMENT):
                return max(text, finished, key=len), waiting
        return finished, None

    def _advance(self, waiting: int) -> None:
        """What is before the newest tokens was returned: keeps some of it as context for later ones."""
        done = len(self._window) - waiting
        if done > 2 * _CONTEXT_TOKENS:
            before, kept = self._window[:done], self._context(self._window[:done])
            if len(kept) < done:
                self._out += len(self._decode(kept)) - len(self._decode(before))
                self._window = [*kept, *self._window[done:]]
        self._read = len(self._window) - waiting

    def _context(self, token_ids: list[int]) -> list[int]:
        """The newest of these tokens: a window that starts inside a character would spoil the decoding of its
        neighbours. All of them where each start does."""
        for count in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _UNFINISHED_TOKENS + 1):
            kept = token_ids[-count:]
            ends = range(len(kept), max(len(kept) - _UNFINISHED_TOKENS, 1) - 1, -1)
            if any(_REPLACEMENT not in self._decode(kept[:end]) for end in ends):
                return kept
        return token_ids[-_CONTEXT_TOKENS:] if len(token_ids) > _MAX_WINDOW_TOKENS else token_ids

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: Any) -> frozenset[int]:
    """Those that it leaves out when it decodes."""
    added = tokenizer.added_tokens_decoder.items()
    special = (token for token, named in added if named.special)
    return frozenset(token for token in special if not tokenizer.decode([token], skip_special_tokens=True))


class StopFilter:
    """Cuts a text at the first stop string, which may span pushes."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may be shown now; what is or may become a stop string is held back."""
        if not self._stop:
            return text
        self._held += text
        found = [at for at in map(self._held.find, self._stop) if at >= 0]
        if found:
            self.stopped = True
            return self._give(min(found))
        return self._give(len(self._held) - self._partial())

    def flush(self) -> str:
        """The text that was held back and is no stop string."""
        return "" if self.stopped else self._give(len(self._held))

    def _give(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        return shown

    def _partial(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if self._held.endswith(tuple(stop[:length] for stop in self._stop if len(stop) > length)):
                return length
        return 0
