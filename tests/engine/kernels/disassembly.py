"""The machine code of the kernels: what a warp executes, counted without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from importlib import metadata
from pathlib import Path

PACKAGE = "nvidia-cuda-nvdisasm"

_KERNEL = re.compile(r"\.text\.(\w+):$")
_LABEL = re.compile(r"(\.L\w+):$")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)(.*?);")
_TARGET = re.compile(r"\((\.L\w+)\)")


def disassembler() -> str | None:
    """The path of nvdisasm: of the CUDA toolkit, or from pip. None where there is neither."""
    if found := shutil.which("nvdisasm"):
        return found
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(path.locate()) for path in files if path.stem == "nvdisasm"), None)


@dataclass(frozen=True, slots=True)
class Instruction:
    operation: str  # FFMA, LDG.E.128.CONSTANT, ...
    conditional: bool
    target: str | None  # label that it may jump to

    @property
    def name(self) -> str:
        return self.operation.split(".")[0]

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction may follow."""
        return self.conditional or self.name not in {"BRA", "EXIT", "RET", "BRX", "JMP"}


Stretch = range  # of a kernel's instructions


@dataclass(frozen=True)
class Kernel:
    instructions: list[Instruction]
    labels: dict[str, int]  # index of the instruction after each

    def count(self, where: Stretch, *prefixes: str) -> int:
        """Instructions whose operation begins with one of these; all of them without any."""
        return sum(self.instructions[at].operation.startswith(prefixes or ("",)) for at in where)

    @cached_property
    def loops(self) -> list[Stretch]:
        """Those without another inside, each from where a branch goes back to up to that branch."""
        found = [range(to, at + 1) for at, to in self._jumps() if to <= at]
        return [
            loop
            for loop in found
            if not any(loop != other and other[0] in loop and other[-1] in loop for other in found)
        ]

    @cached_property
    def blocks(self) -> list[Stretch]:
        """Stretches that nothing enters but at their beginning or leaves but at their end."""
        starts = {0, *self.labels.values()}
        starts |= {
            at + 1
            for at, instruction in enumerate(self.instructions)
            if instruction.target is not None or not instruction.goes_on or instruction.name == "EXIT"
        }
        ordered = sorted(start for start in starts if start < len(self.instructions))
        return [range(a, b) for a, b in zip(ordered, [*ordered[1:], len(self.instructions)], strict=True)]

    def shortest_through(self, block: Stretch) -> int:
        """Instructions on the shortest way from the entry through this block to an exit.

        Whatever is executed where the warp has diverged, or once for many rows, lies on longer ways.
        """
        to_block = self._shortest(self.blocks[0], lambda at: at == block)
        return to_block + self._shortest(block, self._exits) - len(block)

    def _shortest(self, start: Stretch, arrived: Callable[[Stretch], bool]) -> int:
        starting = {block[0]: block for block in self.blocks}
        waiting, seen = [(len(start), start[0])], set[int]()
        while waiting:
            length, at = heappop(waiting)
            block = starting[at]
            if arrived(block):
                return length
            if at in seen:
                continue
            seen.add(at)
            for following in self._following(block):
                heappush(waiting, (length + len(starting[following]), following))
        raise ValueError("no way leads there")

    def _exits(self, block: Stretch) -> bool:
        return self.instructions[block[-1]].name == "EXIT"

    def _following(self, block: Stretch) -> Iterator[int]:
        last = self.instructions[block[-1]]
        if last.name == "BRA" and last.target is not None:
            yield self.labels[last.target]
        if last.goes_on and block[-1] + 1 < len(self.instructions):
            yield block[-1] + 1

    def _jumps(self) -> Iterator[tuple[int, int]]:
        for at, instruction in enumerate(self.instructions):
            if instruction.name == "BRA" and instruction.target is not None:
                yield at, self.labels[instruction.target]


def kernels(cubin: bytes, nvdisasm: str, directory: Path) -> dict[str, Kernel]:
    """Every kernel of a cubin by its name. directory: for the file that nvdisasm reads."""
    path = directory / "kernels.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([nvdisasm, "-c", str(path)], capture_output=True, text=True, check=True).stdout
    found: dict[str, Kernel] = {}
    into: Kernel | None = None
    for line in map(str.strip, text.splitlines()):
        if named := _KERNEL.match(line):
            into = found[named[1]] = Kernel([], {})
        elif into is None:
            continue
        elif labelled := _LABEL.match(line):
            into.labels[labelled[1]] = len(into.instructions)
        elif read := _INSTRUCTION.search(line):
            condition, operation, operands = read.groups()
            target = _TARGET.search(operands)
            # A branch may also read a condition as its operand.
            conditional = condition is not None or (target is not None and "," in operands)
            into.instructions.append(Instruction(operation, conditional, target[1] if target else None))
    return found
