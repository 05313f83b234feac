"""What could be done about a stream, as the API and the pages show it: a command or a button for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from driftguard.adapters.switching import post, setting_k, switching_off
from driftguard.cost import Interval
from driftguard.cost.best_action import Action, ActionKind, Basis
from driftguard.records.documents.diagnosis import for_server
from driftguard.retraining.engines.candidate_kind import retraining_elsewhere


@dataclass(frozen=True, slots=True)
class Place:
    """Where an action is taken. kind: of the serving engine, as its metrics tell; None where none are read.
    engine: the server is among the engines in the settings. admin_url: of a built-in engine there, without
    secrets; engine_key: it asks for a key. sidecar: the address under which people reach this sidecar;
    sidecar_key: which asks for a key there. has_torch: this sidecar has, so that it can retrain."""

    server: str
    draft_version: str
    kind: str | None = None
    engine: bool = False
    admin_url: str | None = None
    engine_key: bool = False
    sidecar: str = "http://127.0.0.1:8200"
    sidecar_key: bool = False
    has_torch: bool = True


class RequestModel(BaseModel):
    """What a button posts to the sidecar."""

    model_config = ConfigDict(frozen=True)

    path: str = Field(examples=["/api/v1/retrain"])
    body: Mapping[str, Any]


class ActionModel(BaseModel):
    """One thing that could be done, and what it gains against doing nothing."""

    model_config = ConfigDict(frozen=True)

    kind: ActionKind
    text: str = Field(examples=["switch speculation off"])
    gain: Interval | None = Field(
        description="Part of the tokens per second of the stream; null where it is not known."
    )
    basis: Basis = Field(
        description="measured: from the stream's own times and counts. predicted: of a K that was not timed. "
        "expected: of what a repair can give back. unknown: the reason says what is missing."
    )
    reason: str
    best: bool = Field(description="True for exactly one of them.")
    under_way: bool = Field(description="It is being done.")
    sentence: str = Field(examples=["switch speculation off: 34% faster (31% to 37%)"])
    command: str | None = Field(description="What to run or to change; null where there is nothing to do.")
    request: RequestModel | None = Field(
        description="What to post to the sidecar for it; null where the sidecar cannot do it."
    )

    @classmethod
    def all_of(cls, found: Sequence[Action], place: Place) -> list[ActionModel]:
        return [cls._of(action, place) for action in found]

    @classmethod
    def _of(cls, action: Action, place: Place) -> ActionModel:
        request = _request(action, place) if place.engine and not action.under_way else None
        return cls(
            kind=action.kind,
            text=action.text,
            gain=action.gain,
            basis=action.basis,
            reason=action.reason,
            best=action.best,
            under_way=action.under_way,
            sentence=action.sentence,
            command=_command(action, place, request),
            request=request,
        )


def _request(action: Action, place: Place) -> RequestModel | None:
    if action.kind == "retrain" and place.has_torch:
        return RequestModel(path="/api/v1/retrain", body={"server": place.server, "force": True})
    if action.kind == "roll_back" and action.draft_version is not None and not action.by_hand:
        body = {"server": place.server, "draft_version": place.draft_version}
        return RequestModel(path="/api/v1/rollback", body=body)
    return None


def _command(action: Action, place: Place, request: RequestModel | None) -> str | None:
    if action.kind == "speculation_off":
        return switching_off(place.server, place.kind, place.admin_url, with_key=place.engine_key)
    if action.kind == "another_k":
        k = action.num_speculative_tokens
        return setting_k(place.server, place.kind, k) if k is not None else None
    if action.kind == "restart":
        probe = for_server("driftguard probe run --server SERVER", place.server)
        return f"restart {place.server}, then replay the canary probes: {probe}"
    if action.kind == "nothing" or action.under_way:
        return None
    if action.kind == "roll_back" and action.draft_version is None:
        return None
    if action.by_hand:
        return f"start {place.server} with draft {action.draft_version} again"
    if action.kind == "retrain" and place.engine and not place.has_torch:
        return retraining_elsewhere(place.server, force=True)
    if request is None:
        return f"add {place.server} to [[engines]] in the settings first"
    body = dict(request.body) | ({"reason": "REASON"} if action.kind == "roll_back" else {})
    return post(f"{place.sidecar.rstrip('/')}{request.path}", body, with_key=place.sidecar_key)
