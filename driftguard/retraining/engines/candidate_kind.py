"""What can be made in place of the draft in service, and whether it can be made here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

from driftguard.records.documents.diagnosis import for_server
from driftguard.retraining.engines.engine_admin import EngineInfo, engine_of
from driftguard.settings import EngineSettings, Settings

CandidateKind = Literal["model", "corpus", "corpus_as_texts"]


def candidate_kind(settings: Settings, info: EngineInfo) -> CandidateKind | None:
    """A model or a head is trained, a corpus is made of captured answers, for a hybrid the one beside its
    model; SGLang takes it as texts. None: neither.

    Raises BadSettings: no such engine.
    """
    engine = engine_of(settings, info.server)
    if is_trained_here(info.draft.method, engine) and info.draft.directory is not None:
        return "model"
    if info.draft.method == "suffix" and engine.admin_url is not None:
        return "corpus"
    if info.draft.method == "ngram" and info.ngram_tokens is not None:
        return "corpus"
    if info.draft.method == "hybrid" and info.draft.corpus is not None:
        return "corpus"
    if info.draft.method == "ngram" and engine.update_engine == "sglang_ngram":
        return "corpus_as_texts"
    return None


def is_trained_here(method: str, engine: EngineSettings) -> bool:
    """Whether drafts of this method are trained and scored, for this engine. EAGLE-3 and Medusa heads are
    scored as the built-in engine drafts with them; its ssd and mirror draft with a draft model."""
    built_in = engine.admin_url is not None
    return method == "draft_model" or (built_in and method in ("eagle3", "medusa", "ssd", "mirror"))


def torch_version() -> str | None:
    """Of the torch in this environment, in which the training process runs too. None: there is none, so that
    no candidate is made here, of any server: that process needs it for corpora too."""
    if find_spec("torch") is None:
        return None
    try:
        return version("torch")
    except PackageNotFoundError:  # as of one that was built in place
        return "of an unknown version"


def retraining_elsewhere(server: str, *, force: bool) -> str:
    """The command for a shell where torch is, which does all that a retraining here does."""
    return for_server("driftguard retrain --server SERVER", server) + (" --force" if force else "")
