"""Finds the punctuation of a JSON text, in a time that grows with its size only, whatever it contains."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def outside_strings(text: bytes | bytearray) -> npt.NDArray[np.bool_]:
    """For each byte, whether it is outside of all strings; quotes may be either."""
    plain = text.replace(rb"\\", b"__").replace(rb"\"", b"__")
    return ~np.logical_xor.accumulate(np.frombuffer(plain, np.uint8) == ord('"'))
