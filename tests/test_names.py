"""Names: what is one, what never is, and that a checked one can stand in a path."""

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
def test_a_name_is_taken_as_it_is(text: str) -> None:
    assert is_name(text)
    assert check_name(text, kind="stream") == text
    assert check_session_name(text) == text


@pytest.mark.parametrize("text", NO_NAMES)
def test_no_other_text_is_a_name(text: str) -> None:
    assert not is_name(text)
    with pytest.raises(rt.InvalidName, match="not a valid name for a stream"):
        check_name(text, kind="stream")


@given(st.text(max_size=140))
def test_a_name_is_made_of_the_alphabet_and_begins_with_a_letter_or_digit(text: str) -> None:
    expected = 1 <= len(text) <= 128 and set(text) <= set(ALPHABET) and text[0] not in "._-"
    assert is_name(text) == expected


@given(names)
def test_a_name_stays_below_the_directory_it_is_joined_to(text: str) -> None:
    assert os.path.normpath(os.path.join("/root", text)) == f"/root/{text}"


@pytest.mark.parametrize("text", ["feed~backup", "a~0", "a~b-c.d_e", "a" * 128 + "~" + "b" * 126])
def test_a_session_may_be_two_names_joined_by_a_tilde(text: str) -> None:
    assert check_session_name(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "~", "a~", "~b", "a~b~c", "a~~b", "a~.b", "a~../b", "a/b~c", "a~b\n", "é~a", "a" * 129 + "~b"],
)
def test_nothing_else_names_a_session(text: str) -> None:
    with pytest.raises(rt.InvalidName, match="not a valid name for a session"):
        check_session_name(text)


def test_a_session_name_fits_a_file_system() -> None:
    longest = "a" * 128 + "~" + "b" * 126
    assert len(longest) == 255
    with pytest.raises(rt.InvalidName, match="at most 255"):
        check_session_name(longest + "b")


def test_an_invalid_name_is_shown_escaped_and_cut() -> None:
    with pytest.raises(rt.InvalidName) as caught:
        check_name("a\n\x1b[31m" + "x" * 10_000, kind="stream")
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500


@given(names, names)
def test_the_owner_of_a_session_is_what_stands_before_the_tilde(owner: str, suffix: str) -> None:
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
def test_a_host_gives_the_nearest_name(host: str, name: str) -> None:
    assert name_from_host(host) == name


@given(st.text(max_size=200))
def test_every_host_gives_a_name(host: str) -> None:
    assert is_name(name_from_host(host))


def test_a_dedup_id_may_have_a_suffix_and_belongs_to_what_stands_before_it() -> None:
    for text in ("spark", "spark~copy.3"):
        assert check_dedup_id(text) == text
        assert dedup_owner(text) == "spark"
    for text in ("~", "spark~", "~copy", "spark~copy~3", "spark/copy"):
        with pytest.raises(rt.InvalidName, match="not a valid name for a dedup id"):
            check_dedup_id(text)
