"""The base of request bodies: unknown fields are refused, null means the default, text is valid Unicode."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

NOT_TEXT = "holds a lone surrogate, which is not text"


class FieldError(ValueError):
    """{field}: {what is wrong and what is allowed}; for checks over several fields"""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail)
        self.field = field


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given, fields = {name: value for name, value in data.items() if value is not None}, cls.model_fields
        unknown = [name for name in given if name not in fields]
        for name in unknown[1:]:  # one is enough to refuse the body; an error for each takes long
            del given[name]
        return given


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(NOT_TEXT) from None
    return value


Text = Annotated[str, AfterValidator(_text)]
