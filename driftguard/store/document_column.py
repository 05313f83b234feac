"""Columns of JSON that hold a type: decoded where a row is read, encoded where it is written."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Dialect

from driftguard.errors import DriftGuardError
from driftguard.store.finite import FiniteDocument


class UnreadableDocument(DriftGuardError):
    """{table}.{column} holds a document that this version cannot read: {what is wrong, and where}"""


class Document(FiniteDocument):
    """jsonb, as a dataclass or a tuple of them. Members of a dataclass that are None are not stored."""

    cache_ok = True

    def __init__(self, type_: Any, where: str = "a document", *, none_as_null: bool = False) -> None:
        super().__init__(where, none_as_null=none_as_null)
        self.type_ = type_

    def named(self, where: str) -> Document:
        return Document(self.type_, where, none_as_null=self.none_as_null)

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        encoded = msgspec.to_builtins(value)
        if isinstance(encoded, dict):
            encoded = {name: member for name, member in encoded.items() if member is not None}
        return super().process_bind_param(encoded, dialect)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002
        """Raises UnreadableDocument."""
        if value is None:
            return None
        try:
            return msgspec.convert(value, self.type_)
        except msgspec.ValidationError as error:
            raise UnreadableDocument(f"{self.where} holds a document that cannot be read: {error}") from None
