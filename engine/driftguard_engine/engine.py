"""The engine: one step schedules, drafts, verifies and commits for every running request."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from driftguard_engine.adaptive_k.controller import DraftLengthController
from driftguard_engine.adaptive_k.plan import DraftingRow, FixedK, Given
from driftguard_engine.adaptive_k.policy import AdaptiveK
from driftguard_engine.config import EngineConfig, InvalidConfig
from driftguard_engine.core import (
    DraftInfo,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    InvalidModel,
    InvalidRequest,
    Request,
    RequestOutput,
    VerificationRule,
)
from driftguard_engine.decode.decoder import RowOutcome
from driftguard_engine.decode.placement import open_decoder, placement_of, slower_because
from driftguard_engine.decode.turns import Turns
from driftguard_engine.drafters.ahead import AheadCounts, AheadDrafter
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.drafters.factory import (
    WITH_WEIGHTS,
    DraftLoader,
    configured_draft,
)
from driftguard_engine.drafters.loaded import NO_DRAFT, Drafts, LoadedDraft
from driftguard_engine.drafters.past_outputs import PastOutputs
from driftguard_engine.drafters.state_file import SavedDraft, check_writable, save_draft
from driftguard_engine.kernels.backend import backend_of
from driftguard_engine.kv_cache import Span
from driftguard_engine.models import device_memory
from driftguard_engine.models.base import Features
from driftguard_engine.models.loading import LoadedModel, load
from driftguard_engine.prefix_cache import blocks_of
from driftguard_engine.request_checks import check_params, check_prompt
from driftguard_engine.scheduler import PrefillChunk, ReusedPrefix, Scheduler
from driftguard_engine.sequence import Moment, RunningSequence

logger = logging.getLogger(__name__)

_PREPARING_SHARE = 0.2  # of the time of running requests that goes to preparing a draft

_OFF = LoadedDraft(NO_DRAFT, None)


class Engine:
    """Continuous batching with exact speculative decoding.

    `step` belongs to one thread; everything else may be called from any thread. On the CPU the output of a
    request with a seed is the same, bit for bit, whatever runs beside it. With config.adaptive_k and a
    temperature above 0 only its distribution is the same, not the tokens drawn; so with
    config.suffix_past_tokens.

    A request keeps the draft that is in service when it gets its slot, and its K unless K is adaptive.
    """

    def __init__(
        self, config: EngineConfig, target: LoadedModel | None = None, draft: LoadedDraft | None = None
    ) -> None:
        """target, draft: loaded before, with `placement_of(config)`; None: loaded here, as config says.

        Raises InvalidModel, InvalidConfig.
        """
        self._started_at = time.monotonic()
        self.config = config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if config.device == "cuda" and not torch.cuda.is_available():
            raise InvalidConfig("device: 'cuda' was asked for, but torch sees no CUDA device")
        if config.device == "cuda":
            # cuDNN makes a plan for each new length of a sequence, which takes tens of milliseconds or more.
            torch.backends.cuda.enable_cudnn_sdp(False)
        if config.state_dir is not None:
            check_writable(config.state_dir)  # now, and not when the first draft is promoted
        self._placement = placement_of(config)
        if target is None:
            wanted = [("target", config.target)]
            if config.drafter in WITH_WEIGHTS and config.draft is not None:
                wanted.append(("draft", config.draft))
            elif config.drafter == "mtp":
                wanted.append(("mtp", config.target))
            free = device_memory.free_bytes(self._placement.device)
            device_memory.check_fits(config, self._placement, free, wanted)
        self._target = target or load(config.target, self._placement, field="target")
        self.tokenizer = self._target.tokenizer
        self.target_name = self._target.name
        self.target_directory = str(self._target.directory)
        self.max_length = self._target.model.max_length
        self._past = PastOutputs(config.suffix_past_tokens) if config.suffix_past_tokens else None
        self._loader = DraftLoader(config, self._target, self._placement, self._past)
        plain = self._loader.without_files()
        first, self.activated = (draft, False) if draft is not None else self._loader.first(plain)
        self._drafts = Drafts(first)
        self._first_draft = self._drafts.serving.version
        self.given_up: str | None = None  # the version that was in service before, and may end this engine
        self._decoder = open_decoder(
            config, self._target.model, self._target.eos_token_ids, self._drafts.drafter
        )
        self._say_if_slow(self._drafts.drafter)
        self._scheduler = Scheduler(config.max_batch, config.prefill_chunk_tokens)
        self._scheduler.kept.by_state = self._target.model.recurrent
        policy = AdaptiveK(config.max_speculative_tokens) if config.adaptive_k else FixedK()
        self.drafting = DraftLengthController(policy)
        self._sequences: dict[str, RunningSequence] = {}
        self._queued: dict[str, tuple[Request, Moment]] = {}
        self._speculation = config.speculation
        self.lost: str | None = None  # why this process can no longer use the device; None: it can
        self._turns = Turns()  # of steps, and of what must not run beside one
        self._loading, self._swapping = threading.Lock(), threading.Lock()
        self._no_more_drafts, self._has_failed = threading.Event(), False
        self._changed = threading.Condition()  # guards the next three fields
        self._inbox: deque[tuple[Request, Moment]] = deque()
        self._known: set[str] = set()
        self._aborts: set[str] = set()
        if plain is not None and not self._drafts.present(plain.info):
            self._prepare(plain.drafter)
            self._drafts.add(plain)

    def load_draft(self, directory: str, version: str | None = None) -> DraftInfo:
        """Loads a draft, not yet in service, and prepares its steps while requests run.

        Where its version is loaded already, that one stays; of others that have never served the oldest are
        freed. One at a time: a second call waits. Raises InvalidModel; after `stop_loading`
        EngineUnavailable, or EngineError where the engine has failed.
        """
        with self._loading:
            self._check_loads()
            serving = self._drafts.in_service
            wanted = self._loader.describe(directory, version, serving.info)
            present = self._drafts.present(wanted.info)
            if present is not None:
                return present
            self._drafts.check_files(wanted.info, wanted.own_version)
            with self._swapping:
                self._drafts.make_room()
            if wanted.info.method in WITH_WEIGHTS and not self._loader.shares(wanted, serving):
                self._check_fits(directory)
            try:
                draft = self._loader.open(wanted, serving)
                self._prepare(draft.drafter)
            except torch.OutOfMemoryError as error:
                raise InvalidModel(
                    f"draft: {directory} does not fit into the device's memory beside what serves ({error})",
                    field="draft",
                ) from error
            return self._drafts.add(draft)

    def _check_fits(self, directory: str) -> None:
        """Raises InvalidModel."""
        with self._turns.turn():
            free = device_memory.free_bytes(self._placement.device)
        models = {draft.directory for draft in self.drafts if draft.method in WITH_WEIGHTS}
        held = [("draft", directory) for directory in models if directory is not None]
        held.append(("target", self.target_directory))
        device_memory.check_fits(self.config, self._placement, free, [("draft", directory)], held)

    def stop_loading(self, *, failed: bool = False) -> None:
        """The draft that is being loaded is given up, soon, and no other is loaded. `failed`: the engine has,
        for which that draft may be the reason."""
        self._has_failed = self._has_failed or failed
        self._no_more_drafts.set()

    def _check_loads(self) -> None:
        if self._no_more_drafts.is_set():
            if self._has_failed:
                raise EngineError("draft: not loaded, because the engine has failed")
            raise EngineUnavailable("draft: not loaded, because the engine stops")

    def _prepare(self, drafter: Drafter | None) -> None:
        """Makes the draft's steps: one between two steps of running requests, and then none for a while.

        On CUDA each is captured in a graph: by the caller's thread, but never beside a step. During a
        capture torch's allocator cannot give cached memory back, so that a step that needs memory would fail,
        and the device be taken for lost.
        """
        self._say_if_slow(drafter)
        for shape in self._decoder.shapes(drafter):
            self._check_loads()
            with self._turns.turn():
                began = time.monotonic()
                self._decoder.prepare(drafter, shape)
                self.drafting.interrupted()
                seconds = time.monotonic() - began
            if self.has_work():
                self._no_more_drafts.wait(seconds * (1 / _PREPARING_SHARE - 1))

    def _say_if_slow(self, drafter: Drafter | None) -> None:
        slow = slower_because(self._placement.device, self._target.model, drafter)
        if slow is not None:
            logger.error("steps are slower than they could be: %s", slow)

    def swap_draft(self, version: str) -> DraftInfo:
        """Puts a loaded draft into service for requests that start from now on.

        The draft is first saved in config.state_dir, so that it also serves after a restart. Raises
        UnknownDraft, and EngineError where it cannot be saved.
        """
        with self._swapping:  # so that the draft saved last is the one that serves
            info = self._drafts.find(version)
            if self.config.state_dir is not None:
                own, configured = self._drafts.own_version(version), configured_draft(self.config)
                saved = SavedDraft(configured, info.directory, version, info.corpus, own)
                try:
                    save_draft(self.config.state_dir, saved)
                except OSError as error:
                    raise EngineError(
                        f"draft {version} is not in service: {self.config.state_dir} cannot be written to "
                        f"({error})"
                    ) from error
            elif version != self._first_draft:
                logger.warning("draft %s serves until this engine ends: --state-dir would keep it", version)
            self.activated = True
            return self._drafts.swap(version)

    def set_speculation(self, enabled: bool) -> None:
        """Switches speculation for requests that start from now on; running ones stay as they are."""
        self._speculation = enabled

    @property
    def speculation(self) -> bool:
        return self._speculation

    @property
    def verification(self) -> VerificationRule:
        """The rule by which requests that start from now on are verified."""
        return self._rule_of(self._drafts.in_service)

    def _rule_of(self, draft: LoadedDraft) -> VerificationRule:
        return "tree" if draft.drafter is not None and draft.drafter.trees else self.config.verification

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def draft(self) -> DraftInfo:
        """The draft in service for new requests."""
        return self._drafts.serving

    @property
    def drafts(self) -> list[DraftInfo]:
        return self._drafts.loaded

    def submit(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequest, EngineBusy."""
        self.submit_all([request])

    def submit_all(self, requests: Sequence[Request]) -> None:
        """Queues all of them or none. Raises InvalidRequest, EngineBusy."""
        prompts = {id(request.prompt_token_ids): request.prompt_token_ids for request in requests}
        for prompt in prompts.values():  # choices share one
            check_prompt(prompt, max_length=self.max_length, vocabulary=self._target.model.vocabulary)
        for request in requests:
            check_params(request.params, self.config.max_speculative_tokens)
        most = self.config.max_batch + self.config.max_waiting
        if len(requests) > most:  # "try again later" would be answered for ever
            raise InvalidRequest(
                f"{len(requests)} sequences at once; this server takes at most {most} (--max-batch and "
                "--max-waiting together): send fewer prompts or choices in one request"
            )
        with self._changed:
            for request in requests:
                if request.request_id in self._known:
                    raise InvalidRequest(
                        f"request_id: {request.request_id!r} is already in the engine", field="request_id"
                    )
            if len(self._known) + len(requests) > most:
                raise EngineBusy(
                    f"the queue is full ({self.config.max_waiting} requests wait); try again later"
                )
            now = _now()
            self._known.update(request.request_id for request in requests)
            self._inbox.extend((request, now) for request in requests)
            self._changed.notify_all()

    def try_alone(self, request: Request) -> None:
        """Lets a request run next, when the running ones have ended, and nothing beside it.

        Its outcome tells of the engine, and not of other requests. Of the thread that steps; one at a time.
        """
        with self._changed:
            self._known.add(request.request_id)
        self._queued[request.request_id] = (request, _now())
        self._scheduler.enqueue_alone(request.request_id, len(request.prompt_token_ids) - 1)

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step with finish_reason "abort"; an unknown id is ignored."""
        with self._changed:
            if request_id in self._known:
                self._aborts.add(request_id)
                self._changed.notify_all()

    def has_work(self) -> bool:
        with self._changed:
            return bool(self._known)

    def wait_for_work(self, timeout_seconds: float) -> bool:
        """Blocks until there is work or the time is over; returns has_work()."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._known), timeout_seconds)

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting + len(self._inbox)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the running requests, prompt and output, that the KV cache serves."""
        running = list(self._sequences.values())  # a copy: the engine's thread goes on
        return sum(len(sequence.token_ids) for sequence in running)

    @property
    def loop_fallback(self) -> str | None:
        """Why steps with the draft in service are slower on a GPU than they could be."""
        slow = slower_because(self._placement.device, self._target.model, self._drafts.drafter)
        return self._decoder.capture_failure or slow

    @property
    def ahead(self) -> AheadCounts | None:
        """What drafting ahead gave; None where the draft in service is not drafted with ahead."""
        drafter = self._drafts.drafter
        return drafter.counts if isinstance(drafter, AheadDrafter) else None

    @property
    def backend(self) -> str:
        """The verify backend in use: reference or cuda."""
        return backend_of(self._placement.device).name

    @property
    def backend_fallback(self) -> str | None:
        """Why the reference verifies on a device that the CUDA kernels are meant for."""
        return backend_of(self._placement.device).fallback

    def step(self) -> list[RequestOutput]:
        """Advances every running request by one verification; [] when idle. One thread only.

        A failure inside ends the running requests with finish_reason "error" and its reason; waiting ones
        are served next.
        """
        with self._turns.turn():
            return self._step()

    def _step(self) -> list[RequestOutput]:
        outputs = self._take_inbox()
        admitted = self._admit()
        schedule = self._scheduler.plan()
        try:
            for sequence in admitted:
                self._decoder.admit(sequence)
            for reused in schedule.reused:
                self._reuse(reused)
            if schedule.prefill:
                self._prefill(schedule.prefill)
            if schedule.decode or self._decoder.in_flight:
                rows = [self._sequences[name] for name in schedule.decode]
                counts = self._draft_counts(rows, alone=not schedule.prefill)
                outcomes = self._decoder.step(rows, counts)  # drafts and verifies, see `decode.step.Step.run`
                self._commit(outcomes, outputs)
        except Exception as error:  # every failure is handled here, so that no request hangs
            logger.exception("a step failed; %d running requests end with an error", len(self._sequences))
            reason = f"{type(error).__name__}: {error}"
            outputs.extend(self._fail(sequence, reason) for sequence in list(self._sequences.values()))
            self._decoder.reset()
            self.drafting.reset()
            if self._placement.device.type == "cuda":
                self.lost = lost_device(self._placement.device)
        return outputs

    def _take_inbox(self) -> list[RequestOutput]:
        with self._changed:
            arrived, self._inbox = self._inbox, deque()
            aborts, self._aborts = self._aborts, set()
        for request, moment in arrived:
            self._queued[request.request_id] = (request, moment)
            prompt, chunk = request.prompt_token_ids, self.config.prefill_chunk_tokens
            blocks = blocks_of(prompt, chunk) if self.config.prefix_reuse else ()
            self._scheduler.enqueue(request.request_id, len(prompt) - 1, blocks)
        return [self._abort(request_id) for request_id in sorted(aborts) if self._holds(request_id)]

    def _holds(self, request_id: str) -> bool:
        return request_id in self._sequences or request_id in self._queued

    def _abort(self, request_id: str) -> RequestOutput:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            # It never ran: a sequence without a slot stands for it, with the draft that it would have now.
            request, moment = self._queued.pop(request_id)
            draft = self._drafts.in_service if self._speculates(request) else _OFF
            sequence = self._sequence(request, moment, slot=-1, draft=draft)
        output = sequence.end("abort", _now())
        self._leave(sequence)
        return output

    def _admit(self) -> list[RunningSequence]:
        """Those that got a slot."""
        admitted = []
        for admission in self._scheduler.admit():
            request, moment = self._queued.pop(admission.request_id)
            draft = self._drafts.acquire() if self._speculates(request) else _OFF
            sequence = self._sequence(request, moment, admission.slot, draft)
            self._sequences[request.request_id] = sequence
            self._scheduler.begin(request.request_id, None if draft.drafter is None else draft.prefixes)
            admitted.append(sequence)
        return admitted

    def _speculates(self, request: Request) -> bool:
        return self._speculation and request.params.num_speculative_tokens != 0

    def _sequence(self, request: Request, moment: Moment, slot: int, draft: LoadedDraft) -> RunningSequence:
        wanted = request.params.num_speculative_tokens
        count = self.config.num_speculative_tokens if wanted is None else wanted
        return RunningSequence(
            request=request,
            slot=slot,
            draft=draft,
            num_speculative_tokens=0 if draft.drafter is None else count,
            max_length=self.max_length,
            eos_token_ids=self._target.eos_token_ids,
            tokenizer=self.tokenizer,
            arrived=moment,
            adaptive_k=self.config.adaptive_k,
            verification=self._rule_of(draft),
        )

    def _leave(self, sequence: RunningSequence) -> None:
        request_id = sequence.request.request_id
        if self._past is not None:
            params = sequence.request.params
            output = sequence.token_ids[len(sequence.request.prompt_token_ids) :]
            self._past.add(output, params.seed if params.temperature > 0 else None)
        self._scheduler.remove(request_id)
        if self._sequences.pop(request_id, None) is not None:
            self._decoder.forget(sequence)
            if sequence.draft is not _OFF:
                self._drafts.release(sequence.draft)
        with self._changed:
            self._known.discard(request_id)
            self._aborts.discard(request_id)

    def _fail(self, sequence: RunningSequence, reason: str) -> RequestOutput:
        output = sequence.end("error", _now(), reason)
        self._leave(sequence)
        for cache in (self._scheduler.kept, sequence.draft.prefixes):
            cache.clear()  # the failed step may have written only a part, or wrong values
        return output

    def _reuse(self, reused: ReusedPrefix) -> None:
        sequence = self._sequences[reused.request_id]
        sequence.reused_prompt_tokens += reused.count
        if reused.source == sequence.slot:
            return
        span = Span(sequence.slot, reused.start, reused.count)
        self._target.model.copy(reused.source, span)
        if sequence.draft.drafter is not None:
            sequence.draft.drafter.copy(reused.source, span)

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        token_ids: list[int] = []
        spans: list[Span] = []
        by_drafter: dict[Drafter, tuple[list[int], list[Span]]] = {}  # places in token_ids, and spans
        for chunk in chunks:
            sequence = self._sequences[chunk.request_id]
            span = Span(sequence.slot, chunk.start, chunk.count)
            if sequence.draft.drafter is not None:
                places, drafter_spans = by_drafter.setdefault(sequence.draft.drafter, ([], []))
                places.extend(range(len(token_ids), len(token_ids) + chunk.count))
                drafter_spans.append(span)
            token_ids.extend(sequence.token_ids[chunk.start : chunk.start + chunk.count])
            spans.append(span)
        layers = {layer for drafter in by_drafter for layer in drafter.features}
        features = Features(layers) if layers else None
        self._target.model.prefill(token_ids, spans, features)
        for drafter, (places, drafter_spans) in by_drafter.items():
            read = None
            if features is not None and drafter.features:
                read = features.of(drafter.features)[places]
            drafter.prefill([token_ids[place] for place in places], drafter_spans, read)
        for chunk in chunks:
            if chunk.is_block:
                sequence = self._sequences[chunk.request_id]
                self._target.model.share(sequence.slot)
                if sequence.draft.drafter is not None:
                    sequence.draft.drafter.share(sequence.slot)

    def _draft_counts(self, rows: list[RunningSequence], *, alone: bool) -> Sequence[int]:
        """alone: the step does nothing but decode, so its duration is that of decoding."""
        asked = [DraftingRow(row.request.request_id, row.draft.info.version, row.draft_count) for row in rows]
        return self.drafting.begin(asked, alone=alone).counts

    def _commit(
        self, outcomes: list[tuple[RunningSequence, RowOutcome]], outputs: list[RequestOutput]
    ) -> None:
        """Appends to outputs row by row, so that a failure does not lose the tokens of other rows."""
        now = _now()
        given = {row.request.request_id: Given(row.draft_count, each.accepted) for row, each in outcomes}
        for row, outcome in outcomes:
            if outcome.error is not None:
                logger.error("request %s ends with an error: %s", row.request.request_id, outcome.error)
                outputs.append(self._fail(row, outcome.error))
                continue
            try:
                output = row.commit(outcome.emitted, outcome.drafted, outcome.accepted, len(outcomes), now)
            except Exception as error:  # as of the tokenizer at its tokens; the other rows are none the worse
                logger.exception("request %s ends with an error", row.request.request_id)
                outputs.append(self._fail(row, f"{type(error).__name__}: {error}"))
                continue
            outputs.append(output)
            if output.finished is not None:
                self._leave(row)
        self.drafting.end(given, in_flight=self._decoder.in_flight)


def lost_device(device: torch.device) -> str | None:
    """Why a CUDA device no longer works at all; None where it does."""
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return str(error)
    return None


def _now() -> Moment:
    return Moment(datetime.now(UTC), time.monotonic())
