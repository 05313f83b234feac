"""Packs numpy values as a launch takes them: a pointer to the bytes of each argument."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.engine.simt.memory import Array, End, Guarded, guarded


@dataclass(frozen=True)
class Parameters:
    """Of one kernel. letters: p pointer, c pointer to const, f floating, i signed, u unsigned, s other."""

    letters: str
    sizes: tuple[int, ...]  # bytes


@dataclass
class Arguments:
    """Keeps alive what it points to."""

    values: list[Any] = field(default_factory=list)
    buffers: dict[int, Guarded] = field(default_factory=dict)  # by position; an array given twice has one
    arrays: dict[int, Array] = field(default_factory=dict)  # what the kernel's writes are copied back to

    def pointers(self) -> Any:
        addresses = [ctypes.addressof(value) for value in self.values]
        return (ctypes.c_void_p * max(1, len(addresses)))(*addresses)

    def copy_back(self) -> int | None:
        """Copies the kernel's writes to the arrays. The position of an array that it wrote beside, if any."""
        for position, buffer in self.buffers.items():
            if not buffer.unharmed():
                return position
        for position, array in self.arrays.items():
            if array.flags.writeable:
                array[...] = self.buffers[position].array
        return None


def pack(name: str, parameters: Parameters, args: Sequence[Any], end: End, alignment: int) -> Arguments:
    """Raises TypeError, with the kernel's `name` and the argument's position."""
    if len(args) != len(parameters.letters):
        raise TypeError(f"{name} takes {len(parameters.letters)} arguments, got {len(args)}")
    packed = Arguments()
    written = {id(arg) for arg, letter in zip(args, parameters.letters, strict=True) if letter == "p"}
    buffers: dict[int, Guarded] = {}
    for position, (arg, letter, size) in enumerate(
        zip(args, parameters.letters, parameters.sizes, strict=True)
    ):
        if letter not in "pc":
            packed.values.append(_by_value(f"{name}: argument {position}", arg, letter, size))
        elif arg is None:
            packed.values.append(ctypes.c_void_p(None))
        elif isinstance(arg, Guarded):
            packed.buffers[position] = arg
            packed.values.append(ctypes.c_void_p(arg.address))
        elif isinstance(arg, np.ndarray) and arg.flags.c_contiguous:
            if id(arg) not in buffers:
                buffers[id(arg)] = guarded(arg, end, alignment)
                packed.buffers[position], packed.arrays[position] = buffers[id(arg)], arg
                if id(arg) not in written:
                    buffers[id(arg)].make_read_only()
            packed.values.append(ctypes.c_void_p(buffers[id(arg)].address))
        else:
            raise TypeError(f"{name}: argument {position} is a pointer, got {type(arg).__name__} {arg!r:.60}")
    return packed


_KINDS = {"f": ("f", "float"), "i": ("i", "int"), "u": ("ub", "uint")}


def _by_value(argument: str, arg: Any, letter: str, size: int) -> Any:
    given = b""
    if letter == "s":
        wanted = f"a structure of {size} bytes"
        if isinstance(arg, np.void):
            given = arg.tobytes()
        elif isinstance(arg, ctypes.Structure):
            given = ctypes.string_at(ctypes.addressof(arg), ctypes.sizeof(arg))
    else:
        kinds, word = _KINDS[letter]
        wanted = f"{word}{8 * size}"
        if isinstance(arg, np.generic) and arg.dtype.kind in kinds:
            given = arg.tobytes()
    if len(given) != size:
        raise TypeError(f"{argument} must be {wanted}, got {type(arg).__name__} {arg!r:.60}")
    return ctypes.create_string_buffer(given, size)
