"""From token ids to text while they arrive: never half a character, nothing after a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# A UTF-8 character has at most 4 bytes, so at most 3 of an unfinished one can be at the end.
_UNFINISHED_CHARACTERS = 3
_CONTEXT_TOKENS = 6
# The window must not grow without bound where bytes never become a character.
_MAX_WINDOW_TOKENS = 64
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental decoding of one sequence.

    A window of the newest tokens is decoded again at each push, since a token's text can depend on the ones
    before it (spaces, bytes of one character). Text is returned once later tokens cannot change it.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._read = len(self._window)  # tokens of the window whose text was returned in full
        # Characters of the window that were returned; a character that the prompt left unfinished was not.
        self._out = self._settled(self._decode(self._window))

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        settled = self._settled(text)
        new = text[self._out : settled]
        self._out = max(self._out, settled)
        if settled == len(text):
            self._advance()
        return new

    def flush(self) -> str:
        """What is left at the end of the sequence, unfinished characters as U+FFFD."""
        text = self._decode(self._window)[self._out :]
        self._out += len(text)
        return text

    def _settled(self, text: str) -> int:
        if len(self._window) - self._read > _MAX_WINDOW_TOKENS:
            return len(text)
        settled = len(text)
        while settled > len(text) - _UNFINISHED_CHARACTERS and text[:settled].endswith(_REPLACEMENT):
            settled -= 1
        return settled

    def _advance(self) -> None:
        """All text was returned: keeps the newest tokens as context for later ones."""
        if len(self._window) > 2 * _CONTEXT_TOKENS:
            kept = self._decode(self._window[-_CONTEXT_TOKENS:])
            # A window that starts inside a character would spoil the decoding of its neighbours.
            if _REPLACEMENT not in kept or len(self._window) > _MAX_WINDOW_TOKENS:
                self._window = self._window[-_CONTEXT_TOKENS:]
                self._out = len(kept)
        self._read = len(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


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
