"""Limits the length of a text before it is tokenized, which takes 4 seconds and 200 MB per megabyte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from driftguard_engine.core import InvalidRequest


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """tokens: of the context. characters: that fit into it, if all tokens were the vocabulary's longest."""

    tokens: int
    characters: int

    @classmethod
    def of(cls, tokenizer: Any, max_length: int) -> PromptLimit:
        return cls(max_length, max_length * max(map(len, tokenizer.get_vocab())))

    def check_text(self, field: str, characters: int) -> None:
        """Raises InvalidRequest."""
        if characters > self.characters:
            raise InvalidRequest(
                f"{field}: {characters} characters, but the context is {self.tokens} tokens, in which at "
                f"most {self.characters} characters fit",
                field=field,
            )

    def check_tokens(self, field: str, token_ids: Sequence[int]) -> None:
        """Checks the length of a list of ids. Raises InvalidRequest."""
        if len(token_ids) >= self.tokens:
            raise InvalidRequest(
                f"{field}: {len(token_ids)} tokens, but the context is {self.tokens} and must hold one new "
                "token too",
                field=field,
            )
