"""Makes drafters: from a directory, from the configuration, or the one in service before a restart."""

from __future__ import annotations

import logging
from pathlib import Path

from driftguard_engine.config import EngineConfig
from driftguard_engine.core import DraftInfo, DraftMethod, InvalidModel
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.drafters.corpus import Corpus, is_corpus, read_documents
from driftguard_engine.drafters.draft_model import DraftModelDrafter
from driftguard_engine.drafters.eagle3 import Eagle3Drafter
from driftguard_engine.drafters.loaded import NO_DRAFT, LoadedDraft
from driftguard_engine.drafters.ngram import NgramDrafter
from driftguard_engine.drafters.state_file import saved_draft
from driftguard_engine.drafters.suffix import SuffixDrafter
from driftguard_engine.models import device_memory
from driftguard_engine.models import directory as directories
from driftguard_engine.models.base import TokenModel
from driftguard_engine.models.eagle3 import Eagle3Model
from driftguard_engine.models.eagle3_head import is_eagle3, read_head
from driftguard_engine.models.loading import LoadedModel, Placement, check_same_tokenizer, load

logger = logging.getLogger(__name__)

WITH_WEIGHTS = ("draft_model", "eagle3")  # methods whose drafts take the device's memory
_NAMES = {"draft_model": "a draft model", "suffix": "a corpus", "eagle3": "an EAGLE-3 head"}


def describe_draft(name: str, version: str | None) -> DraftInfo:
    """What the draft in a directory or of a hub name is called once it is loaded. Raises InvalidModel."""
    directory = directories.find(name, field="draft")
    return _described(directories.shown_name(name, directory), version, directory)


def _described(name: str, version: str | None, directory: Path) -> DraftInfo:
    version = version or directories.version_of(directory)
    return DraftInfo(name, version, _method_of(directory), str(directory))


def _method_of(directory: Path) -> DraftMethod:
    if is_corpus(directory):
        return "suffix"
    return "eagle3" if is_eagle3(directory) else "draft_model"


def open_draft(name: str, version: str | None, target: LoadedModel, placement: Placement) -> LoadedDraft:
    """Loads a draft for the target from a directory or hub name. Raises InvalidModel."""
    method = _method_of(directories.find(name, field="draft"))
    drafter: Drafter
    if method == "draft_model":
        loaded = load(name, placement, field="draft")
        directory = loaded.directory
        check_same_tokenizer(target.tokenizer, loaded.tokenizer, directory, field="draft")
        drafter = DraftModelDrafter(loaded.model)
    else:
        directory = directories.locate(name, field="draft")
        if method == "suffix":
            documents = read_documents(directory, target.tokenizer.get_vocab(), field="draft")
            drafter = SuffixDrafter(Corpus(documents))
        else:
            drafter = Eagle3Drafter(_eagle3_model(directory, target.model, placement))
    return LoadedDraft(_described(directories.shown_name(name, directory), version, directory), drafter)


def _eagle3_model(directory: Path, target: TokenModel, placement: Placement) -> Eagle3Model:
    head, ids = read_head(directory, target.layers, target.embedding, target.vocabulary, field="draft")
    trained = head.config.layer.max_position_embeddings
    if trained < target.max_length:
        logger.warning("%s was trained for %d of %d positions", directory, trained, target.max_length)
    room = target.max_length + placement.spare
    return Eagle3Model(head, ids, target.embedding, target.vocabulary, placement.slots, room)


def first_draft(config: EngineConfig, target: LoadedModel, placement: Placement) -> LoadedDraft:
    """The draft that was in service before the restart, else the configured one. Raises InvalidModel."""
    remembered = saved_draft(config.state_dir, configured_draft(config)) if config.state_dir else None
    plain = draft_without_files(config)
    if remembered is not None and plain is not None and remembered.version == plain.info.version:
        return plain
    if remembered is not None and remembered.directory is not None:
        try:
            held = [("target", str(target.directory))]
            free = device_memory.free_bytes(placement.device)
            if not is_corpus(Path(remembered.directory)):
                device_memory.check_fits(config, placement, free, [("draft", remembered.directory)], held)
            return open_draft(remembered.directory, remembered.version, target, placement)
        except InvalidModel as error:
            logger.error(
                "draft %s was in service before and cannot be loaded (%s); serving the configured draft",
                remembered.version,
                error.detail,
            )
    return _configured(config, target, placement)


def configured_draft(config: EngineConfig) -> str:
    """What the user configured. A start with another value ignores the draft that was saved."""
    return f"{config.target} {config.drafter} {config.draft}"


def _configured(config: EngineConfig, target: LoadedModel, placement: Placement) -> LoadedDraft:
    if config.drafter in _NAMES and config.draft is not None:
        found = open_draft(config.draft, None, target, placement)
        if found.info.method != config.drafter:
            raise InvalidModel(
                f"draft: {config.draft} is {_NAMES[found.info.method]}, for --drafter {found.info.method}; "
                f"--drafter {config.drafter} takes {_NAMES[config.drafter]}",
                field="draft",
            )
        return found
    return draft_without_files(config) or LoadedDraft(NO_DRAFT, None)


def draft_without_files(config: EngineConfig) -> LoadedDraft | None:
    """What needs no loading: it stays beside what is put into service, for a rollback to return to."""
    if config.drafter == "suffix":
        return LoadedDraft(DraftInfo("suffix", "no-corpus", "suffix"), SuffixDrafter(None))
    if config.drafter == "ngram":
        least, most = config.ngram_min_tokens, config.ngram_max_tokens
        drafter = NgramDrafter(least, most)
        return LoadedDraft(DraftInfo("ngram", f"ngram-{least}-{most}", "ngram"), drafter)
    return None
