"""A corpus for suffix decoding, made as the retraining makes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def save_corpus(directory: Path, target: str, documents: Sequence[Sequence[int]]) -> str:
    """For the tokenizer of the target in this directory."""
    # Here: the checks of a GPU name the drafters also where the packages of the training are missing.
    import msgspec
    from driftguard_training.lookup import make_corpus
    from driftguard_training.settings import CorpusSettings

    train = directory.with_suffix(".jsonl")
    lines = [
        {"segment": "a", "prompt_token_ids": [1], "output_token_ids": list(document)}
        for document in documents
    ]
    train.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    make_corpus(CorpusSettings(Path(target), train, directory))
    return str(directory)
