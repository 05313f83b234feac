"""What a page says to a reader."""

from __future__ import annotations

import re
from html import unescape


def text_of(page: str) -> str:
    """Without the elements around moments, which a browser may show in its own time zone."""
    return unescape(re.sub(r"</?time[^>]*>", "", page))
