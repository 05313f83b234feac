"""The order to restart an engine with another draft, as a command or a webhook receives it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from uuid import UUID

from driftguard.retraining.engines.engine_admin import EngineRefused
from driftguard.settings import PREFIX


class PromotionStopped(EngineRefused):
    """Stopped on request before the order was accepted or refused."""

    title = "Promotion stopped"


@dataclass(frozen=True, slots=True)
class Order:
    """Serve draft `version`, whose files are in `path`, instead of `previous_version`."""

    action: Literal["promote", "roll_back"]
    run_id: UUID
    server: str
    target: str
    method: str
    draft_path: str | None
    draft_version: str
    previous_path: str | None
    previous_version: str
    asked_at: datetime

    @property
    def members(self) -> dict[str, str]:
        """By name, in lower case as in settings.ORDER_VARIABLES; an unknown path is left out."""
        stated = {
            "action": self.action,
            "run_id": str(self.run_id),
            "server": self.server,
            "target": self.target,
            "method": self.method,
            "draft_path": self.draft_path,
            "draft_version": self.draft_version,
            "previous_path": self.previous_path,
            "previous_version": self.previous_version,
        }
        return {name: value for name, value in stated.items() if value is not None}

    @property
    def environment(self) -> dict[str, str]:
        return {PREFIX + name.upper(): value for name, value in self.members.items()}

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt to deliver this order, and different for every other order."""
        return f"{self.run_id}:{self.action}:{self.asked_at.isoformat()}"


@dataclass(frozen=True, slots=True)
class Reply:
    """`output`: the end of what was printed or answered. `refusal`: one line; None where it was accepted."""

    output: str = ""
    refusal: str | None = None
