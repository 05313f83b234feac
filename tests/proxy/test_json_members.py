"""Members are taken out and put in; every other byte stays."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftguard.proxy.asking import Unreadable, ask
from driftguard.proxy.json_members import NotAnObject, with_member, within, without

NAMES = st.sampled_from(["usage", 'a"b', "ü\\", "", "choices", "x y"])
TEXTS = st.text(st.sampled_from('ab"\\{}[],: é日\n'), max_size=8)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(NAMES, VALUES)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), ("\n,\t", " :\r\n ")])


def _dump(value: object, separators: tuple[str, str], ascii_only: bool = False) -> bytes:
    return json.dumps(value, separators=separators, ensure_ascii=ascii_only).encode()


@settings(max_examples=40)
@given(OBJECTS, st.sets(NAMES), SEPARATORS, st.booleans())
def test_what_is_left_is_written_as_it_was(
    value: dict[str, Any], gone: set[str], separators: tuple[str, str], ascii_only: bool
) -> None:
    left = {name: item for name, item in value.items() if name not in gone}
    assert without(_dump(value, separators, ascii_only), gone) == _dump(left, separators, ascii_only)


@settings(max_examples=40)
@given(OBJECTS, NAMES, VALUES, SEPARATORS)
def test_a_member_put_in_replaces_the_one_of_its_name(
    value: dict[str, Any], name: str, item: object, separators: tuple[str, str]
) -> None:
    found = with_member(_dump(value, separators), name, json.dumps(item).encode())
    assert json.loads(found) == {**value, name: item}
    if name not in value and value:
        assert found.endswith(_dump(value, separators)[1:])


@settings(max_examples=40)
@given(OBJECTS, OBJECTS, st.sets(NAMES), SEPARATORS)
def test_an_inner_object_that_becomes_empty_goes_too(
    value: dict[str, Any], inner: dict[str, Any], gone: set[str], separators: tuple[str, str]
) -> None:
    left = {name: item for name, item in inner.items() if name not in gone}
    whole = {"first": 1, "ext": inner, **value}
    expected = (
        {name: item for name, item in whole.items() if name != "ext"} if not left else whole | {"ext": left}
    )
    assert within(_dump(whole, separators), "ext", gone) == _dump(expected, separators)


@pytest.mark.parametrize(
    "text", [b'{"a": 1, "a": 1}', b'{"a": 1, "b": 2, "a": 1}', b"[1]", b"", b'{"a": 1} x', b'{"a": \xff}']
)
def test_what_is_not_one_plain_object_is_refused(text: bytes) -> None:
    with pytest.raises(NotAnObject):
        without(text, {"b"})


WIDE = ",".join(f'"m{number}":1' for number in range(200_000))
SAME = ",".join(['"m":1'] * 200_000)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (f"{{{WIDE}}}", "more than 1000 members"),
        (f"{{{SAME}}}", "more than 1000 members"),
        (f'{{"sampling_params":{{{WIDE}}}}}', None),
        (f'{{"prompt":[{"[1]," * 200_000}[1]]}}', None),
        (f'{{"n":[{"1," * 400_000}1]}}', "more than 20000 values"),
        (f'{{"prompt":{json.dumps(WIDE)}, "x":{{{WIDE}}}}}', None),  # neither is a member of the request
    ],
)
def test_a_wide_body_is_judged_without_an_object_for_each_value(body: str, words: str | None) -> None:
    """During which all traffic of the proxy would wait."""
    tracemalloc.start()
    try:
        with pytest.raises(Unreadable, match=words) if words else nullcontext():
            asked = ask("native", "sglang", body.encode(), usage_always=False)
            assert asked.has_several_answers == ('"prompt":[' in body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 * len(body)
