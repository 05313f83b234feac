"""Hooks into vLLM, which are looked at before they are used; a request never waits for them or fails by them.

In the engine's process: `Scheduler.make_spec_decoding_stats` is called with the counts of every step of every
request, `_update_request_with_output` with its new tokens, and `_free_request` when it ends, however it ends.
In the API server: `InputProcessor.process_inputs` makes of a request what is sent to the engine.

Where vLLM has what it takes, drafts can be loaded into it while it runs (see draft_weights.py). The engine's
process learns which by `EngineCore.set_weight_version`, which vLLM calls once all workers have loaded it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from driftguard.client import Client
from driftguard.records import PROBE_SEGMENT, RecordError
from driftguard_vllm import labels
from driftguard_vllm.captures import CaptureSender
from driftguard_vllm.request_counts import RequestCounts, Speculation
from driftguard_vllm.settings import BadEnvironment, PluginSettings

log = logging.getLogger("vllm.driftguard")  # vLLM prints what is below "vllm"

TESTED_VERSIONS: Final = ("0.32.0",)
SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
INPUT_PROCESSOR: Final = "vllm.v1.engine.input_processor:InputProcessor"
ENGINE_CORE: Final = "vllm.v1.engine.core:EngineCore"
TRANSFER_BACKENDS: Final = "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory"
BACKEND: Final = "driftguard"  # in vLLM's --weight-transfer-config
# Class -> method -> the parameters that a hook reads.
HOOKS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    SCHEDULER: {
        "make_spec_decoding_stats": (
            *("num_draft_tokens", "num_accepted_tokens", "num_invalid_spec_tokens", "request_id"),
        ),
        "_update_request_with_output": ("request",),
        "_free_request": ("request",),
        "shutdown": (),
    },
    INPUT_PROCESSOR: {"process_inputs": ("params",)},
}


class HookMissing(Exception):
    """This vLLM has no such method, or it takes other parameters; the message names it."""


def register() -> None:
    """vLLM calls this in each of its processes. Does nothing unless DRIFTGUARD_VLLM_SIDECAR is set."""
    try:
        settings = PluginSettings.of(os.environ)
        if settings is None:
            return
        version = str(import_module("vllm").__version__)
        install(settings)
    except (BadEnvironment, HookMissing, ImportError) as error:
        log.error("DriftGuard records nothing here: %s", error)
        return
    untested = "" if version in TESTED_VERSIONS else f"; tested with vLLM {', '.join(TESTED_VERSIONS)}"
    log.info("DriftGuard records the requests of vLLM %s for %s%s", version, settings.sidecar, untested)


def install(settings: PluginSettings) -> None:
    """Raises HookMissing before anything is changed."""
    classes = {path: _class_of(path) for path in HOOKS}
    for path, methods in HOOKS.items():
        for method, parameters in methods.items():
            _look_at(classes[path], method, parameters)
    recorder, switch = Recorder(settings), Switch()
    hooks: Mapping[str, Callable[..., None]] = {
        "make_spec_decoding_stats": recorder.step,
        "_update_request_with_output": recorder.tokens,
        "_free_request": recorder.ended,
        "shutdown": recorder.shut_down,
        "process_inputs": _label,
    }
    for path, methods in HOOKS.items():
        for method, parameters in methods.items():
            switch.observe(classes[path], method, parameters, hooks[method])
    try:
        _offer_live_update(recorder, switch)
    except HookMissing as error:
        log.info("drafts are loaded at start only: %s", error)


def _offer_live_update(recorder: Recorder, switch: Switch) -> None:
    """Raises HookMissing before anything is changed."""
    backends, core = _class_of(TRANSFER_BACKENDS), _class_of(ENGINE_CORE)
    _look_at(backends, "register_engine", ("name", "module_path_or_cls", "class_name"))
    _look_at(core, "set_weight_version", ("weight_version",))
    with suppress(ValueError):  # a plugin may be loaded more than once (vllm/plugins)
        backends.register_engine(BACKEND, "driftguard_vllm.draft_weights", "DraftLoader")
    switch.observe(core, "set_weight_version", ("weight_version",), recorder.loaded)


class Recorder:
    """Counts what the scheduler of this process does, and sends a record when a request ends."""

    def __init__(self, settings: PluginSettings) -> None:
        self._settings = settings
        self._counts: dict[str, RequestCounts] = {}
        self._speculation: Speculation | None = None
        self._loaded_version: str | None = None  # of a draft that was loaded since the start
        # Made by the process that uses them, when it does: each of vLLM's calls `register`.
        self._client: Client | None = None
        self._captures: CaptureSender | None = None

    def step(
        self, _: Any, drafted: int, accepted: int, invalid: Mapping[str, int] | None, request_id: str
    ) -> None:
        if drafted:
            drafted -= (invalid or {}).get(request_id, 0)
            self._of(request_id).add_step(drafted, accepted)

    def tokens(self, _: Any, request: Any) -> None:
        if request.num_output_tokens == 0:
            counts, prefill = self._of(request.request_id), getattr(request, "prefill_stats", None)
            counts.first_token_at = time.time()
            counts.cached_tokens = getattr(prefill, "num_cached_tokens", None)

    def loaded(self, core: Any, version: str) -> None:
        transfer = core.vllm_config.weight_transfer_config
        if transfer is not None and transfer.backend == BACKEND:  # another's version is the target's
            self._loaded_version = version

    def ended(self, scheduler: Any, request: Any) -> None:
        counts = self._counts.pop(request.request_id, None)
        sampling = request.sampling_params
        if counts is None or sampling is None or labels.of(sampling).get("segment") == PROBE_SEGMENT:
            return  # it never ran, makes no tokens, or is recorded by its sender
        if self._speculation is None:
            self._speculation = Speculation.of(scheduler.vllm_config, self._settings)
        if self._client is None:
            self._client = Client(self._settings.sidecar, api_key=self._settings.api_key)
        running, waiting = max(len(scheduler.running), 1), len(scheduler.waiting)
        server = self._settings.server
        try:
            record = counts.record(request, self._speculation, server, time.time(), running, waiting)
        except RecordError as error:
            log.warning("a request is not recorded, its numbers contradict each other: %s", error)
            self._client.count_unrecorded(server, "contradiction")
            return
        self._client.send(record)
        if record.output_tokens and random.random() < self._settings.capture_fraction:
            if self._captures is None:
                self._captures = CaptureSender(self._settings.sidecar, self._settings.api_key)
            self._captures.send(record, request.prompt_token_ids or (), request.output_token_ids)

    def shut_down(self, _: Any) -> None:
        if self._client is not None:
            self._client.close()
        if self._captures is not None:
            self._captures.close()

    def _of(self, request_id: str) -> RequestCounts:
        counts = self._counts.get(request_id)
        if counts is None:
            counts = self._counts[request_id] = RequestCounts(loaded_version=self._loaded_version)
        return counts


def _label(_: Any, params: Any) -> None:
    if hasattr(params, "extra_args"):
        labels.put_into(params)


def _class_of(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise HookMissing(f"vLLM has no {path} ({error})") from None


def _look_at(of: Any, method: str, parameters: Sequence[str]) -> None:
    function = getattr(of, method, None)
    if function is None:
        raise HookMissing(f"vLLM's {of.__name__} has no {method}")
    known = inspect.signature(function).parameters
    if missing := [name for name in parameters if name not in known]:
        raise HookMissing(f"{method} of vLLM's {of.__name__} has no parameter {', '.join(missing)}")


class Switch:
    """Off from the first error in a hook on: half of the hooks would count wrongly."""

    def __init__(self) -> None:
        self._is_on = True

    def observe(self, of: Any, method: str, parameters: Sequence[str], hook: Callable[..., None]) -> None:
        """The hook is called with `self` and these parameters, before the method. It is called for every
        request in every step, and so gets no more than these."""
        original = getattr(of, method)
        known = list(inspect.signature(original).parameters)
        places = [(name, known.index(name) - 1) for name in parameters]  # without self

        @functools.wraps(original)
        def observed(this: Any, *arguments: Any, **named: Any) -> Any:
            if self._is_on:
                try:
                    hook(this, *[named[name] if name in named else arguments[at] for name, at in places])
                except Exception:
                    self._is_on = False
                    log.exception("DriftGuard records nothing from here on; vLLM is not affected")
            return original(this, *arguments, **named)

        setattr(of, method, observed)
