"""How answers are shown: as the API's JSON, or to people as tables and lines.

On a terminal tables fit its width: the last column wraps, and where that leaves it too narrow each row is
written as a block. Elsewhere nothing is wrapped, and nothing depends on a terminal.
"""

from __future__ import annotations

import codecs
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from io import TextIOWrapper

from driftguard.cli.plain import plain

LEAST_LAST_COLUMN = 24  # characters
GAP = "  "


def show_whatever_it_takes(output: TextIOWrapper) -> None:
    """A character that this output cannot show becomes an escape of JSON: no error, and JSON stays JSON."""
    codecs.register_error("escaped", _escaped)
    output.reconfigure(errors="escaped")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def terminal_width() -> int | None:
    """Columns of the terminal that standard output is; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]], nothing: str) -> None:
    """`nothing`: said on standard error where there are no rows."""
    if not rows:
        print(nothing, file=sys.stderr)
        return
    texts = [[_text(cell) for cell in row] for row in rows]
    for line in table(heads, texts, terminal_width()):
        print(line)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """Lines of at most `width` characters where that is possible; None: of any length."""
    columns = list(zip(heads, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    before_last = sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
    if width is None or before_last + widths[-1] <= width:
        last = [[row[-1]] for row in rows]
    elif before_last + LEAST_LAST_COLUMN <= width:
        last = [textwrap.wrap(row[-1], width - before_last) or [""] for row in rows]
    else:
        yield from _blocks(heads, rows, width)
        return
    yield _line([*heads], widths)
    for row, parts in zip(rows, last, strict=True):
        yield _line([*row[:-1], parts[0]], widths)
        yield from (" " * before_last + part for part in parts[1:])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return GAP.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _blocks(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    for number, row in enumerate(rows):
        if number:
            yield ""
        yield from facts(zip(heads, row, strict=True), width)


def print_facts(values: Mapping[str, object]) -> None:
    """A line per value that there is."""
    told = [(name, _text(value)) for name, value in values.items() if value is not None]
    for line in facts(told, terminal_width()):
        print(line)


def facts(values: Iterable[tuple[str, str]], width: int | None) -> Iterator[str]:
    values = [(name, plain(value)) for name, value in values]
    margin = max(len(name) for name, _ in values) + len(GAP)
    for name, value in values:
        parts = [value] if width is None else _wrapped(value, width - margin)
        yield (name.ljust(margin) + parts[0]).rstrip()
        yield from (" " * margin + part for part in parts[1:])


def print_text(text: str, indent: str = "") -> None:
    """A sentence, wrapped on a terminal."""
    text, width = plain(text), terminal_width()
    for part in [text] if width is None else _wrapped(text, width - len(indent)):
        print(indent + part)


def _wrapped(text: str, width: int) -> list[str]:
    """Ids and addresses are never cut."""
    return textwrap.wrap(text, max(width, 10), break_long_words=False, break_on_hyphens=False) or [""]


def time_of(text: str | None) -> str | None:
    """A time of the API, to the second."""
    return None if text is None else datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%SZ")


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _text(value: object) -> str:
    return "-" if value is None or value == "" else plain(" ".join(str(value).split()))
