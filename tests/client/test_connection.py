"""`rt.connect`: settings from the URL, variables and profiles, their precedence, and errors in them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

import rt
from rt.client.connection import CertificateSource, ConnectionSettings, build_settings, merge_sources
from rt.errors import CertificateError, InvalidName, InvalidOption
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity, Role

URL = "rt://a:1,[::1]:2/trades?tls_dir=/pki&path=/logs"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def settings(url: str | None = None, profile: str | None = None, /, **environment: str) -> ConnectionSettings:
    return build_settings(merge_sources(environment, url, profile), environment)


def write_profiles(home: Path, text: str) -> Path:
    file = home / ".config" / "rt" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


def test_url_sets_endpoints_stream_path_and_certificates() -> None:
    expected = ConnectionSettings(("a:1", "[::1]:2"), "trades", "/logs", CertificateSource("/pki"))
    assert settings(URL) == expected
    assert settings(RT_URL=URL) == expected
    files = settings("rt://a:1/trades?ca=/c&cert=/d&key=/e%20f").certificates
    assert files == CertificateSource(None, "/c", "/d", "/e f")


def test_settings_source_with_higher_precedence_wins(home: Path) -> None:
    write_profiles(
        home,
        """
        [default]
        endpoints = ["p:1", "q:2"]
        stream = "from-profile"
        tls_dir = "pki"
        [other]
        endpoints = "o:1"
        stream = "other"
        ca = "/ca"
        cert = "~/cert"
        key = "/key"
        """,
    )
    here = str(home / ".config" / "rt")
    state = str(home / ".local" / "state" / "rt")
    assert settings() == ConnectionSettings(
        ("p:1", "q:2"), "from-profile", state, CertificateSource(f"{here}/pki")
    )
    assert settings(RT_STREAM="v").stream == "v"
    assert settings("rt://u:1/", RT_STREAM="v", RT_ENDPOINTS="w:1").endpoints == ("u:1",)
    assert settings(RT_URL="rt://u:1/", RT_ENDPOINTS="w:1").endpoints == ("w:1",)
    other = settings(None, "other", RT_PATH="/p", RT_PROFILE="default")
    assert other == ConnectionSettings(
        ("o:1",), "other", "/p", CertificateSource(None, "/ca", f"{home}/cert", "/key")
    )
    assert settings(RT_PROFILE="other").stream == "other"
    assert settings(XDG_CONFIG_HOME="/nowhere", RT_URL=URL).stream == "trades"


def test_certificate_directory_and_certificate_files_are_not_mixed(home: Path) -> None:
    write_profiles(home, '[default]\ntls_dir = "/pki"\n')
    url = "rt://a:1/s?ca=/c&cert=/d&key=/e"
    assert settings(url).certificates == CertificateSource(None, "/c", "/d", "/e")
    assert settings(URL, RT_CA="/c", RT_CERT="/d", RT_KEY="/e").certificates == CertificateSource("/pki")
    with pytest.raises(InvalidOption, match=r"without cert, key"):
        settings("rt://a:1/s?ca=/c")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://a:1/s", "not a URL of rt"),
        ("rt://a/s?tls_dir=d", "the port is missing"),
        ("rt://a:1/s?tls_dir=d&tls_dir=e", "has a setting twice.*'tls_dir'"),
        ("rt://a:1/s?user=me", "unknown setting.*'user'"),
        ("rt://a:1/s?tls_dir", "after '\\?' is malformed"),
        ("rt://a:1/s?tls_dir=d&ca=c", "excludes ca, cert and key.*URL"),
        ("rt://a:1/?tls_dir=d", "no stream given.*RT_STREAM"),
        ("rt:///s?tls_dir=d", "no endpoints given.*RT_ENDPOINTS"),
        ("rt://a:1/s", "no certificate given.*RT_TLS_DIR"),
    ],
)
def test_malformed_or_incomplete_url_raises_invalid_option(home: Path, url: str, problem: str) -> None:
    assert home
    with pytest.raises(InvalidOption, match=problem):
        settings(url)


def test_url_or_client_name_of_wrong_type_is_rejected(pki: Path) -> None:
    with pytest.raises(InvalidOption, match="not a URL of rt: got 5"):
        rt.connect(5)
    client = rt.connect(endpoints=["127.0.0.1:1"], stream="trades", tls_dir=pki)
    for make in (client.publisher, client.subscriber):
        with pytest.raises(InvalidName, match="got 3"):
            make(3)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"endpoints": 5}, "not a sequence of texts .at endpoints of arguments.: got 5"),
        ({"endpoints": [5]}, "an endpoint is not a text .at endpoints of arguments.: got 5"),
        ({"endpoints": [b"a:1"]}, "an endpoint is not a text"),
        ({"stream": 5}, "not a valid name for a stream: got 5"),
        ({"path": 5}, "not a path .at path of arguments.: got 5"),
        ({"path": b"d"}, "not a path .at path of arguments.: got b'd'"),
        ({"tls_dir": ""}, "not a path .at tls_dir of arguments.: got ''"),
    ],
)
def test_connect_argument_of_wrong_type_is_rejected(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(rt.RtError, match=problem):
        rt.connect("rt://a:1/s?tls_dir=d", **wrong)


def test_malformed_stream_name_raises_invalid_name() -> None:
    with pytest.raises(InvalidName, match="a/b"):
        settings("rt://a:1/a/b?tls_dir=d")


@pytest.mark.parametrize(
    ("text", "profile", "problem"),
    [
        ("[default\n", None, "cannot be read"),
        ("default = 3\n", None, "a profile is a table"),
        ("[default]\nstreams = 's'\n", None, r"unknown setting.*\[default\].*'streams'"),
        ("[default]\nstream = 3\n", None, "not a text.*stream"),
        ("[default]\npath = ''\n", None, "the path is empty .at path of "),
        ("[default]\n[prod]\n", "prd", "no such profile.*'prd'.*default, prod"),
    ],
)
def test_malformed_or_unknown_profile_raises_invalid_option_with_file_path(
    home: Path, text: str, profile: str | None, problem: str
) -> None:
    file = write_profiles(home, text)
    with pytest.raises(InvalidOption, match=problem) as caught:
        settings(URL, profile)
    assert str(file) in str(caught.value)


# --- certificates -----------------------------------------------------------------------------------------


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    init_ca(tmp_path / "pki")
    return tmp_path / "pki"


def certificate(pki: Path, role: Role, name: str) -> None:
    issue(pki, Identity("trades", role, name))


def test_certificate_is_found_by_role_and_needs_name_if_several_match(pki: Path) -> None:
    for role, name in (("publisher", "feed1"), ("subscriber", "reader1"), ("operator", "ops")):
        certificate(pki, role, name)
    (pki / "broken.crt").write_text("no PEM")
    found = CertificateSource(str(pki))
    assert found.find("subscriber").identity.name == "reader1"
    assert found.find("publisher", "feed1").identity.name == "feed1"
    with pytest.raises(CertificateError, match=r"another role .*feed1.crt.*expected role subscriber"):
        found.find("subscriber", "feed1")
    with pytest.raises(CertificateError, match=r"no certificate has the role node.*rt certs issue"):
        found.find("node")
    certificate(pki, "publisher", "feed2")
    with pytest.raises(InvalidOption, match=r"several certificates have the role publisher.*feed1, feed2"):
        found.find("publisher")
    with pytest.raises(InvalidOption, match=r"`rt pub --name NAME`\. For other commands: `--ca .*NAME\.key`"):
        found.find("publisher")
    certificate(pki, "operator", "alice")
    with pytest.raises(InvalidOption, match=rf"expected a name\. Name one: `--ca {pki}/ca\.crt --cert "):
        found.find("operator")
    with pytest.raises(CertificateError, match=r"nobody.crt"):
        found.find("publisher", "nobody")
    with pytest.raises(InvalidName):
        found.find("publisher", "../feed1")


def test_client_opens_publisher_and_subscriber_in_separate_directories(pki: Path, tmp_path: Path) -> None:
    certificate(pki, "publisher", "feed1")
    certificate(pki, "subscriber", "reader1")
    client = rt.connect(endpoints=["127.0.0.1:1"], stream="trades", path=tmp_path / "logs", tls_dir=pki)
    with client.publisher("feed1~a", linger_ms=0.0) as publisher:
        assert publisher.session == "feed1~a"
        assert publisher.directory == str(tmp_path / "logs/trades/sessions/feed1~a")
    with client.subscriber(position="earliest") as subscriber:
        assert subscriber.name == "reader1"
        assert subscriber.directory == str(tmp_path / "logs/subscribers/reader1/trades/merged")


def test_client_opens_async_subscriber_in_its_own_directory(pki: Path, tmp_path: Path) -> None:
    certificate(pki, "subscriber", "reader1")
    client = rt.connect(endpoints="127.0.0.1:1", stream="trades", path=tmp_path / "logs", tls_dir=pki)

    async def read() -> int:
        async with client.async_subscriber() as subscriber:
            return subscriber.position

    assert asyncio.run(read()) == 0
    assert (tmp_path / "logs/subscribers/reader1/trades").is_dir()


@pytest.mark.parametrize("key", ["path", "tls_dir", "ca"])
def test_url_path_setting_with_zero_byte_raises_invalid_option(key: str) -> None:
    with pytest.raises(rt.InvalidOption, match=f"a zero byte in a setting .at {key} of the URL"):
        merge_sources({}, f"rt://localhost:5002/s?{key}=a%00b")


@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
def test_profile_file_that_is_not_regular_raises_invalid_option_without_blocking(
    home: Path, kind: str
) -> None:
    file = home / ".config" / "rt" / "config.toml"
    file.parent.mkdir(parents=True)
    match kind:
        case "fifo":
            os.mkfifo(file)
        case "device":
            file.symlink_to("/dev/zero")
        case _:
            file.mkdir()
    with pytest.raises(InvalidOption, match=r"the file of profiles cannot be read \(at .*config.toml\)"):
        merge_sources({})
