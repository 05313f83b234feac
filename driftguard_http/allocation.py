"""How the C library returns freed memory."""

from __future__ import annotations

import ctypes
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
LARGE_BYTES: Final = 500_000
ARENAS: Final = 2  # the default, eight for each core, keeps the memory that any of many threads has freed


def give_back_what_is_freed() -> None:
    """Makes glibc return large blocks at once. Without this, it keeps tens of megabytes in each thread after
    a large request. Other C libraries are left as they are. Call it before any thread starts."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_ARENA_MAX, ARENAS)
