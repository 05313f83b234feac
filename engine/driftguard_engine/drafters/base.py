"""The interface of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.steps import DraftContext, RowState
from driftguard_engine.kv_cache import Span
from driftguard_engine.speculation import Verification


class Drafter(Protocol):
    """Guesses the next tokens of running sequences."""

    @property
    def context(self) -> DraftContext | None:
        """What a draft model can read: `steps.begin` then makes its inputs. None: there is no model."""
        ...

    @property
    def captured(self) -> bool:
        """Whether `draft` by kernels waits for no value of the device, so that it can be captured."""
        ...

    @property
    def obstacle(self) -> str | None:
        """Why it is slower on a GPU than it could be."""
        ...

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span]) -> None:
        """Reads tokens of prompts (not each prompt's last one), and what was decoded without it, as
        `TokenModel.prefill`."""
        ...

    def copy(self, source: int, span: Span) -> None:
        """As `TokenModel.copy`."""
        ...

    def draft(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        """Puts rows.drafted tokens of each row into the verification, and feeds them by `steps.feed`, which
        lowers rows.drafted where there are fewer. launcher: None: on the CPU."""
        ...
