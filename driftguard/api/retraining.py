"""Retraining runs: list, show one, start one, roll back its draft."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Protocol, cast
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, computed_field

from driftguard.api import openapi_examples
from driftguard.api.auth import require_key
from driftguard.api.context import Context, get_context
from driftguard.api.cursors import decode_cursor, encode_cursor
from driftguard.api.filters import RunQuery, refuse_repeated, row_filter, without_nul
from driftguard.api.openapi import example, problem
from driftguard.errors import Conflict, NotFound
from driftguard.records.documents.retraining_run import RunNumbers, TrainingCurve
from driftguard.retraining.engines.engine_admin import EngineRefused
from driftguard.retraining.promotion.rollback import roll_back
from driftguard.store import retrain_runs
from driftguard.store.retrain_runs import Cursor, RunState

router = APIRouter(prefix="/api/v1", tags=["retraining"])
AnyContext = Annotated[Context, Depends(get_context)]


class RequestRetraining(Protocol):
    """RetrainingJobs.request with its app: `app.state.request_retraining`, set by the composition root."""

    def __call__(self, server: str | None, *, force: bool) -> int: ...


class RetrainBody(BaseModel):
    """What to retrain."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"example": {"server": "chat-eu-1", "force": True}}
    )
    server: str | None = Field(None, description="May be left out when the settings name one engine.")
    force: bool = Field(False, description="Retrain even if no incident calls for it.")


class RollBackBody(BaseModel):
    """Which draft to roll back, and why."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "server": "chat-eu-1",
                "draft_version": "3f9c01d2ab44",
                "reason": "answers loop since the promotion",
            }
        },
    )
    server: str
    draft_version: str = Field(description="The draft in service; 409 if another one is in service by now.")
    reason: Annotated[
        str,
        StringConstraints(strip_whitespace=True, min_length=1, max_length=2_000),
        AfterValidator(without_nul),  # else the engine would switch, and the database refuse to follow
    ]


class RolledBackModel(BaseModel):
    server: str
    draft_version: str = Field(
        description="The draft that is served now; for an engine that restarts for it, the draft of the "
        "restart: "
        "the run is rolling_back until records of it arrive."
    )
    awaited: bool = Field(
        False, description="The engine was told to serve it, and no record of it has arrived yet."
    )


class JobModel(BaseModel):
    job_id: int = Field(description="The queued job; its run appears under /api/v1/retrain-runs.")


class RunModel(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)

    id: UUID
    server: str
    target: str
    incident_id: UUID | None
    trigger: str
    state: RunState = Field(
        description="watching: promoted, and compared with what the old draft did. rolling_out, "
        "rolling_back: a restart was asked for, and records of that draft are awaited."
    )
    reason: str | None
    started_at: datetime
    ended_at: datetime | None
    parent_version: str | None
    candidate_version: str | None
    progress: dict[str, Any] | None = Field(
        description="step, steps and loss of the training; acceptance: part of single draft tokens that the "
        "target keeps, of the requests that are trained on."
    )
    numbers: RunNumbers | None = Field(
        description="The gate's decision and the watch, with their numbers; `rollout`: the live update or "
        "the restart that was asked for, and the end of what the command printed or the webhook answered."
    )

    @computed_field(  # type: ignore[prop-decorator]
        description="What the watch over the promoted draft has shown. watching: nothing yet. undecided: it "
        "ended before it had shown anything, by a person or with its draft. Null: not watched."
    )
    @property
    def watch_outcome(self) -> Literal["watching", "worse", "stands", "undecided"] | None:
        watch = self.numbers.watch if self.numbers is not None else None
        if watch is None:
            return None
        return "undecided" if watch.verdict == "watching" != self.state else watch.verdict


class RunDetail(RunModel):
    curve: TrainingCurve | None = Field(
        description="What the training reported: `training` of what is trained on, `held_out` of captured "
        "requests that are not, each thinned to at most 256 points. Null: nothing was trained, or not yet, "
        "or by an earlier version."
    )


class RunPage(BaseModel):
    runs: list[RunModel]
    next_cursor: str | None = Field(description="Pass as `cursor` for the next page; null at the end.")


@router.get("/retrain-runs", dependencies=[Depends(refuse_repeated)], responses=example("retrain_runs"))
def list_retrain_runs(query: Annotated[RunQuery, Query()], context: AnyContext) -> RunPage:
    """Lists retraining runs, newest first. By the time at which they started."""
    after = decode_cursor(query.cursor, Cursor) if query.cursor else None
    with context.database.session() as session:
        rows = retrain_runs.list_page(
            session, limit=query.limit + 1, cursor=after, state=query.state, wanted=row_filter(query)
        )
    shown = rows[: query.limit]
    more = encode_cursor((shown[-1].started_at, shown[-1].id)) if len(rows) > query.limit else None
    return RunPage(runs=[RunModel.model_validate(row) for row in shown], next_cursor=more)


@router.get(
    "/retrain-runs/{run_id}",
    responses=example("retrain_run")
    | problem(NotFound, f"there is no retraining run {openapi_examples.RUN['id']}"),
)
def get_retrain_run(run_id: UUID, context: AnyContext) -> RunDetail:
    """Shows one retraining run, with the curve of its training."""
    with context.database.session() as session:
        run = retrain_runs.find(session, run_id)
        curve = retrain_runs.curve_of(session, run_id)
    if run is None:
        raise NotFound(f"there is no retraining run {run_id}")
    return RunDetail(**dict(RunModel.model_validate(run)), curve=curve)


@router.post(
    "/retrain",
    status_code=202,
    dependencies=[Depends(require_key)],
    responses=example("job", status=202) | problem(Conflict, "a retraining of chat-eu-1 is queued already"),
)
def retrain(body: RetrainBody, request: Request) -> JobModel:
    """Queues a retraining. 409 while one for this server runs or is queued, and where the sidecar has no
    torch: `detail` has the command to run where it is."""
    ask = cast("RequestRetraining", request.app.state.request_retraining)
    return JobModel(job_id=ask(body.server, force=body.force))


@router.post(
    "/rollback",
    dependencies=[Depends(require_key)],
    responses=example("rolled_back")
    | problem(Conflict, "draft 3f9c01d2ab44 was not promoted here: there is no draft to return to")
    | problem(EngineRefused, "the engine at http://127.0.0.1:8100 cannot be reached: connection refused"),
)
def roll_back_draft(body: RollBackBody, context: AnyContext) -> RolledBackModel:
    """Puts the parent of the draft in service back into service.

    A parent that was found worse itself is passed over.

    409: a retraining runs, another draft is in service, or there is no parent. 502: the engine, or
    what restarts it (`retraining.promote_command`, `promote_webhook`), refuses or does not answer;
    where `detail` says that the engine may have acted, the sidecar does the rest once it answers.
    """
    serving = roll_back(
        context.database,
        context.settings,
        server=body.server,
        draft_version=body.draft_version,
        reason=body.reason,
    )
    tells_at_once = any(
        engine.server == body.server and engine.admin_url is not None for engine in context.settings.engines
    )
    return RolledBackModel(server=body.server, draft_version=serving.version, awaited=not tells_at_once)
