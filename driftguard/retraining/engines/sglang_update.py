"""Puts another draft into a running SGLang, by the routes of its weight updates.

    /server_info, /weights_checker             is it offered? The checksums of the draft that serves
    /update_weight_version                     a note that the draft is being loaded; a restart forgets it
    /pause_generation                          running requests go back to the queue
    /flush_cache                               the prefix cache holds what the old draft computed
    /begin_weight_update                       a session for the draft begins
    /update_weights_from_tensor                tensors, in parts; the last one brings the version
    /end_weight_update
    /weights_checker                           the draft that serves is another one than before
    /continue_generation                       whatever happened
    /flush_cache?timeout=5                     where it was refused before

The routes are those of sglang.srt.entrypoints.http_server in SGLang 0.5.23. An error while tensors are
read or loaded ends its scheduler, and with it the server. So tensors are compared here with those of the
draft that it was started with, and what may have ended a server is not sent again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import httpx
import structlog

from driftguard.adapters.answers.sglang import LOADED, LOADING
from driftguard.errors import DriftGuardError
from driftguard.retraining.engines import live_update, sglang_tensors
from driftguard.retraining.engines.engine_admin import EngineRefused
from driftguard.retraining.engines.live_update import Answered, LiveUpdate, MayBeLoaded, NotOffered
from driftguard.retraining.engines.order import Order
from driftguard.retraining.training import checksums
from driftguard.retraining.training.draft_files import Tensor, form_of, is_here, tensors_of

_NEEDED: Final = {  # of /server_info
    "speculative_algorithm": "STANDALONE",  # others share tensors with the target, or have none
    "speculative_draft_model_quantization": None,
    "dp_size": 1,
    "pp_size": 1,
    "weight_cache_mode": "off",  # else its scheduler ends
    "disaggregation_mode": "null",
}
_IDLE_SECONDS: Final = 5  # in which SGLang waits for a moment without any request
Checksums = list[dict[str, str]]  # of each rank, by the tensor's name
log = structlog.get_logger(__name__)


class SglangUpdate(LiveUpdate):
    """Every method raises EngineRefused."""

    def __init__(self, url: str, key: str | None) -> None:
        super().__init__(url, key)
        self._ranks = 1
        self._first = Path()  # directory of the draft that it was started with
        self._version_before = ""
        self._known: dict[str, Checksums] = {}  # by version
        self._may_be_open = False

    def version(self) -> str:
        return self._weight_version().removeprefix(LOADED)

    def recover(self, version: str) -> str | None:
        """Where it has started again since, loading this version may be why. It has not where it has any note
        that a draft is being loaded, which may be the draft before, to be put back.
        """
        self._resume()
        self._may_be_open = self._was_cut_off = True
        self._end_session()
        found = self._weight_version()
        if found == LOADED + version or found.startswith(LOADING):
            return None
        return (
            f"loading draft {version} was cut off, and {self.shown} does not know of it (its weight version "
            f"is {found}): it has started again, or the draft before was put back"
        )

    def _offered(self, order: Order) -> None:
        info = self._asked("GET", "/server_info")
        for name, needed in _NEEDED.items():
            if (found := info.get(name, "missing")) != needed:
                raise NotOffered(f"{self.shown} cannot load a draft live: {name} is {found}, not {needed}")
        self._ranks = info.get("tp_size", 0)
        self._first = Path(str(info.get("speculative_draft_model_path")))
        if not is_here(self._first):
            raise NotOffered(
                f"{self.shown} was started with the draft {self._first}, which is no directory here that can "
                "be read, so that shapes cannot be compared"
            )
        self._check_first(order)
        found = self._checksums()
        if not self._is_ready():
            raise EngineRefused(f"the server at {self.shown} is paused, or not ready")
        self._version_before = self._weight_version()
        self._was_cut_off |= self._version_before.startswith(LOADING)
        self._known = {} if self._was_cut_off else {order.previous_version: found}

    def _check_first(self, order: Order) -> None:
        """Raises NotOffered: shapes cannot be compared with those of the draft that it was started with,
        because its files are damaged. One that is to serve itself is refused when it is looked at."""
        try:
            form_of(self._first)
        except DriftGuardError as error:
            if order.draft_path is not None and Path(order.draft_path).resolve() == self._first.resolve():
                return
            raise NotOffered(
                f"{self.shown} was started with the draft {self._first}, with which shapes cannot be "
                f"compared: {error.detail}"
            ) from None

    def _load(self, path: str | None, version: str, digest: str | None) -> None:
        if path is None:
            raise EngineRefused(f"the files of draft {version} are gone")
        parts = sglang_tensors.parts_of(self._looked_at(Path(path), digest), self._ranks)
        is_flushed = False
        self._note(LOADING + version)
        try:
            self._call("POST", "/pause_generation", {"mode": "retract"})
            is_flushed = self._flush()
            self._begin()
            try:
                self._send(parts, version)
                self._call("POST", "/end_weight_update", {}, live_update.LOAD_SECONDS)
                self._may_be_open = False
                self._confirm(version)
            except EngineRefused as error:
                raise MayBeLoaded(error.detail) from error
        finally:
            self._end_session()
            self._resume()
        if not is_flushed:
            self._flush_when_idle()

    def _looked_at(self, directory: Path, digest: str | None) -> list[Tensor]:
        """What cannot be found wrong with it here can end the server."""
        try:
            checksums.verify_if_known(directory, digest)
            form_of(self._first).check(form_of(directory))
            tensors = list(tensors_of(directory).values())
            sglang_tensors.check(tensors)
        except DriftGuardError as error:
            raise EngineRefused(error.detail) from error
        return tensors

    def _flush(self) -> bool:
        """Paused, SGLang ignores its queue, but neither grammars that it compiles nor a hierarchical cache
        that copies.
        """
        try:
            self._call("POST", "/flush_cache")
        except Answered as error:
            log.info("the prefix cache is not flushed yet", answer=error.detail)
            return False
        return True

    def _flush_when_idle(self) -> None:
        try:
            self._call("POST", f"/flush_cache?timeout={_IDLE_SECONDS}")
        except EngineRefused as error:
            log.warning(
                "the prefix cache keeps what the old draft computed: acceptance may be lower at first",
                url=self.shown,
                reason=error.detail,
            )

    def _begin(self) -> None:
        self._may_be_open = True
        try:
            self._call("POST", "/begin_weight_update", {"selector": "draft"})
        except Answered:
            self._may_be_open = False  # a session that is open is somebody else's
            raise

    def _send(self, parts: list[list[Tensor]], version: str) -> None:
        for number, part in enumerate(parts, start=1):
            told: dict[str, Any] = {"selector": "draft", "flush_cache": False}
            if number == len(parts):
                told["weight_version"] = LOADED + version
            try:
                content = sglang_tensors.body(part, self._ranks, told)
            except DriftGuardError as error:
                raise EngineRefused(error.detail) from error
            self._call("POST", "/update_weights_from_tensor", content, live_update.LOAD_SECONDS)

    def _confirm(self, version: str) -> None:
        if not self._serves(version):
            raise EngineRefused(f"{self.shown} took draft {version}, and its checksums are not this draft's")

    def _serves(self, version: str) -> bool:
        """By its checksums, where they are known; else they must be those of no other draft that is known."""
        found = self._checksums()
        if self._weight_version() != LOADED + version:
            return False
        if version in self._known:
            return self._known[version] == found
        return found not in self._known.values()

    def _is_untouched(self, previous: str) -> bool:
        return self._known.get(previous) == self._checksums()

    def _leave_alone(self) -> None:
        try:
            if self._weight_version().startswith((LOADING, LOADED)):  # it has not started again
                self._note(self._version_before)
        except EngineRefused as error:
            log.warning("a note that a draft is being loaded is left", url=self.shown, reason=error.detail)

    def _end_session(self) -> None:
        if not self._may_be_open:
            return
        try:
            self._call("POST", "/end_weight_update", {}, live_update.LOAD_SECONDS)
        except EngineRefused as error:
            log.info("no session of a weight update to end", answer=error.detail)
            if not isinstance(error, Answered):
                return
        self._may_be_open = False

    def _goes_on(self) -> bool:
        self._call("POST", "/continue_generation", {})
        return self._is_ready()

    def _is_ready(self) -> bool:
        try:
            self._call("GET", "/ready")
        except Answered as error:
            if error.code == httpx.codes.SERVICE_UNAVAILABLE:
                return False
            raise
        return True

    def _weight_version(self) -> str:
        return str(self._call("GET", "/model_info").get("weight_version"))

    def _note(self, version: str) -> None:
        self._call("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def _checksums(self) -> Checksums:
        """Of the draft's tensors. Raises NotOffered: it does not tell a draft from the target."""
        asked = {"action": "checksum", "selector": "draft"}
        answer = self._asked("POST", "/weights_checker", asked, live_update.LOAD_SECONDS)
        try:
            roles = [place["role"] for rank in answer["ranks"] for place in rank["parallelism_info"]]
            found = [dict(rank["checksums"]) for rank in answer["ranks"]]
        except (KeyError, TypeError):
            roles, found = [], []
        if len(found) != self._ranks or not all(found) or set(roles) != {"draft"}:
            raise NotOffered(f"{self.shown} gives no checksums of a draft for {self._ranks} ranks")
        return found
