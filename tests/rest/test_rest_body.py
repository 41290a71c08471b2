"""Request bodies: parsed field values, rejected fields and bodies, and agreement with the JSON schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from sequencer.rest.base.errors import BadRequest
from sequencer.rest.base.fields import body_schema, flag, name_of, parse_body, size, whole
from sequencer.rest.views.admin_actions import ACTIONS

FIELDS = (
    whole("count", "How many.", low=1, high=10),
    size("room", "How much.", low=0, high=2**62 - 1),
    size("some", "At least a byte.", low=1, high=2**40),
    flag("force", "Whether."),
    name_of("name", "Who.", "subscriber"),
)


def parse(**members: Any) -> dict[str, Any]:
    return parse_body(json.dumps({"name": "n", **members}).encode(), FIELDS)


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ({"count": 10}, 10),
        ({"count": 3.0}, 3),
        ({"room": 0}, 0),
        ({"room": "0"}, 0),
        ({"room": "90Gi"}, 90 * 2**30),
        ({"room": "1.5k"}, 1500),
        ({"room": "500M"}, 5 * 10**8),
        ({"room": "4096"}, 4096),
        ({"force": True}, True),
        ({"force": False}, False),
    ],
)
def test_valid_field_is_parsed_to_typed_value(said: dict[str, Any], value: object) -> None:
    (name,) = said
    found = parse(**said)[name]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"count": 0}, "a whole number from 1 to 10"),
        ({"count": 11}, "a whole number from 1 to 10"),
        ({"count": True}, "a whole number from 1 to 10"),
        ({"count": "3"}, "a whole number from 1 to 10"),
        ({"count": 1.5}, "a whole number from 1 to 10"),
        ({"count": None}, "a whole number from 1 to 10"),
        ({"count": 10**400}, "a whole number from 1 to 10"),
        ({"room": -1}, 'bytes from 0 to 4611686018427387903, as a number or a string such as "90Gi"'),
        ({"room": "90 Gi"}, "bytes from 0"),
        ({"room": "90Gx"}, "bytes from 0"),
        ({"room": "9" * 30}, "bytes from 0"),
        ({"room": "٣"}, "bytes from 0"),
        ({"some": 0}, "bytes from 1"),
        ({"some": "0"}, "bytes from 1"),
        ({"some": "2Ti"}, "bytes from 1 to 1099511627776"),
        ({"force": 1}, "true or false"),
        ({"force": "true"}, "true or false"),
        ({"name": "../x"}, "the name of a subscriber"),
        ({"name": "x\n"}, "the name of a subscriber"),
        ({"name": 1}, "the name of a subscriber"),
    ],
)
def test_invalid_field_raises_bad_request_with_field_name_and_expected_value(
    said: dict[str, Any], wanted: str
) -> None:
    (name,) = said
    with pytest.raises(BadRequest, match="the field is malformed") as caught:
        parse(**said)
    assert caught.value.where == f"field {name}"
    assert str(caught.value.expected).startswith(wanted)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is not valid JSON"),
        (b"{", "the body is not valid JSON"),
        (b"\xff{}", "the body is not valid JSON"),
        (b'{"name": "n"} {}', "the body is not valid JSON"),
        (b'{"name": NaN}', "NaN is not valid JSON"),
        (b'{"name": "n", "name": "m"}', "a name occurs twice"),
        (b"[" * 100_000, "nested too deep"),
        (b"[]", "the body is not an object (at body): got list"),
        (b"null", "the body is not an object (at body): got NoneType"),
        (b"1" * 9000, "the body is not valid JSON"),
        (b"{}", "a required field is missing (at field name): expected Who."),
        (b'{"name": "n", "nope": 1}', "got 'nope', expected count, room, some, force, name"),
    ],
)
def test_invalid_body_raises_bad_request_with_reason(content: bytes, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_body(content, FIELDS)
    assert message in str(caught.value)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
    st.sampled_from(["count", "room", "some", "force"]),
)
def test_parser_accepts_exactly_the_values_allowed_by_schema(said: Any, name: str) -> None:
    try:
        parse(**{name: said})
        was_read = True
    except BadRequest:
        was_read = False

    assert was_read == Draft202012Validator(body_schema(FIELDS)).is_valid({"name": "n", name: said})


@given(st.from_regex(FIELDS[1].schema["anyOf"][1]["pattern"].replace("$", r"\Z")))
def test_every_size_allowed_by_schema_is_parsed(text: str) -> None:
    assert 0 <= parse(room=text)["room"] < 2**62


def test_action_body_schemas_are_valid_json_schema() -> None:
    for action in ACTIONS:
        Draft202012Validator.check_schema(body_schema(action.fields))
