"""Drafting by Speculative Streaming (Bhendawade et al. 2024)."""

from __future__ import annotations

from driftguard_engine.drafters.medusa import MedusaDrafter
from driftguard_engine.models.streaming import StreamingModel


class StreamingDrafter(MedusaDrafter):
    """See `Drafter`. As Medusa heads do, each stream guesses the token of one place from what the target read
    last, and the likeliest make a tree of fixed shape: no guess depends on a draw."""

    def __init__(self, model: StreamingModel) -> None:
        super().__init__(model, model.feature)
