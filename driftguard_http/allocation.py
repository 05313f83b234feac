"""How the memory of a server's process is managed: by the C library, and by Python's garbage collector."""

from __future__ import annotations

import ctypes
import gc
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


def collect_garbage_rarely() -> None:
    """Call it once all is imported: modules are never freed, and are not scanned any more. There are few
    cycles: scanning all that is new after every 700 objects costs a tenth of a proxy's throughput, and some
    twentieth of a sidecar's processor time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
