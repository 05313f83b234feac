"""Makes drafters: from a directory, from the configuration, or the one in service before a restart."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from driftguard_engine.config import (
    DRAFTERS,
    DRAFTS_AHEAD,
    OTHER_VOCABULARY,
    EngineConfig,
    installed_drafters,
)
from driftguard_engine.core import DraftInfo, InvalidModel
from driftguard_engine.drafters.ahead import AheadDrafter
from driftguard_engine.drafters.ahead_worker import Settings
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.drafters.corpus import Corpus, is_corpus, read_documents
from driftguard_engine.drafters.draft_model import DraftModelDrafter
from driftguard_engine.drafters.heads import BlockDrafter, ChainDrafter, ParallelDrafter
from driftguard_engine.drafters.hybrid import HybridDrafter
from driftguard_engine.drafters.loaded import NO_DRAFT, LoadedDraft
from driftguard_engine.drafters.lookahead import LookaheadDrafter
from driftguard_engine.drafters.medusa import MedusaDrafter
from driftguard_engine.drafters.ngram import NgramDrafter
from driftguard_engine.drafters.other_vocabulary import open_slem, open_tli
from driftguard_engine.drafters.past_outputs import PastOutputs
from driftguard_engine.drafters.state_file import SavedDraft, is_older, saved_draft
from driftguard_engine.drafters.streaming import StreamingDrafter
from driftguard_engine.drafters.suffix import Matches, SuffixDrafter
from driftguard_engine.models import device_memory
from driftguard_engine.models import directory as directories
from driftguard_engine.models.base import TokenModel
from driftguard_engine.models.chain_heads import Eagle3Model, FusedModel, ParallelModel
from driftguard_engine.models.dflash import BlockModel
from driftguard_engine.models.dflash_head import read_block_head
from driftguard_engine.models.eagle3_head import read_head
from driftguard_engine.models.fused_head import read_fused_head
from driftguard_engine.models.llama import LlamaModel
from driftguard_engine.models.loading import LoadedModel, Placement, check_same_tokenizer, load
from driftguard_engine.models.medusa import MedusaModel
from driftguard_engine.models.medusa_head import is_medusa, read_heads
from driftguard_engine.models.speculators import TITLES, HeadDirectory, TargetSizes, head_kind
from driftguard_engine.models.streaming import StreamingModel
from driftguard_engine.models.streaming_adapter import is_streaming, read_adapter
from driftguard_engine.models.target_mtp import TargetMtpModel, read_target_mtp
from driftguard_engine.prefix_cache import PrefixCache

logger = logging.getLogger(__name__)

# Methods whose drafts take the device's memory.
WITH_WEIGHTS = ("draft_model", *TITLES, "medusa", "streaming", "hybrid", *DRAFTS_AHEAD, *OTHER_VOCABULARY)
_NAMES = {
    "ngram": "a corpus",
    "suffix": "a corpus",
    "medusa": "a directory of Medusa heads",
    "streaming": "a streaming adapter",
    **TITLES,
} | dict.fromkeys(("draft_model", *DRAFTS_AHEAD, *OTHER_VOCABULARY), "a draft model")


def _kind_of(directory: Path, drafter: str) -> str:
    """By what it is drafted with alone; drafter: what the engine was started with. Raises InvalidModel."""
    if is_corpus(directory):
        return "ngram" if drafter == "ngram" else "suffix"
    if is_medusa(directory):
        return "medusa"
    if is_streaming(directory):
        return "streaming"
    if kind := head_kind(directory):
        return kind
    return drafter if drafter in (*DRAFTS_AHEAD, *OTHER_VOCABULARY) else "draft_model"


@dataclass(frozen=True)
class FoundDraft:
    """What a draft is called once it is loaded. told: `versions`, where they have been read."""

    info: DraftInfo
    told: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls, name: str, version: str | None, method: str, directory: str, corpus: str | None = None
    ) -> FoundDraft:
        """version: None: that of its files. Raises InvalidModel."""
        told = _versions_of(directory, corpus) if version is None else None
        return cls(DraftInfo(name, version or "+".join(told or ()), method, directory, corpus), told)

    @cached_property
    def versions(self) -> tuple[str, ...]:
        """Of its files, which may be gigabytes and are read once, and of a hybrid's corpus. Raises
        InvalidModel."""
        return self.told or _versions_of(str(self.info.directory), self.info.corpus)

    @property
    def own_version(self) -> str:
        """Of all of them, whatever version it was given."""
        return "+".join(self.versions)


def _versions_of(directory: str, corpus: str | None) -> tuple[str, ...]:
    return tuple(directories.version_of(Path(part)) for part in (directory, corpus) if part is not None)


@dataclass(frozen=True, slots=True)
class DraftLoader:
    """Makes the drafts of one engine."""

    config: EngineConfig
    target: LoadedModel
    placement: Placement
    past: PastOutputs | None

    def first(self, plain: LoadedDraft | None) -> tuple[LoadedDraft, bool]:
        """The draft that was put into service before the restart, and True; else the configured one, and
        False. plain: `without_files`. Raises InvalidModel."""
        config = self.config
        remembered = saved_draft(config.state_dir, configured_draft(config)) if config.state_dir else None
        if remembered is not None and plain is not None and remembered.version == plain.info.version:
            return plain, True
        if remembered is not None and remembered.directory is not None:
            try:
                return self._remembered(remembered.directory, remembered), True
            except InvalidModel as error:
                logger.error(
                    "draft %s was in service before and cannot be loaded (%s); serving the configured draft",
                    remembered.version,
                    error.detail,
                )
        return self._configured() or plain or LoadedDraft(NO_DRAFT, None), False

    def without_files(self) -> LoadedDraft | None:
        """What has no files of its own that are loaded here, also an installed drafter: it stays beside what
        is put into service, for a rollback to return to. Raises InvalidModel."""
        config = self.config
        if config.drafter == "mtp" and config.draft is None:
            return self._target_mtp()
        if config.drafter == "suffix":
            return LoadedDraft(DraftInfo("suffix", "no-corpus", "suffix"), SuffixDrafter(None, self.past))
        if config.drafter == "ngram":
            least, most = config.ngram_min_tokens, config.ngram_max_tokens
            drafter = NgramDrafter(least, most)
            return LoadedDraft(DraftInfo("ngram", f"ngram-{least}-{most}", "ngram"), drafter)
        if config.drafter == "lookahead":
            self.check_takes_trees("drafter: 'lookahead'", field="drafter")
            sizes = config.lookahead_window, config.lookahead_ngram, config.lookahead_candidates
            version = "lookahead-" + "-".join(map(str, sizes))
            return LoadedDraft(DraftInfo("lookahead", version, "lookahead"), LookaheadDrafter(*sizes))
        return None if config.drafter in DRAFTERS else self._installed(config.drafter)

    def _target_mtp(self) -> LoadedDraft:
        """The layer in the target's own checkpoint."""
        target, placement = self.target.model, self.placement
        head, version = read_target_mtp(self.target.directory, target.embedding)
        room = target.max_length + placement.spare
        drafter = ChainDrafter(TargetMtpModel(head, target, placement.slots, room))
        return LoadedDraft(DraftInfo("mtp", version, "mtp"), drafter)

    def _installed(self, name: str) -> LoadedDraft:
        """An installed drafter, which its package makes of `draft` and of the target."""
        entry = installed_drafters()[name]
        package = "unknown" if entry.dist is None else f"{entry.dist.name}-{entry.dist.version}"
        try:
            drafter = entry.load()(self.config.draft, self.target, self.placement)
        except Exception as error:  # of code that is not ours
            raise InvalidModel(
                f"drafter: {name!r} of {package} cannot be made ({type(error).__name__}: {error})",
                field="drafter",
            ) from error
        if not isinstance(drafter, Drafter):
            raise InvalidModel(
                f"drafter: {name!r} of {package} makes {type(drafter).__name__}, which is no "
                "driftguard_engine.drafters.base.Drafter",
                field="drafter",
            )
        if drafter.trees:
            self.check_takes_trees(f"drafter: {name!r} of {package}", field="drafter")
        return LoadedDraft(DraftInfo(name, package, name), drafter)

    def check_takes_trees(self, which: str, *, field: str) -> None:
        """Raises InvalidModel where this engine cannot verify trees."""
        if self.target.model.tree_obstacle is not None:
            raise InvalidModel(
                f"{which} drafts trees, which the target cannot read: {self.target.model.tree_obstacle}",
                field=field,
            )
        if self.config.verification != "token":
            raise InvalidModel(
                f"{which} drafts trees, which are verified by a rule of their own, and not by "
                f"{self.config.verification!r}: --verification token",
                field=field,
            )

    def describe(self, name: str, version: str | None, serving: DraftInfo | None = None) -> FoundDraft:
        """The draft in a directory or of a hub name. Raises InvalidModel.

        Of a hybrid it is one part, and the other part is that of the draft in service.
        """
        directory = directories.find(name, field="draft")
        shown, path = directories.shown_name(name, directory), str(directory)
        kind = _kind_of(directory, self.config.drafter)
        if self.config.drafter != "hybrid":
            return FoundDraft.of(shown, version, kind, path)
        if kind == "suffix" and serving is not None:
            return self._hybrid(serving.name, version, str(serving.directory), path)
        if kind == "suffix":
            raise InvalidModel(
                f"draft: {name} is a corpus; --drafter hybrid takes a draft model or a head as "
                "--draft, and a corpus as --corpus",
                field="draft",
            )
        if kind in ("medusa", "streaming"):
            raise InvalidModel(
                f"draft: {name} is {_NAMES[kind]}, which drafts trees; --drafter hybrid takes a draft model "
                "or a head of chains",
                field="draft",
            )
        return self._hybrid(shown, version, path, self.config.corpus if serving is None else serving.corpus)

    @staticmethod
    def _hybrid(name: str, version: str | None, directory: str, corpus: str | None) -> FoundDraft:
        if corpus is not None:
            corpus = str(directories.find(corpus, field="corpus"))
        return FoundDraft.of(name, version, "hybrid", directory, corpus)

    def open(self, found: FoundDraft, serving: LoadedDraft | None = None) -> LoadedDraft:
        """Loads what `describe` found. Raises InvalidModel.

        A hybrid with the model of the one in service shares it, and what its cache holds.
        """
        versions = found.versions  # before they are loaded: others may lie there afterwards
        opened = self._opened(found, serving)
        opened.versions = versions
        return opened

    def _opened(self, found: FoundDraft, serving: LoadedDraft | None) -> LoadedDraft:
        info = found.info
        if info.directory is None:
            raise ValueError(f"draft {info.version} has no files")
        if info.method in ("suffix", "ngram"):
            matches = Matches()
            if info.method == "ngram":
                matches = Matches.of_ngrams(self.config.ngram_min_tokens, self.config.ngram_max_tokens)
            return LoadedDraft(info, SuffixDrafter(self._corpus(info.directory, "draft"), self.past, matches))
        if info.method != "hybrid":
            return LoadedDraft(info, self._model(info.directory))
        corpus = None if info.corpus is None else self._corpus(info.corpus, "corpus")
        shared = serving is not None and self.shares(found, serving)
        if serving is not None and shared and isinstance(serving.drafter, HybridDrafter):
            model, prefixes = serving.drafter.model, serving.prefixes
        else:
            model, prefixes = self._model(info.directory), PrefixCache()
        suffix = SuffixDrafter(corpus, self.past, Matches(least=self.config.suffix_min_match))
        return LoadedDraft(info, HybridDrafter(suffix, model), prefixes=prefixes)

    @staticmethod
    def shares(found: FoundDraft, serving: LoadedDraft) -> bool:
        """Whether this hybrid has the model of the one in service; others may lie in its directory by now.
        Raises InvalidModel."""
        return (
            found.info.method == "hybrid"
            and found.info.directory == serving.info.directory
            and found.versions[:1] == serving.versions[:1]
        )

    def _corpus(self, name: str, field: str) -> Corpus:
        directory = directories.locate(name, field=field)
        return Corpus(read_documents(directory, self.target.tokenizer.get_vocab(), field=field))

    def _model(self, name: str) -> Drafter:
        if kind := head_kind(Path(name)):
            directory = directories.locate(name, field="draft")
            return _head_drafter(kind, directory, self.target.model, self.placement)
        if is_medusa(Path(name)):
            return self._medusa(directories.locate(name, field="draft"))
        if is_streaming(Path(name)):
            return self._streaming(directories.locate(name, field="draft"))
        ahead, placement = self.config.drafter in DRAFTS_AHEAD, self.placement
        if ahead:
            placement = replace(placement, slots=placement.slots * (1 + self.config.prepared_outcomes))
        loaded = load(name, placement, field="draft")
        if self.config.drafter == "tli":
            return open_tli(self.target, loaded)
        if self.config.drafter == "slem":
            return open_slem(self.target, loaded)
        check_same_tokenizer(self.target.tokenizer, loaded.tokenizer, loaded.directory, field="draft")
        return self._ahead(loaded) if ahead else DraftModelDrafter(loaded.model)

    def _ahead(self, draft: LoadedModel) -> AheadDrafter:
        """With its process. Raises InvalidModel."""
        config, target, model = self.config, self.target.model, draft.model
        if not isinstance(model, LlamaModel):
            raise InvalidModel(
                f"draft: {draft.directory} runs on the generic path, and --drafter {config.drafter} takes a "
                "draft of the Llama family on the lean path; --drafter draft_model takes any",
                field="draft",
            )
        settings = Settings(
            self.placement.slots,
            config.prepared_outcomes,
            config.max_speculative_tokens,
            target.vocabulary,
            config.verification,
            config.drafter == "ssd",
            torch.get_num_threads(),
        )
        if config.drafter == "ssd":
            return AheadDrafter(model, settings)
        if not isinstance(target, LlamaModel):
            raise InvalidModel(
                f"target: {self.target.directory} runs on the generic path, whose layers are not read in the "
                "middle of a pass, as --drafter mirror needs; --drafter ssd does without",
                field="target",
            )
        exit_layer = config.exit_layer
        if exit_layer is None:
            exit_layer = min(-(-3 * target.layers // 4), target.layers - 1)
        if not 0 < exit_layer < target.layers:
            raise InvalidModel(
                f"exit_layer: {exit_layer} is not between 1 and {target.layers - 1}; the target has "
                f"{target.layers} layers",
                field="exit_layer",
            )
        return AheadDrafter(model, settings, exit_layer, target.read_out)

    def _medusa(self, directory: Path) -> Drafter:
        target, placement = self.target.model, self.placement
        self.check_takes_trees(f"draft: {directory}", field="draft")
        heads = read_heads(directory, target.embedding, target.vocabulary, field="draft")
        model = MedusaModel(heads, target, placement.slots, target.max_length + placement.spare)
        return MedusaDrafter(model, target.layers)

    def _streaming(self, directory: Path) -> Drafter:
        target, placement = self.target.model, self.placement
        if not isinstance(target, LlamaModel):
            raise InvalidModel(
                f"draft: {directory} is a streaming adapter, and the target runs on the generic path, whose "
                "layers are not read one by one",
                field="draft",
            )
        self.check_takes_trees(f"draft: {directory}", field="draft")
        sizes = target.layers, target.intermediate, target.heads, target.embedding
        adapter = read_adapter(directory, *sizes, field="draft")
        room = target.max_length + placement.spare
        return StreamingDrafter(StreamingModel(adapter, target, placement.slots, room))

    def _remembered(self, directory: str, saved: SavedDraft) -> LoadedDraft:
        held = [("target", str(self.target.directory))]
        free = device_memory.free_bytes(self.placement.device)
        if not is_corpus(Path(directory)):
            device_memory.check_fits(self.config, self.placement, free, [("draft", directory)], held)
        if self.config.drafter == "hybrid":
            found = self._hybrid(Path(directory).name, saved.version, directory, saved.corpus)
        else:
            found = self.describe(directory, saved.version)
        self._check_unchanged(found, saved)
        return self.open(found)

    def _check_unchanged(self, found: FoundDraft, saved: SavedDraft) -> None:
        """Raises InvalidModel where its files are not those that were put into service, by their own version.
        Where that was not saved, a file of it must have been written since too: clocks of two machines may
        differ, and the version that was saved may have been given by hand."""
        own = found.own_version
        parts = [Path(each) for each in (found.info.directory, found.info.corpus) if each is not None]
        files = [path for part in parts for path in directories.weight_files(part)]
        is_written = self.config.state_dir is not None and is_older(self.config.state_dir, files)
        if own != (saved.own_version or (saved.version if is_written else own)):
            raise InvalidModel(
                f"draft: {' or '.join(map(str, parts))} was changed since it was put into service: its "
                f"version is {own}",
                field="draft",
            )

    def _configured(self) -> LoadedDraft | None:
        config = self.config
        if config.drafter in (*_NAMES, "hybrid") and config.draft is not None:
            found = self.describe(config.draft, None)
            if found.info.method != config.drafter:
                method = found.info.method
                raise InvalidModel(
                    f"draft: {config.draft} is {_NAMES[method]}, for --drafter {method}; "
                    f"--drafter {config.drafter} takes {_NAMES[config.drafter]}",
                    field="draft",
                )
            return self.open(found)
        return None


def _head_drafter(kind: str, directory: Path, target: TokenModel, placement: Placement) -> Drafter:
    if (width := target.embedding.shape[1]) != target.hidden:
        raise InvalidModel(
            f"draft: {directory} is {TITLES[kind]}, which is not computed for a target of these sizes: its "
            f"embeddings have size {width}, and its layers {target.hidden}",
            field="draft",
        )
    sizes = TargetSizes(target.vocabulary, target.layers, target.hidden, target.embedding)
    trained = HeadDirectory(directory, "draft").layer_config().max_position_embeddings
    if trained < target.max_length:
        logger.warning("%s was trained for %d of %d positions", directory, trained, target.max_length)
    slots, room = placement.slots, target.max_length + placement.spare
    if kind in ("dflash", "dspark"):
        block, ids = read_block_head(directory, sizes, field="draft")
        return BlockDrafter(BlockModel(block, ids, sizes.embedding, sizes.vocabulary, slots, room))
    if kind in ("mtp", "eagle"):
        fused = read_fused_head(directory, sizes, field="draft")
        ends = sizes.embedding, target.unembed
        return ChainDrafter(FusedModel(fused, *ends, slots, room, placement.launcher))
    head, ids = read_head(directory, sizes, field="draft")
    given = head, ids, sizes.embedding, target.unembed, sizes.vocabulary, slots, room, placement.launcher
    return ParallelDrafter(ParallelModel(*given)) if kind == "peagle" else ChainDrafter(Eagle3Model(*given))


def configured_draft(config: EngineConfig) -> str:
    """What the user configured. A start with another value ignores the draft that was saved."""
    corpus = "" if config.corpus is None else f" {config.corpus}"
    return f"{config.target} {config.drafter} {config.draft}{corpus}"
