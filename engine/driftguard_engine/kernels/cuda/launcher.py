"""Launching one kernel: arguments packed into memory that was laid out once, on torch's current stream."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Size = tuple[int, int, int]
Number = np.int32 | np.uint32 | np.int64 | np.uint64 | np.float32 | np.float64
Argument = (
    Tensor | Number | None
)  # a pointer to the tensor's first element, a number of this type, a null pointer

_LETTERS: dict[type, str] = {
    np.int32: "i",
    np.uint32: "I",
    np.int64: "q",
    np.uint64: "Q",
    np.float32: "f",
    np.float64: "d",
}


SUFFIXES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # of the kernels' names


class Launcher(Protocol):
    """Runs one kernel of csrc."""

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        """block: threads. A tensor is passed as the address of its first element, None as a null pointer."""
        ...


class LaunchFailed(Exception):
    """{kernel}, its grid, its block and its tensors: the CUDA driver's error."""


class Kernel:
    """A loaded kernel. Launching neither allocates nor waits, so that it can be captured in a CUDA graph."""

    def __init__(
        self,
        name: str,
        signature: str,
        device: torch.device,
        launch: Callable[..., str | None],
        shared_bytes: int = 0,
    ) -> None:
        """signature: a letter of `struct` for each parameter: P pointer, i int, I unsigned, q and Q 64 bits,
        f float, d double. launch(grid, block, shared_bytes, address of the parameters' addresses): None, or
        what went wrong. shared_bytes: dynamic, per block.
        """
        self.name, self.signature, self.device = name, signature, device
        self._index = -1 if device.type == "cpu" else device.index
        self._launch, self._shared_bytes = launch, shared_bytes
        self._layout = struct.Struct(f"@{signature}")
        self._values = ctypes.create_string_buffer(max(1, self._layout.size))
        start = ctypes.addressof(self._values)
        places = [start + offset for offset in offsets(signature)]
        self._places = (ctypes.c_void_p * max(1, len(places)))(*places)
        self._address = ctypes.addressof(self._places)
        self._lock = threading.Lock()  # held until the driver has read the values

    def launch(self, grid: Size, block: Size, args: Sequence[Argument | float]) -> None:
        """Queue the kernel once. args: tensors of the kernel's device and None for pointers, else numbers.

        Raises ValueError (tensor of another device), struct.error (number of arguments, kind or range),
        LaunchFailed.
        """
        values = [
            self._address_of(arg) if isinstance(arg, Tensor) else 0 if arg is None else arg for arg in args
        ]
        with self._lock:
            self._layout.pack_into(self._values, 0, *values)
            problem = self._launch(grid, block, self._shared_bytes, self._address)
        if problem is not None:
            tensors = ", ".join(f"{list(arg.shape)}" for arg in args if isinstance(arg, Tensor))
            raise LaunchFailed(f"{self.name}, {grid} blocks of {block} threads, tensors {tensors}: {problem}")

    def _address_of(self, tensor: Tensor) -> int:
        if tensor.get_device() != self._index:
            raise ValueError(f"{self.name}: a tensor is on {tensor.device}, the kernel on {self.device}")
        return tensor.data_ptr()


def signature_of(arguments: Sequence[Argument]) -> str:
    """The signature of these arguments, see `Kernel`. Raises TypeError: a number without a sized type."""
    letters = []
    for position, argument in enumerate(arguments):
        letter = "P" if argument is None or isinstance(argument, Tensor) else _LETTERS.get(type(argument))
        if letter is None:
            raise TypeError(f"argument {position} must be a tensor, None or a sized number, got {argument!r}")
        letters.append(letter)
    return "".join(letters)


def offsets(signature: str) -> list[int]:
    """Offset of each parameter in bytes, aligned as C (and CUDA) aligns the members of a structure."""
    return [struct.calcsize(f"@{signature[:i]}0{letter}") for i, letter in enumerate(signature)]


def sizes(signature: str) -> list[int]:
    """Size of each parameter in bytes."""
    return [struct.calcsize(f"@{letter}") for letter in signature]


def raw_stream(device: torch.device) -> Any:
    """The CUstream that torch queues work of this thread on, as a number."""
    return torch.cuda.current_stream(device).cuda_stream
