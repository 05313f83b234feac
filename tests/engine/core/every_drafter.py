"""Every drafter on a target of six letters, and what it drafts in each step."""

from __future__ import annotations

import mmap
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import DraftInfo, SamplingParams
from driftguard_engine.drafters import ahead_worker
from driftguard_engine.drafters.ahead_process import AheadProcess
from driftguard_engine.drafters.ahead_worker import Preparer, Settings, Shared
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.drafters.loaded import LoadedDraft
from driftguard_engine.engine import Engine
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.speculation import ReferenceVerification, TreeVerification
from torch import Tensor

from tests.engine.core.corpora import save_corpus
from tests.engine.core.eagle3_heads import load_target, save_random_head
from tests.engine.core.heads import KINDS, save_random
from tests.engine.core.medusa_heads import save_random_heads
from tests.engine.core.other_vocabularies import byte_level, save_translated
from tests.engine.core.streaming_adapters import save_random_adapter
from tests.engine.core.tiny import save
from tests.engine.core.tree_drafters import BigramTree

LETTERS = 6
PROMPT = (1, 2, 3, 1, 2)
# <|end|>, a to e; OWN has f instead of e, and two tokens that are two of the target's.
OURS = byte_level((), bytes_of="abcde")
OWN = byte_level(("ab", "dd"), bytes_of="abcdf", first=2)
GUIDE = Path(__file__).parents[3] / "CONTRIBUTING.md"

HEADS = ("eagle3", "pruned", *KINDS)
AHEAD = ("ssd", "mirror")
TREES = ("medusa", "streaming", "lookahead", "drawn_tree")
# By name: the settings of an engine. Drafts and corpora are directories of `save_letters`.
CASES: dict[str, dict[str, Any]] = {
    "draft_model": {"draft": "draft"},
    **{kind: {"draft": kind} for kind in HEADS},
    "pruned": {"drafter": "eagle3", "draft": "pruned"},
    "medusa": {"draft": "medusa"},
    "streaming": {"draft": "streaming"},
    "ngram": {},
    "ngram_in_corpus": {"drafter": "ngram", "draft": "corpus"},
    "suffix": {"draft": "corpus"},
    "hybrid": {"draft": "draft", "corpus": "corpus"},
    **{
        f"hybrid_with_{kind}": {"drafter": "hybrid", "draft": kind, "corpus": "corpus"}
        for kind in ("eagle3", "mtp", "peagle", "dspark")
    },
    "lookahead": {},
    **{each: {"draft": "draft"} for each in AHEAD},
    "tli": {"draft": "other"},
    "slem": {"draft": "other"},
    "installed": {},
    "drawn_tree": {},
}
CHAINS = tuple(name for name in CASES if name not in TREES)
GUESSED = ("ngram", "ngram_in_corpus", "suffix", "slem")  # chains, and certain of each token


def save_letters(root: Path) -> Path:
    save(root / "target", seed=5, tokenizer=OURS)
    save(root / "draft", seed=5, noise=0.1, tokenizer=OURS)
    target = load_target(root / "target")
    save_corpus(root / "corpus", str(root / "target"), [(1, 2, 3, 4, 5, 0, 2), (1, 2, 5, 3), (2, 4, 4, 1)])
    save_random_head(root / "eagle3", target, range(LETTERS), (0, 1), unembeds=False)
    save_random_head(root / "pruned", target, [0, 2, 3, 5], (0, 1))
    for kind in KINDS:
        save_random(root / kind, kind, target, None if kind in ("mtp", "eagle") else [0, 1, 2, 3, 5])
    save_random_heads(root / "medusa", 32, LETTERS)
    save_random_adapter(root / "streaming", root / "target", layers=1)
    save_translated(root / "other", target, OURS, OWN, 0.1)
    return root


def engine_of(letters: Path, name: str, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "drafter": name,
        "max_batch": 256,
        "max_length": 48,
        "max_waiting": 10_000,
        "prefill_chunk_tokens": 1024,
        "num_speculative_tokens": 2,
        "ngram_min_tokens": 1,
        "suffix_min_match": 2,
    } | CASES.get(name, {})
    made: dict[str, Callable[[], Drafter]] = {
        "installed": shown_drafter,
        "drawn_tree": lambda: BigramTree(bigrams(letters)),
    }
    if name in made:
        settings["drafter"] = "none"
    for part in ("draft", "corpus"):
        if part in settings:
            settings[part] = str(letters / settings[part])
    config = EngineConfig(str(letters / "target"), **settings | changes)
    draft = LoadedDraft(DraftInfo(name, name, name), made[name]()) if name in made else None
    return Engine(config, draft=draft)


