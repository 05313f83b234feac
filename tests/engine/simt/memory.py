"""Arrays with inaccessible pages around them, so that a read or write past either end faults."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
End = Literal["start", "end"]  # which end of the array lies exactly at an inaccessible page

_CANARY = 0xC7  # of the bytes between the array and its pages' other end
_NONE, _READ, _WRITE = 0, 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True, eq=False)
class Guarded:
    """A copy of an array between two inaccessible pages. `array`: the copy; `address`: what a kernel gets."""

    array: Array
    pages: Array  # uint8, all that is accessible
    offset: int  # of the array in its pages

    @property
    def address(self) -> int:
        return int(self.pages.ctypes.data) + self.offset

    def unharmed(self) -> bool:
        """False if something was written beside the array that no page fault could catch."""
        beside = (self.pages[: self.offset], self.pages[self.offset + self.array.nbytes :])
        return all(bool((part == _CANARY).all()) for part in beside)

    def place(self, address: int) -> str | None:
        """Describes a fault at this address; None where it is neither in the array nor near it."""
        distance = address - self.address
        if not -self.offset - mmap.PAGESIZE <= distance < len(self.pages) - self.offset + mmap.PAGESIZE:
            return None
        if 0 <= distance < self.array.nbytes:
            return f"{distance} bytes into its {self.array.nbytes}, through a pointer to const"
        if distance < 0:
            return f"{-distance} bytes before it"
        return f"{distance - self.array.nbytes} bytes past the end of its {self.array.nbytes}"

    def make_read_only(self) -> None:
        _check(_libc.mprotect(self.pages.ctypes.data, len(self.pages), _READ))


def guarded(source: Array, end: End = "end", alignment: int = 16) -> Guarded:
    """A contiguous copy of `source`.

    alignment: of its address in bytes, a power of two. With end="end" up to alignment - 1 bytes past the end
    can be read without a fault (but not written: `Guarded.unharmed`).
    """
    size = max(1, -(-source.nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    whole = size + 2 * mmap.PAGESIZE
    base = _libc.mmap(None, whole, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    _check(base in (None, ctypes.c_void_p(-1).value))
    _check(_libc.mprotect(base + mmap.PAGESIZE, size, _READ | _WRITE))
    memory = (ctypes.c_uint8 * size).from_address(base + mmap.PAGESIZE)
    weakref.finalize(memory, _libc.munmap, base, whole).atexit = False

    pages: Array = np.ctypeslib.as_array(memory)
    offset = (size - source.nbytes) // alignment * alignment if end == "end" else 0
    pages[:offset] = pages[offset + source.nbytes :] = _CANARY
    array: Array = np.ndarray(source.shape, source.dtype, pages.data, offset)
    array[...] = source
    return Guarded(array, pages, offset)


def _check(failed: Any) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), "no memory for the arguments of a kernel")
