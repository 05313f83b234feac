"""What each kernel takes of a multiprocessor, as the assembler reports it in the compilation's log."""

from __future__ import annotations

import re

from tests.gpu.check.rows import Resources

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def resources(log: str) -> list[Resources]:
    """One for each kernel in a `Compiled.log`. Raises ValueError (a kernel without its figures)."""
    _, *parts = _ENTRY.split(log)
    return [_one(kernel, text) for kernel, text in zip(parts[::2], parts[1::2], strict=True)]


def _one(kernel: str, text: str) -> Resources:
    stack, registers, shared = _STACK.search(text), _REGISTERS.search(text), _SHARED.search(text)
    if stack is None or registers is None:
        raise ValueError(f"the compilation's log lacks the registers or the stack of {kernel}")
    return Resources(
        kernel,
        registers=int(registers[1]),
        stack_bytes=int(stack[1]),
        spill_bytes=int(stack[2]) + int(stack[3]),
        shared_bytes=int(shared[1]) if shared else 0,
    )
