"""Names in right-to-left scripts: each is kept apart from the English around it."""

from __future__ import annotations

import re
from typing import Final

# Letters of Hebrew, Arabic, Syriac, Thaana, N'Ko and their like, with the forms of compatibility.
_LETTER: Final = r"\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff\U00010800-\U00010fff\U0001e800-\U0001efff"
_FOUND: Final = re.compile(f"[{_LETTER}]")
# Words that have such a letter, without the punctuation of the sentence around them. Entities stay whole.
_WORD: Final = rf"(?:&#?\w+;|[^\s<>&:,;.!?()\[\]])*[{_LETTER}](?:[^\s<>&]*[^\s<>&:,;.!?()\[\]])?"
_IN_BRACKETS: Final = rf"\([^()<>&]*[{_LETTER}][^()<>&]*\)"
_RUN: Final = re.compile(rf"{_WORD}(?:\s+(?:{_WORD}|{_IN_BRACKETS}))*")
_PART: Final = re.compile(r"<(title|option|script|style|bdi)\b.*?</\1>|<[^>]*>|[^<]+", re.DOTALL)


def isolated(page: str) -> str:
    """A page in which each name of a right-to-left script is in a `bdi` element: without it the numbers and
    names that follow would be shown on its other side. Titles and options hold text alone."""
    if not _FOUND.search(page):
        return page
    return _PART.sub(_isolate, page)


def _isolate(part: re.Match[str]) -> str:
    text = part[0]
    return text if text.startswith("<") else _RUN.sub(r"<bdi>\g<0></bdi>", text)
