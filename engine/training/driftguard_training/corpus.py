"""Real text that every machine with Python has, by domain, split by file into train and heldout.

Standard library only: the sidecar's demo cuts its prompts here and must not import torch.
The text depends on the installed Python (and torch) version; everything else is deterministic.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import os
import random
import re
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

_HELDOUT_ONE_IN = 10
_DOCUMENT_CHARACTERS = 48_000  # no single file may dominate a domain
_SHORTEST_DOCUMENT_CHARACTERS = 300
_SHORTEST_DOCSTRING_CHARACTERS = 80
_DOMAIN_CHARACTERS = {"python": 9_000_000, "prose": 6_000_000, "headers": 9_000_000}
# Tables, generated data and other people's packages are not what a programmer would call Python code.
_SKIPPED_PYTHON = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
_GENERATED_OPERATORS = "torch/ATen/ops/"
_GENERATED_OPERATORS_ONE_IN = 4
_HEADER_SUFFIXES = {".h", ".hpp", ".cuh"}
_BLOCKS = {"body", "handlers", "orelse", "finalbody", "cases"}  # lists of statements
_LICENCE = re.compile(r"copyright|licen[sc]e|all rights reserved", re.IGNORECASE)
_LEADING_COMMENT = re.compile(r"\s*(/\*.*?\*/|(?://[^\n]*\n)+|(?:#(?![a-z])[^\n]*\n)+)", re.DOTALL)
_TORCH_GUARD = re.compile(
    r"\A#if !defined\(TORCH_STABLE_ONLY\)[^\n]*\n"
    r"|\n#else\n#error \"This file should not[^\n]*\n#endif[^\n]*\s*\Z"
)


class NoTextError(RuntimeError):
    """Domain '{domain}' has no {split} text on this machine: looked in {places}."""

    def __init__(self, domain: str, split: str, places: str) -> None:
        super().__init__(f"Domain '{domain}' has no {split} text on this machine: looked in {places}.")


def domains() -> tuple[str, ...]:
    """The names that `documents` and `prompts` accept."""
    return tuple(_DOMAIN_CHARACTERS)


def documents(domain: str, split: Split) -> list[str]:
    """Texts of one domain, at most a few million characters, in a stable order.

    Raises:
        ValueError: unknown domain or split.
        NoTextError: this machine has no such text.
    """
    _check_names(domain, split)
    texts = [text for name, text in _domain(domain) if is_heldout(name) == (split == "heldout")]
    if not texts:
        raise NoTextError(domain, split, _places(domain))
    return texts


def prompts(domain: str, count: int, seed: int, characters: int = 400, split: Split = "heldout") -> list[str]:
    """`count` excerpts of about `characters` characters, each starting and ending at a line boundary.

    The same arguments give the same prompts; excerpts may overlap when `count` is large.
    """
    texts = [text for text in documents(domain, split) if len(text) > 2 * characters]
    if not texts:
        raise NoTextError(domain, f"{split} (at least {2 * characters} characters)", _places(domain))
    generator = random.Random(f"{domain}:{split}:{seed}")
    weights = [len(text) for text in texts]
    return [_cut(text, generator, characters) for text in generator.choices(texts, weights=weights, k=count)]


def is_heldout(name: str) -> bool:
    """Whether the file of this relative name is kept from training."""
    return _stable_hash(name) % _HELDOUT_ONE_IN == 0


def _check_names(domain: str, split: str) -> None:
    if domain not in _DOMAIN_CHARACTERS:
        raise ValueError(f"domain must be one of {', '.join(domains())}, not '{domain}'")
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be train or heldout, not '{split}'")


def _cut(text: str, generator: random.Random, characters: int) -> str:
    start = text.find("\n", generator.randrange(len(text) - characters)) + 1
    end = text.rfind("\n", start + characters // 2, start + characters) + 1
    return text[start : end or start + characters]  # one very long line: cut it inside


def _stable_hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


@functools.cache
def _domain(domain: str) -> tuple[tuple[str, str], ...]:
    """(relative name, text), ordered by name hash, so that the cap keeps an even sample; no text twice."""
    sources = {"python": _python_texts, "prose": _prose_texts, "headers": _header_texts}[domain]()
    chosen: list[tuple[str, str]] = []
    seen: set[str] = set()
    characters = 0
    for name, text in sources:
        text = text.strip("\n")[:_DOCUMENT_CHARACTERS]
        if len(text) < _SHORTEST_DOCUMENT_CHARACTERS or text in seen:
            continue
        if characters >= _DOMAIN_CHARACTERS[domain]:
            break
        seen.add(text)
        chosen.append((name, text + "\n"))
        characters += len(text)
    return tuple(chosen)


def _python_texts() -> Iterator[tuple[str, str]]:
    for name, path in _files(_python_root(), "", {".py"}, _SKIPPED_PYTHON):
        yield name, _without_licence(_read(path))


def _prose_texts() -> Iterator[tuple[str, str]]:
    yield from _topics()
    for name, path in _files(_python_root(), "", {".py"}, _SKIPPED_PYTHON):
        yield name, "\n\n".join(_docstrings(_read(path)))


def _header_texts() -> Iterator[tuple[str, str]]:
    files: list[tuple[str, Path]] = []
    for prefix, root in _header_roots():
        files += _files(root, prefix, _HEADER_SUFFIXES, set())
    for name, path in sorted(files, key=lambda item: _stable_hash(item[0])):
        # Thousands of nearly identical generated files would displace text that people wrote.
        generated = name.startswith(_GENERATED_OPERATORS)
        if generated and _stable_hash("operators:" + name) % _GENERATED_OPERATORS_ONE_IN:
            continue
        yield name, _without_licence(_TORCH_GUARD.sub("", _read(path)))


def _files(root: Path, prefix: str, suffixes: set[str], skipped: set[str]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for directory, directories, names in os.walk(root):
        directories[:] = set(directories) - skipped  # site-packages hold ten times as many files as the rest
        paths = [Path(directory, name) for name in names]
        found += [
            (prefix + path.relative_to(root).as_posix(), path)
            for path in paths
            if path.suffix in suffixes and path.is_file()
        ]
    return sorted(found, key=lambda item: _stable_hash(item[0]))


def _topics() -> Iterator[tuple[str, str]]:
    path = _python_root() / "pydoc_data" / "topics.py"
    if not path.is_file():
        return
    for node in ast.parse(_read(path)).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(node.value)
            for topic in sorted(topics, key=_stable_hash):
                yield f"topics/{topic}", topics[topic]


def _docstrings(source: str) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old sources
        try:
            tree = ast.parse(source)
        except SyntaxError:  # lib2to3 ships Python 2 sources
            return
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
            if len(text) >= _SHORTEST_DOCSTRING_CHARACTERS:
                yield text


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements, in the order of ast.walk. That would visit expressions too, which are nine nodes in ten
    and define nothing that has a docstring.
    """
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        for name in node._fields:
            if name in _BLOCKS:
                waiting.extend(getattr(node, name))


def _without_licence(text: str) -> str:
    while (match := _LEADING_COMMENT.match(text)) and _LICENCE.search(match.group()):
        text = text[match.end() :]
    return text


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n").expandtabs(4)


def _python_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _header_roots() -> list[tuple[str, Path]]:
    roots = [("python/", Path(sysconfig.get_path("include")))]
    torch = importlib.util.find_spec("torch")  # finds the package without importing it
    if torch is not None and torch.origin is not None:
        roots.append(("torch/", Path(torch.origin).parent / "include"))
    return [(prefix, root) for prefix, root in roots if root.is_dir()]


def _places(domain: str) -> str:
    if domain == "headers":
        return ", ".join(str(root) for _, root in _header_roots()) or sysconfig.get_path("include")
    return str(_python_root())
