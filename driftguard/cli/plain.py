"""What came from elsewhere, such as the name of a server, cannot steer the terminal that it is printed on."""

from __future__ import annotations

import unicodedata
from typing import Any, Final

# Controls (ESC begins a terminal's commands), directions of writing and other marks that are not seen, halves
# of pairs, and separators of lines.
_UNSEEN: Final = ("Cc", "Cf", "Cs", "Zl", "Zp")


def plain(text: str) -> str:
    r"""The text with each such character written as its escape, ESC as \x1b. Line breaks are too."""
    if text.isprintable():
        return text
    return "".join(_seen(each) if unicodedata.category(each) in _UNSEEN else each for each in text)


def plain_lines(text: str) -> str:
    """The same, but lines stay lines."""
    return "\n".join(map(plain, text.split("\n")))


def plain_object(value: Any) -> Any:
    """Of JSON: all its texts, names of members too."""
    match value:
        case str():
            return plain(value)
        case list():
            return [plain_object(each) for each in value]
        case dict():
            return {plain(name): plain_object(each) for name, each in value.items()}
    return value


def _seen(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
