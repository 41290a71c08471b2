"""Names: valid and invalid ones, session names, dedup ids, and names made from host names."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rt
from rt.names import (
    check_dedup_id,
    check_name,
    check_session_name,
    dedup_owner,
    is_name,
    name_from_host,
    session_owner,
)

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
NAMES = ["a", "Z", "0", "feed-1", "a.b_c-d", "a..b", "CON", "9" * 128, "x" + "." * 127]
NO_NAMES = [
    "",
    ".",
    "..",
    "-",
    "_a",
    ".a",
    "-rf",
    "a/b",
    "../a",
    "/etc/passwd",
    "..%2fa",
    "a\\b",
    "a b",
    " a",
    "a ",
    "a\n",
    "\na",
    "a\0",
    "a\x1b[0m",
    "a:b",
    "a~b",
    "~",
    "é",
    "\u0430dmin",
    "a\u202eb",
    "a\u0301",
    "\u0661",
    "a" * 129,
]

names = st.text(ALPHABET, min_size=1, max_size=128).filter(lambda text: text[0].isalnum())


@pytest.mark.parametrize("text", NAMES)
def test_valid_name_is_accepted_unchanged(text: str) -> None:
    assert is_name(text)
    assert check_name(text, kind="stream") == text
    assert check_session_name(text) == text


@pytest.mark.parametrize("text", NO_NAMES)
def test_invalid_name_raises_invalid_name(text: str) -> None:
    assert not is_name(text)
    with pytest.raises(rt.InvalidName, match="not a valid name for a stream"):
        check_name(text, kind="stream")


@given(st.text(max_size=140))
def test_name_has_only_allowed_characters_and_starts_with_letter_or_digit(text: str) -> None:
    expected = 1 <= len(text) <= 128 and set(text) <= set(ALPHABET) and text[0] not in "._-"
    assert is_name(text) == expected


@given(names)
def test_name_joined_to_directory_stays_below_it(text: str) -> None:
    assert os.path.normpath(os.path.join("/root", text)) == f"/root/{text}"


@pytest.mark.parametrize("text", ["feed~backup", "a~0", "a~b-c.d_e", "a" * 128 + "~" + "b" * 126])
def test_session_name_of_two_names_joined_by_tilde_is_accepted(text: str) -> None:
    assert check_session_name(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "~", "a~", "~b", "a~b~c", "a~~b", "a~.b", "a~../b", "a/b~c", "a~b\n", "é~a", "a" * 129 + "~b"],
)
def test_invalid_session_name_raises_invalid_name(text: str) -> None:
    with pytest.raises(rt.InvalidName, match="not a valid name for a session"):
        check_session_name(text)


def test_session_name_over_255_characters_raises_invalid_name() -> None:
    longest = "a" * 128 + "~" + "b" * 126
    assert len(longest) == 255
    with pytest.raises(rt.InvalidName, match="at most 255"):
        check_session_name(longest + "b")


def test_invalid_name_is_escaped_and_truncated_in_error_text() -> None:
    with pytest.raises(rt.InvalidName) as caught:
        check_name("a\n\x1b[31m" + "x" * 10_000, kind="stream")
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500


@given(names, names)
def test_session_owner_is_part_before_tilde(owner: str, suffix: str) -> None:
    assert session_owner(owner) == owner
    assert session_owner(f"{owner}~{suffix}") == owner


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("web-1.example.org", "web-1.example.org"),
        ("my host", "my-host"),
        ("_gateway", "gateway"),
        ("büro", "b-ro"),
        ("", "localhost"),
        ("---", "localhost"),
        ("a" * 300, "a" * 128),
    ],
)
def test_host_name_is_converted_to_nearest_valid_name(host: str, name: str) -> None:
    assert name_from_host(host) == name


@given(st.text(max_size=200))
def test_any_host_name_is_converted_to_valid_name(host: str) -> None:
    assert is_name(name_from_host(host))


def test_dedup_id_accepts_one_suffix_and_owner_is_part_before_tilde() -> None:
    for text in ("spark", "spark~copy.3"):
        assert check_dedup_id(text) == text
        assert dedup_owner(text) == "spark"
    for text in ("~", "spark~", "~copy", "spark~copy~3", "spark/copy"):
        with pytest.raises(rt.InvalidName, match="not a valid name for a dedup id"):
            check_dedup_id(text)
