"""Puts a corpus into a running SGLang that drafts by n-grams, in place of the one before.

    /server_info              does it draft by n-grams, and has it room for a corpus?
    /list_external_corpora    which corpora it has, and of how many tokens
    /add_external_corpus      loaded beside its scheduler; the answer comes when it is
    /update_weight_version    the version, which the proxy reads
    /remove_external_corpus   the one before

The routes are those of sglang.srt.entrypoints.http_server in SGLang 0.5.23. Requests go on meanwhile: both
corpora share the draft tokens reserved for corpora until the one before is removed. Corpora of others are
left alone. A restart forgets all that were added.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import httpx
import msgspec
import structlog

from driftguard.adapters.answers.sglang import LOADED
from driftguard.errors import DriftGuardError
from driftguard.retraining.engines import live_update
from driftguard.retraining.engines.engine_admin import EngineRefused
from driftguard.retraining.engines.live_update import Answered, LiveUpdate, MayBeLoaded, NotOffered
from driftguard.retraining.engines.order import Order
from driftguard.retraining.training import checksums

_OURS: Final = "driftguard-"  # an id of ours is this and the version
_TEXTS: Final = "corpus.jsonl"
_ONE_RANK: Final = ("tp_size", "dp_size", "pp_size")
_LOOK_SECONDS: Final = 0.5
log = structlog.get_logger(__name__)


class _Config(msgspec.Struct, frozen=True):
    documents: int
    tokens: int


class SglangCorpora(LiveUpdate):
    """Every method raises EngineRefused."""

    def __init__(self, url: str, key: str | None) -> None:
        super().__init__(url, key)
        self._room = self._reserved = 0  # tokens of all corpora, draft tokens of a step for them
        self._before: tuple[set[str], str] = set(), ""

    def version(self) -> str:
        return self._weight_version().removeprefix(LOADED)

    def recover(self, version: str) -> str | None:
        """Adding it again changes nothing where it is there."""
        del version
        self._was_cut_off = True
        return None

    def _offered(self, order: Order) -> None:
        del order
        info = self._asked("GET", "/server_info")
        if (found := info.get("speculative_algorithm")) != "NGRAM":
            raise NotOffered(f"{self.shown} takes no corpus: speculative_algorithm is {found}, not NGRAM")
        if more := [f"{name} is {size}" for name in _ONE_RANK if (size := info.get(name, 1)) != 1]:
            raise NotOffered(
                f"{self.shown} cannot take a corpus: {', '.join(more)}, and each rank would begin to draft "
                "from it at a step of its own"
            )
        self._reserved = int(info.get("speculative_ngram_external_sam_budget") or 0)
        self._room = int(info.get("speculative_ngram_external_corpus_max_tokens") or 0)
        if self._reserved == 0:
            raise NotOffered(
                f"{self.shown} would not draft from a corpus: it was started without "
                "--speculative-ngram-external-sam-budget"
            )
        self._before = _ours(self._corpora()), self._weight_version()

    def _load(self, path: str | None, version: str, digest: str | None) -> None:
        present, corpus_id = self._corpora(), _OURS + version
        if path is not None and corpus_id not in present:
            config, documents = self._read(Path(path), digest)
            self._check_room(config, present)
            self._add(corpus_id, documents)
        try:
            body = {"new_version": LOADED + version, "abort_all_requests": False}
            self._call("POST", "/update_weight_version", body)
            for other in _ours(present) - {corpus_id}:
                self._call("POST", "/remove_external_corpus", {"corpus_id": other})
        except EngineRefused as error:
            raise MayBeLoaded(error.detail) from error

    def _read(self, directory: Path, digest: str | None) -> tuple[_Config, list[str]]:
        """Raises EngineRefused: the files are not as they were made."""
        try:
            checksums.verify_if_known(directory, digest)
            config = msgspec.json.decode((directory / "config.json").read_bytes(), type=_Config)
            lines = (directory / _TEXTS).read_bytes().splitlines()
            return config, [msgspec.json.decode(line, type=str) for line in lines]
        except DriftGuardError as error:
            raise EngineRefused(error.detail) from error
        except (OSError, msgspec.DecodeError) as error:
            raise EngineRefused(f"the corpus in {directory} cannot be read: {error}") from None

    def _check_room(self, config: _Config, present: Mapping[str, int]) -> None:
        """Raises EngineRefused: the server has no room for this corpus."""
        tokens = config.tokens + config.documents + sum(present.values())
        if tokens > self._room:
            raise EngineRefused(
                f"the corpus of {config.tokens} tokens and those that {self.shown} has are {tokens} "
                f"together, more than its {self._room} (--speculative-ngram-external-corpus-max-tokens); "
                "lower retraining.corpus_tokens"
            )
        others = len(present.keys() - _ours(present))
        if others + 1 > self._reserved:
            raise EngineRefused(
                f"{self.shown} reserves {self._reserved} draft tokens for corpora "
                f"(--speculative-ngram-external-sam-budget), and has {others} of others: none is left for "
                "this one"
            )

    def _add(self, corpus_id: str, documents: list[str]) -> None:
        """Raises EngineRefused: it is not there; MayBeLoaded: it may be, in part or soon."""
        body = {"corpus_id": corpus_id, "documents": documents}
        try:
            told = self._call("POST", "/add_external_corpus", body, live_update.LOAD_SECONDS)
        except EngineRefused as error:
            refused = isinstance(error, Answered) and error.code < httpx.codes.INTERNAL_SERVER_ERROR
            if refused and not self._was_cut_off:  # else it may be loading since then
                raise
            if not self._comes(corpus_id):
                raise MayBeLoaded(
                    f"{error.detail} (it may be loaded still, beside the one before)"
                ) from error
            return
        if "truncated" in str(told.get("message")):
            raise MayBeLoaded(f"{self.shown} took a part of the corpus only: {told.get('message')}")

    def _comes(self, corpus_id: str) -> bool:
        until = time.monotonic() + live_update.ANSWER_SECONDS
        while time.monotonic() < until:
            if corpus_id in self._corpora():
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def _serves(self, version: str) -> bool:
        return _ours(self._corpora()) <= {_OURS + version} and self._weight_version() == LOADED + version

    def _is_untouched(self, previous: str) -> bool:
        del previous
        return not self._was_cut_off and (_ours(self._corpora()), self._weight_version()) == self._before

    def _leave_alone(self) -> None:
        """It was told nothing before a corpus was added."""

    def _end_session(self) -> None:
        """There are none."""

    def _goes_on(self) -> bool:
        return True

    def _corpora(self) -> dict[str, int]:
        """Tokens by id."""
        found = self._asked("GET", "/list_external_corpora").get("corpus_token_counts")
        if not isinstance(found, dict):
            raise NotOffered(f"{self.shown} does not list its corpora")
        return found

    def _weight_version(self) -> str:
        return str(self._call("GET", "/model_info").get("weight_version"))


def _ours(corpora: Mapping[str, int]) -> set[str]:
    return {corpus_id for corpus_id in corpora if corpus_id.startswith(_OURS)}
