"""The drafts in memory: which one serves new requests, and which still have requests to finish."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from driftguard_engine.core import DraftInfo, InvalidModel, UnknownDraft
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.prefix_cache import PrefixCache

logger = logging.getLogger(__name__)

MOST_NEVER_SERVED = 2  # a second load may come between a load and the swap that belongs to it
NO_DRAFT = DraftInfo("none", "none", "none")


@dataclass(slots=True, eq=False)
class LoadedDraft:
    """A draft with its drafter (None: no speculation), the number of requests that use it, and the prefixes
    that its cache holds. versions: of its files when they were read, and of a hybrid's corpus."""

    info: DraftInfo
    drafter: Drafter | None
    users: int = field(default=0)
    prefixes: PrefixCache = field(default_factory=PrefixCache)
    versions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.prefixes.by_state = self.drafter is not None and self.drafter.recurrent

    @property
    def own_version(self) -> str | None:
        """Of all its files, whatever version it was given; None: it has none."""
        return "+".join(self.versions) or None


class Drafts:
    """All loaded drafts, by version. Any thread may call.

    A draft that was swapped out stays until its last request has ended; then its memory is freed. One
    without a directory stays loaded: it needs hardly any memory (n-gram lookup, none), or is a part of the
    target (its own layer for multi-token prediction). Of those that have never served, or were asked for
    again since they were swapped out, the newest stay.
    """

    def __init__(self, first: LoadedDraft) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[str, LoadedDraft] = {first.info.version: first}
        self._serving = first
        self._leaving: set[str] = set()
        self._own_versions = {first.info.version: first.own_version}  # of all that were ever loaded

    @property
    def serving(self) -> DraftInfo:
        with self._lock:
            return self._serving.info

    @property
    def drafter(self) -> Drafter | None:
        """The drafter of the draft in service; None without speculation."""
        return self.in_service.drafter

    @property
    def in_service(self) -> LoadedDraft:
        with self._lock:
            return self._serving

    @property
    def loaded(self) -> list[DraftInfo]:
        with self._lock:
            return [draft.info for draft in self._loaded.values()]

    def find(self, version: str) -> DraftInfo:
        """Raises UnknownDraft. One that was swapped out stays for the swap that follows."""
        with self._lock:
            self._find(version)
            return self._keep(version)

    def own_version(self, version: str) -> str | None:
        """Of the files of a loaded draft, see `LoadedDraft`. Raises UnknownDraft."""
        with self._lock:
            return self._find(version).own_version

    def present(self, wanted: DraftInfo) -> DraftInfo | None:
        """The loaded draft of this version, which stays as `find` says. Raises InvalidModel where it is from
        another directory."""
        with self._lock:
            if wanted.version not in self._loaded:
                return None
            found = self._keep(wanted.version)
        if (found.directory, found.corpus) != (wanted.directory, wanted.corpus):
            raise InvalidModel(
                f"version: {found.version!r} is already loaded from {_files(found)}; "
                f"give {_files(wanted)} another version",
                field="version",
            )
        return found

    def check_files(self, wanted: DraftInfo, own_version: str) -> None:
        """Raises InvalidModel where this version had other files when it was loaded before."""
        with self._lock:
            before = self._own_versions.get(wanted.version) or own_version
        if before != own_version:
            raise InvalidModel(
                f"draft: {_files(wanted)} has other files than were loaded as version {wanted.version!r} "
                f"before: their own version is {own_version}, and was {before}; give them another version",
                field="version",
            )

    def make_room(self) -> None:
        """For a draft that is about to be loaded: frees the oldest of those that have never served."""
        with self._lock:
            never_served = [
                version
                for version, draft in self._loaded.items()
                if draft is not self._serving
                and version not in self._leaving
                and not draft.users
                and draft.info.directory is not None
            ]
            for version in never_served[: len(never_served) + 1 - MOST_NEVER_SERVED]:
                del self._loaded[version]
                logger.info("draft %s was never in service; its memory is freed for another one", version)

    def add(self, draft: LoadedDraft) -> DraftInfo:
        """Its version must not be present."""
        with self._lock:
            self._loaded[draft.info.version] = draft
            self._own_versions[draft.info.version] = draft.own_version
        return draft.info

    def swap(self, version: str) -> DraftInfo:
        """Puts a loaded draft into service for new requests. Raises UnknownDraft."""
        with self._lock:
            previous, self._serving = self._serving, self._find(version)
            self._leaving.discard(version)
            if previous is not self._serving and previous.info.directory is not None:
                self._leaving.add(previous.info.version)
                self._drop_if_unused(previous)
            logger.info("draft %s is in service (before: %s)", version, previous.info.version)
            return self._serving.info

    def acquire(self) -> LoadedDraft:
        """The draft in service, kept in memory until `release`."""
        with self._lock:
            self._serving.users += 1
            return self._serving

    def release(self, draft: LoadedDraft) -> None:
        with self._lock:
            draft.users -= 1
            self._drop_if_unused(draft)

    def _find(self, version: str) -> LoadedDraft:
        if version not in self._loaded:
            known = ", ".join(self._loaded)
            raise UnknownDraft(
                f"version: no draft of version {version!r} is loaded; loaded: {known}", field="version"
            )
        return self._loaded[version]

    def _keep(self, version: str) -> DraftInfo:
        """As the newest of those that have never served."""
        draft = self._loaded[version] = self._loaded.pop(version)
        self._leaving.discard(version)
        return draft.info

    def _drop_if_unused(self, draft: LoadedDraft) -> None:
        version = draft.info.version
        if draft.users == 0 and version in self._leaving:
            self._leaving.discard(version)
            del self._loaded[version]
            logger.info("the last request of draft %s has ended; its memory is freed", version)


def _files(draft: DraftInfo) -> str:
    return " and ".join(each for each in (draft.directory, draft.corpus) if each is not None) or "no files"
