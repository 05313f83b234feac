"""An engine without an admin API: it takes a new draft live or by a restart, and records prove it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog
from sqlalchemy.orm import Session

from driftguard.retraining.engines import command, webhook
from driftguard.retraining.engines.engine_admin import EngineDraft, EngineInfo, EngineRefused
from driftguard.retraining.engines.live_update import LiveUpdate
from driftguard.retraining.engines.order import Order, Reply
from driftguard.retraining.engines.sglang_corpora import SglangCorpora
from driftguard.retraining.engines.sglang_update import SglangUpdate
from driftguard.retraining.engines.vllm_update import VllmUpdate
from driftguard.retraining.training.draft_files import is_here
from driftguard.settings import EngineSettings, RetrainingSettings
from driftguard.store import drafts, retrain_runs, source_activity
from driftguard.store.database import Database
from driftguard.store.tables import Stream

log = structlog.get_logger(__name__)


class RestartedEngine:
    """The counterpart of EngineAdmin where there is no admin API. `live`: None where it is not offered."""

    def __init__(
        self,
        database: Database,
        engine: EngineSettings,
        rules: RetrainingSettings,
        should_stop: Callable[[], bool],
    ) -> None:
        self._database = database
        self._engine = engine
        self.rules = rules
        self.live = live_update_of(engine, rules)
        self._should_stop = should_stop

    def info(self) -> EngineInfo:
        """What it serves according to its records: a draft that was ordered, from its first record on; else
        the stream in service (see driftguard.store.source_activity). Raises EngineRefused: there are no
        records."""
        with self._database.session() as session:
            stream = source_activity.stream_in_service(session, self._engine.server)
            if stream is None:
                raise EngineRefused(
                    f"no records of {self._engine.server} have arrived yet, so the draft that it serves is "
                    "unknown"
                )
            for run in retrain_runs.in_states(
                session, stream.server, stream.target, retrain_runs.ROLLING_STATES
            ):
                asked = retrain_runs.rollout_of(run)
                came = source_activity.stream_of_rollout(session, run.server, run.target, asked)
                stream = came or stream
            directory = self._engine.target_directory
            return EngineInfo(
                server=stream.server,
                target=stream.target,
                target_directory=None if directory is None else str(directory.expanduser()),
                draft=self._draft(session, stream),
                num_speculative_tokens=self._engine.num_speculative_tokens or 0,
            )

    def info_beside(self, before: EngineInfo) -> EngineInfo:
        """As `info`; what served `before` where it is heard on, because another target may be tried beside
        it. Raises EngineRefused."""
        now = self.info()
        with self._database.session() as session:
            newest = source_activity.newest_stream(session, before.server)
            if newest is None or newest.traffic_arrived_at is None or now.target == before.target:
                return now
            since = newest.traffic_arrived_at - source_activity.SILENCE
            heard = source_activity.stream_since(
                session, before.server, before.target, before.draft.version, since
            )
        return now if heard is None else before

    def tell(self, order: Order) -> Reply:
        """Runs the command or posts to the webhook, and waits for the answer. Raises PromotionStopped."""
        rules = self.rules
        if rules.promote_webhook is not None:
            reply = webhook.post(
                rules.promote_webhook,
                rules.promote_webhook_key,
                order,
                rules.promote_timeout_seconds,
                self._should_stop,
            )
        elif not rules.promote_command:
            reply = Reply(refusal="neither retraining.promote_command nor promote_webhook is set")
        else:
            reply = command.run(
                rules.promote_command, order, rules.promote_timeout_seconds, self._should_stop
            )
        tell = log.info if reply.refusal is None else log.error
        tell(
            "restart with another draft asked for",
            action=order.action,
            server=order.server,
            version=order.draft_version,
            refusal=reply.refusal,
            output=reply.output,
        )
        return reply

    def _draft(self, session: Session, stream: Stream) -> EngineDraft:
        """The draft with its directory: where it was trained, or the configured directory.

        A symbolic link is resolved once, when the draft is first seen: a promotion may point it to another
        draft. Later the settings count where that is gone, as after the models were moved.
        """
        known = drafts.find(session, stream.server, stream.target, stream.draft_version)
        directory = known.directory if known is not None else self._resolved()
        if known is not None and known.retrain_run_id is None and directory is not None:
            directory = self._moved(session, Path(directory)) or directory
        return EngineDraft(stream.draft, stream.draft_version, stream.method, directory)

    def _moved(self, session: Session, before: Path) -> str | None:
        """Where the draft is that was first served; None: where it was before, or not known."""
        now = self._resolved()
        if now is None or is_here(before) or not is_here(Path(now)):
            return None
        return None if drafts.is_of_run(session, now) else now

    def _resolved(self) -> str | None:
        configured = self._engine.draft_directory
        return None if configured is None else str(configured.expanduser().resolve())


def live_update_of(engine: EngineSettings, rules: RetrainingSettings) -> LiveUpdate | None:
    """None: of an engine without an update_url."""
    if engine.update_url is None:
        return None
    key = engine.api_key.get_secret_value() if engine.api_key else None
    if engine.update_engine == "sglang":
        return SglangUpdate(engine.update_url, key)
    if engine.update_engine == "sglang_ngram":
        return SglangCorpora(engine.update_url, key)
    return VllmUpdate(engine.update_url, key, rules.promote_timeout_seconds)
