"""The server that is probed, through its OpenAI-compatible API: greedy, seeded, one request at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import httpx
import msgspec

from driftguard.adapters.answers.engines import ASKED_FIELDS, Engine, engine_owning, owner_of
from driftguard.masking import Secrets, address, secrets_of_url
from driftguard.probes.answers import Answer, ProbeFailed, ProbeRefused, detail_of, parse_answer
from driftguard.probes.prompts import Prompt
from driftguard.records import PROBE_SEGMENT, UNREADABLE_JSON
from driftguard.settings import ProbeTargetSettings

SEED: Final = 0
NOT_FOUND: Final = (404, 405)
UNAUTHORISED: Final = (401, 403)
REFUSING: Final = (400, 404, 405, 413, 422, 501)  # this request, whenever it is sent


@dataclass(frozen=True, slots=True)
class Serving:
    """The models that the built-in engine serves, by its own answer."""

    target: str
    draft: str
    draft_version: str
    method: str


class _Draft(msgspec.Struct, frozen=True):
    name: str
    version: str
    method: str


class _Info(msgspec.Struct, frozen=True):
    server: str
    target: str
    draft: _Draft


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


Kind = TypeVar("Kind", _Info, _Models)


class ProbedServer:
    """Every method raises ProbeFailed, in one line that names the address. A context manager."""

    def __init__(
        self,
        target: ProbeTargetSettings,
        *,
        max_tokens: int,
        timeout_seconds: float,
        on_ask: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_ask`: called right before a prompt is sent."""
        self._base = target.url.rstrip("/").removesuffix("/v1")
        self.url = address(self._base)  # as messages name it
        self._name = target.server
        self._model = target.model
        self._engine: Engine = "unknown" if target.engine == "auto" else target.engine
        self._max_tokens = max_tokens
        self._on_ask = on_ask
        key = target.api_key.get_secret_value() if target.api_key else None
        self._secrets = Secrets([*secrets_of_url(target.url), key or ""])
        headers = {"X-DriftGuard-Segment": PROBE_SEGMENT}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx.Client(headers=headers, timeout=timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def ask(self, prompt: Prompt) -> Answer:
        """One greedy answer; the request asks for counts of speculation if the engine needs that."""
        engine = self._identified()
        path = "/v1/chat/completions" if prompt.is_chat else "/v1/completions"
        body = {
            "model": self._model_name(),
            "temperature": 0,
            "seed": SEED,
            "max_tokens": self._max_tokens,
            **prompt.body,
        }
        if (field := ASKED_FIELDS.get(engine)) is not None:
            body[field] = True
        self._on_ask()
        return parse_answer(self._checked(path, self._call("POST", path, body)), self.url, engine)

    def require_known_engine(self) -> None:
        """Raises ProbeFailed too where no list of models is served, or that of a server whose answers are not
        known to tell counts."""
        answer = self._call("GET", "/v1/models")
        if answer.status_code in NOT_FOUND:
            raise ProbeFailed(
                f"{self.url} serves no OpenAI-compatible API (/v1/models is answered with "
                f"{answer.status_code}), so it is not probed; if another address does, name it in "
                "[[probes.targets]]"
            )
        owner = owner_of(self._checked("/v1/models", answer))
        if self._engine == "unknown":
            self._engine = engine_owning(owner)
        if self._engine == "other":
            raise ProbeFailed(
                f"{self.url} is no engine whose answers are known to tell counts of speculation (its models "
                f"are owned by {owner!r}), so it is not probed; if they do, name it in [[probes.targets]]"
            )

    def serving(self) -> Serving | None:
        """None for any other server than the built-in engine: only that one gives its draft's version."""
        answer = self._call("GET", "/admin/info")
        if answer.status_code in NOT_FOUND:
            return None
        info = self._decode(self._checked("/admin/info", answer), _Info)
        if info.server != self._name:
            raise ProbeFailed(
                f"{self.url} has the server name {info.server!r}, not {self._name!r}; use that name"
            )
        return Serving(info.target, info.draft.name, info.draft.version, info.draft.method)

    def _identified(self) -> Engine:
        """Asked once. A server without a list of models, which its settings then name, is "other"."""
        if self._engine == "unknown":
            answer = self._call("GET", "/v1/models")
            content = self._checked("/v1/models", answer) if answer.is_server_error else answer.content
            self._engine = engine_owning(owner_of(content))
        return self._engine

    def _model_name(self) -> str:
        if self._model is None:
            found = self._decode(self._checked("/v1/models", self._call("GET", "/v1/models")), _Models)
            if not found.data:
                raise ProbeFailed(f"{self.url} lists no models; name one as probes.targets.model")
            self._model = found.data[0].id
        return self._model

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return self._client.request(method, self._base + path, json=body)
        except httpx.TimeoutException:
            raise ProbeFailed(f"{self.url}: no answer to {path} in time (probes.timeout_seconds)") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProbeFailed(self._secrets.masked(f"{self.url} cannot be reached: {error}")) from None

    def _checked(self, path: str, answer: httpx.Response) -> bytes:
        if not answer.is_success:
            detail = self._secrets.masked(detail_of(answer.content))
            told = f"{self.url} answered {path} with {answer.status_code}: {detail}"
            if answer.status_code in UNAUTHORISED:
                told += "; give its key as api_key in [[probes.targets]]"
            raise (ProbeRefused if answer.status_code in REFUSING else ProbeFailed)(told)
        return answer.content

    def _decode(self, content: bytes, kind: type[Kind]) -> Kind:
        try:
            return msgspec.json.decode(content, type=kind)
        except UNREADABLE_JSON as error:
            raise ProbeFailed(
                f"{self.url}: not the answer of an OpenAI-compatible server ({error})"
            ) from None
