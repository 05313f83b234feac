"""What is asked for where a restart puts a draft into service, in the forms that are sent out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from uuid import UUID

from driftguard.retraining.engines.engine_admin import EngineRefused
from driftguard.settings import PREFIX


class PromotionStopped(EngineRefused):
    """Stopped on request before it was known whether the restart is under way."""

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
        """By name, as settings.ORDER_VARIABLES has them in capitals; a path that is not known is left out."""
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
        """The same for every attempt to deliver this order, another one for any other."""
        return f"{self.run_id}:{self.action}:{self.asked_at.isoformat()}"


@dataclass(frozen=True, slots=True)
class Reply:
    """`output`: the end of what was printed or answered. `refusal`: one line; None where it was accepted."""

    output: str
    refusal: str | None = None