def shown_drafter() -> Drafter:
    """The one of CONTRIBUTING.md."""
    shown = re.search(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    made: dict[str, Any] = {}
    exec(shown[1], made)
    drafter = made["open_drafter"](None, None, None)
    assert isinstance(drafter, Drafter)
    return drafter


def bigrams(letters: Path) -> Tensor:
    """What the target says behind each token alone: right often, but not always."""
    with torch.inference_mode():
        logits: Tensor = load_target(letters / "target")(torch.arange(LETTERS)[:, None]).logits[:, 0]
    return logits


class ThreadOfTest(AheadProcess):
    """The same conversation with a thread, so that a test can plant mistakes in what it does."""

    def __init__(self, model_file: int, memory: int, settings: Settings) -> None:
        self._connection, theirs = Pipe()
        self._is_ready = False
        with mmap.mmap(model_file, 0, access=mmap.ACCESS_READ) as stored:
            model = pickle.loads(stored)
        self._preparer = Preparer(model, Shared(memory, settings, model.cache), settings)
        threading.Thread(target=ahead_worker.serve, args=(theirs, self._preparer), daemon=True).start()

    def end(self) -> None:
        self._connection.close()


@dataclass(frozen=True, slots=True)
class Drafted:
    """Of one row in one step. logits [drafts, V]: of a chain, before each draw; None: of guesses. paths: of a
    tree, from the newest token, exclusive, down to each node that can be accepted; None: of a chain."""

    request_id: str
    params: SamplingParams
    text: tuple[int, ...]
    asked: int
    tokens: tuple[int, ...]
    logits: Tensor | None = None
    paths: frozenset[tuple[int, ...]] | None = None


@contextmanager
def watched(engine: Engine) -> Iterator[list[Drafted]]:
    """What the draft in service drafts from here on, row by row."""
    drafter, seen = engine._drafts.drafter, list[Drafted]()
    assert drafter is not None
    draft, draft_tree = drafter.draft, drafter.draft_tree

    def add(rows: RowState, row: int, asked: int, *drafts: Any) -> None:
        slot, length = int(rows.slots[row]), int(rows.lengths[row])
        request = next(each.request for each in engine._sequences.values() if each.slot == slot)
        text = tuple(rows.state.token_ids[slot, :length].tolist())
        seen.append(Drafted(request.request_id, request.params, text, asked, *drafts))

    def watched_draft(rows: RowState, verification: ReferenceVerification, launcher: None) -> None:
        asked, before, draw = rows.drafted.tolist(), list[Tensor](), verification.draw

        def watched_draw(step: int) -> None:
            before.append(verification.draft_logits[:, step].clone())
            draw(step)

        with_draw: Any = verification
        with_draw.draw = watched_draw
        draft(rows, verification, launcher)
        for row, count in enumerate(rows.drafted.tolist()):
            tokens = tuple(verification.draft_tokens[row, :count].tolist())
            certain = bool(verification._guessed[row]) or not before
            logits = None if certain else torch.stack([each[row] for each in before])[:count]
            add(rows, row, asked[row], tokens, logits)

    def watched_tree(rows: RowState, tree: TreeVerification) -> None:
        asked = rows.drafted.tolist()
        draft_tree(rows, tree)
        for row in range(len(asked)):
            add(rows, row, asked[row], tuple(tree.tokens[row].tolist()), None, paths_of(tree, row))

    own: Any = drafter
    own.draft, own.draft_tree = watched_draft, watched_tree
    try:
        yield seen
    finally:
        del own.draft, own.draft_tree


def paths_of(tree: TreeVerification, row: int) -> frozenset[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    tokens, parents = tree.tokens[row].tolist(), (tree._parents[row, 1:] - 1).tolist()
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token) if token >= 0 else ())
    return frozenset(path for column, path in enumerate(found) if path and column not in tree.probes)
