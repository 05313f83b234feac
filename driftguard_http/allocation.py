"""What the C library does with memory that was freed."""

from __future__ import annotations

import ctypes
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
LARGE_BYTES: Final = 500_000
ARENAS: Final = 2  # the default, eight for each core, keeps what any of many threads has freed


def give_back_what_is_freed() -> None:
    """Large blocks at once, whatever was freed before; without this glibc keeps tens of megabytes in each
    thread after a large request. Other C libraries are left as they are. Call it before any thread starts."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_ARENA_MAX, ARENAS)
