"""The common parts of vLLM's and SGLang's logs: `key: value` pairs, and incomplete times."""

from __future__ import annotations

import re
from datetime import datetime

_PAIR = re.compile(r"([#\w][\w #/()-]*?): ([-\d.]+(?:, [\d.]+)*)")


def numbers(text: str) -> dict[str, list[float]]:
    """Key -> its numbers, of `key: 1.5 unit, other key: 0.5, 0.25`."""
    return {key.strip(): [float(part) for part in value.split(", ")] for key, value in _PAIR.findall(text)}


def known_year(at: datetime, latest: datetime) -> datetime:
    """`at` with the last year in which it is not after `latest`: some logs leave the year out."""
    this_year = at.replace(year=latest.year)
    return this_year if this_year <= latest else this_year.replace(year=latest.year - 1)
