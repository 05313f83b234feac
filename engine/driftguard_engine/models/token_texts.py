"""Which text each token of a tokenizer stands for, so that tokens of different tokenizers can be compared.

By bytes, because a token of a byte-level tokenizer need not be whole characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers.normalizers import NFC

from driftguard_engine.core import InvalidModel

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


@dataclass(frozen=True)
class TokenTexts:
    """texts: the bytes that a token adds to a text, of tokens for the same bytes the usual one first. marks:
    the special tokens, such as the end of a text, by what they are called. begin: the tokens with which the
    model expects a text to begin. normalizer: of a tokenizer that composes letters and accents."""

    tokenizer: Any
    texts: Mapping[int, bytes]
    marks: Mapping[str, int]
    begin: tuple[int, ...]
    normalizer: NFC | None = None

    def encode(self, text: bytes) -> list[int]:
        """Without `begin`; of whole characters. Raises UnicodeDecodeError."""
        written = text.decode()  # what spells a special token is text in it
        told = self.tokenizer(written, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return list(told["input_ids"])

    def composed(self, text: bytes) -> bytes:
        """As its tokens spell it. Of whole characters."""
        return text if self.normalizer is None else self.normalizer.normalize_str(text.decode()).encode()

    def spelled(self, token_ids: Sequence[int]) -> bytes:
        """The text that these tokens stand for."""
        return b"".join(self.texts.get(token, b"") for token in token_ids)

    def last(self, token_ids: Sequence[int], count: int) -> list[int] | None:
        """The last tokens, which stand for `count` bytes together; None: no token begins there."""
        place = len(token_ids)
        while count > 0 and place:
            place -= 1
            count -= len(self.texts.get(token_ids[place], b""))
        return None if count else list(token_ids[place:])

    @cached_property
    def single_bytes(self) -> Mapping[int, int]:
        """Tokens of single bytes that are a part of a character, by the byte."""
        return {text[0]: token for token, text in self.texts.items() if len(text) == 1 and text[0] > 127}

    @cached_property
    def leading_space(self) -> bool:
        """Whether a space is put before each text."""
        return self.texts.get(self.encode(b"a")[0], b"").startswith(b" ")


def token_texts(tokenizer: Any, directory: Path, *, field: str) -> TokenTexts:
    """Raises InvalidModel: what its tokens stand for is not known."""
    kind = _kind(tokenizer)
    if kind is None:
        raise InvalidModel(
            f"{field}: the tokenizer in {directory} is neither byte-level nor like SentencePiece's, so that "
            "it is not known which text its tokens stand for, and they cannot be compared with others",
            field=field,
        )
    added = tokenizer.added_tokens_decoder
    marks = {each.content: token for token, each in added.items() if each.special}
    names = sorted(
        tokenizer.get_vocab().items(), key=lambda each: (_FALLBACK.match(each[0]) is not None, each)
    )
    spelled = (
        (token, name.encode() if token in added else _spelled(name, kind))
        for name, token in names
        if token not in marks.values()
    )
    begin = tokenizer("", verbose=False)["input_ids"][:1]
    normalizer = tokenizer.backend_tokenizer.normalizer
    return TokenTexts(
        deepcopy(tokenizer),  # whoever else has it must not find special tokens taken for text
        {token: text for token, text in spelled if text},
        marks,
        tuple(begin) if begin == [tokenizer.bos_token_id] else (),
        normalizer if isinstance(normalizer, NFC) else None,
    )


def shared_tokens(ours: TokenTexts, theirs: TokenTexts) -> list[tuple[int, int]]:
    """Pairs of ids that stand for the same text, or are the same mark: (of ours, of theirs), no id twice."""
    known, own = ({text: token for token, text in reversed([*each.texts.items()])} for each in (theirs, ours))
    found = [(token, known[text]) for text, token in own.items() if text in known]
    found += [(token, theirs.marks[name]) for name, token in ours.marks.items() if name in theirs.marks]
    return sorted(found)


def _kind(tokenizer: Any) -> str | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = "" if backend is None else json.dumps(json.loads(backend.to_str())["decoder"])
    if "ByteLevel" in decoder:
        return "byte_level"
    return "sentencepiece" if json.dumps(_SPACE)[1:-1] in decoder else None


def _spelled(name: str, kind: str) -> bytes:
    """b"" of a name that stands for no bytes."""
    if kind == "byte_level":
        return bytes(_BYTES[each] for each in name) if _BYTES.keys() >= set(name) else b""
    fallback = _FALLBACK.fullmatch(name)
    return bytes.fromhex(fallback[1]) if fallback else name.replace(_SPACE, " ").encode()


def _byte_characters() -> Iterator[tuple[str, int]]:
    """How byte-level tokenizers write bytes (Radford et al. 2019): those that are printable in Latin-1 as
    themselves, the others as the characters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    yield from ((chr(byte), byte) for byte in printable)
    yield from ((chr(256 + place), byte) for place, byte in enumerate(sorted({*range(256)} - printable)))


_BYTES = dict(_byte_characters())
