"""The text of one sequence in the tokens of another tokenizer, while it grows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from operator import eq

from driftguard_engine.models.token_texts import TokenTexts

# Where text is added, so many tokens before it are found anew, behind so many more that are only read along:
# how a text is cut depends on what is before it.
_ANEW, _LEAD = 8, 8


class OwnText:
    """What a draft model reads of a sequence that has the target's tokens.

    `token_ids` are what the draft's tokenizer makes of the text, also where two pieces of it meet. Special
    tokens of a name that the draft has, too, are its own; others are left out. Of a character that is not
    finished yet its bytes are read.
    """

    def __init__(self, target: TokenTexts, own: TokenTexts) -> None:
        self._target, self._own = target, own
        self._marks = {token: own.marks.get(name) for name, token in target.marks.items()}
        self._settled = list(own.begin)  # up to the last special token
        self._text = b""  # behind it, whole characters, composed as the draft reads them
        self._begins = True  # nothing of it has arrived
        self._tokens: list[int] = []  # of this text
        self.unfinished = b""
        self.read = 0  # tokens of the sequence
        self.unchanged = 0  # the first so many of `token_ids` are as the reader of them has left them

    @property
    def token_ids(self) -> list[int] | None:
        """None: it ends in bytes for which the draft has no tokens."""
        known = self._own.single_bytes
        if any(byte not in known for byte in self.unfinished):
            return None
        return [*self._settled, *self._tokens, *(known[byte] for byte in self.unfinished)]

    @property
    def end(self) -> bytes:
        """The last characters, of a few tokens."""
        return self._text[max(len(self._text) - len(self._own.spelled(self._tokens[-_LEAD:])), 0) :]

    def extend(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the sequence."""
        self.read += len(token_ids)
        piece = b""
        for token in token_ids:
            if token not in self._marks:
                piece += self._target.texts.get(token, b"")
                continue
            self._add(piece)
            piece = b""
            mark = self._marks[token]
            if mark is not None and (mark,) != (*self._settled, *self._tokens):  # begins a text once
                self._settled += [*self._tokens, mark]
                self._text, self._tokens, self.unfinished, self._begins = b"", [], b"", True
        self._add(piece)

    def _add(self, piece: bytes) -> None:
        if piece and self._begins:
            self._begins = False
            piece = piece.removeprefix(b" " * self._target.leading_space)
        piece = self.unfinished + piece
        whole = whole_characters(piece)
        piece, self.unfinished = piece[:whole].decode(errors="replace").encode(), piece[whole:]
        before, kept = self._tokens, max(len(self._tokens) - _ANEW, 0)
        if not (kept > _LEAD and self._add_near(kept, piece)):
            kept, self._text = 0, self._own.composed(self._text + piece)
            self._tokens = self._own.encode(self._text)
        same = sum(1 for _ in takewhile(bool, map(eq, before[kept:], self._tokens[kept:])))
        self.unchanged = min(self.unchanged, len(self._settled) + kept + same)

    def _add_near(self, kept: int, piece: bytes) -> bool:
        """Keeps the first `kept` tokens. False, and nothing is added: by what is near, none begins there any
        more, or its tokens do not spell it, as where the tokenizer has none for some letters."""
        first = kept - _LEAD
        while first and _is_inside(self._own.texts.get(self._tokens[first], b"")):
            first -= 1
        recent = self._tokens[first:]
        lead, near = self._own.spelled(self._tokens[first:kept]), self._own.spelled(recent)
        if not self._text.endswith(near) or any(token not in self._own.texts for token in recent):
            return False
        text = self._own.composed(near + piece)
        anew = self._own.last(self._own.encode(text), len(text) - len(lead))
        if anew is None or lead + self._own.spelled(anew) != text:
            return False
        self._text = self._text.removesuffix(near) + text
        self._tokens = self._tokens[:kept] + anew
        return True


def _is_inside(text: bytes) -> bool:
    """Whether it begins inside of a character."""
    return text != b"" and 0x80 <= text[0] < 0xC0


def whole_characters(text: bytes) -> int:
    """How many bytes are before the beginning of a character that may be unfinished at the end."""
    for back in range(1, min(len(text), 3) + 1):
        first = text[-back]
        if first >= 0xC0:
            needed = 2 + (first >= 0xE0) + (first >= 0xF0)
            return len(text) - back if back < needed else len(text)
        if first < 0x80:
            break
    return len(text)
