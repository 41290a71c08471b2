"""Certificates in Kubernetes Secrets: when they are kept or reissued, and responses of the cluster API."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rt.cli.main import cli
from rt.errors import CertificateError
from rt.net.cert_files import check
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.net.k8s_certs import ApiRejected, ClusterApi, Secret, api_of, keep, read_order, why_renew

DAY = timedelta(days=1)
NO_GRANTS: dict[str, list[str]] = {"dedup": [], "lease": []}
GRANTS = {"dedup": ["d"], "lease": ["g"]}
ORDER: dict[str, Any] = {
    "stream": "s",
    "ca": "rt-ca",
    "days": 90,
    "renew_days": 30,
    "certificates": [
        {"secret": "rt-0", "role": "node", "name": "n0", **NO_GRANTS, "dns": ["n0.x"], "ips": ["127.0.0.1"]},
        {"secret": "feed", "role": "publisher", "name": "n0", **GRANTS, "dns": [], "ips": []},
    ],
}


def order(**changes: Any) -> Any:
    return read_order(json.dumps(ORDER | changes), where="order")


class Secrets:
    """A fake `ClusterApi`. Every change creates another version."""

    def __init__(self) -> None:
        self.data: dict[str, dict[str, bytes]] = {"rt-ca": {}, "rt-0": {}, "feed": {}}
        self.versions = dict.fromkeys(self.data, 1)

    def get(self, name: str) -> Secret:
        return Secret(dict(self.data[name]), str(self.versions[name]))

    def fill(self, name: str, data: Any, *, version: str) -> None:
        assert version == str(self.versions[name])
        self.data[name] |= data
        self.versions[name] += 1


def kept(secrets: Secrets, *, now: datetime | None = None, **changes: Any) -> list[str]:
    return keep(order(**changes), secrets, now=now)  # type: ignore[arg-type]


def test_missing_certificates_are_issued_once_by_one_ca() -> None:
    secrets = Secrets()

    assert kept(secrets) == ["rt-ca", "rt-0", "feed"]
    assert kept(secrets) == []

    feed = ["rt://s/publisher/n0", "rt://s/dedup/d", "rt://s/lease/g"]
    for name, uris in (("rt-0", ["rt://s/node/n0"]), ("feed", feed)):
        has = secrets.data[name]
        credentials = check(has["ca.crt"], has["tls.crt"], has["tls.key"], now=datetime.now(UTC))
        assert credentials.identity.uris == uris
        assert has["ca.crt"] == secrets.data["rt-ca"]["tls.crt"]
    assert "tls.key" in secrets.data["rt-ca"]


def test_certificates_are_reissued_only_if_expiring_soon_or_ordered_differently() -> None:
    secrets, now = Secrets(), datetime.now(UTC)
    kept(secrets, now=now)
    other = [ORDER["certificates"][0] | {"dns": ["n0.y"]}, ORDER["certificates"][1]]

    assert kept(secrets, certificates=other) == ["rt-0"]
    assert kept(secrets, now=now + 59 * DAY, certificates=other) == []
    assert kept(secrets, now=now + 61 * DAY, certificates=other) == ["rt-0", "feed"]


def test_certificates_are_reissued_after_ca_in_secret_changes(tmp_path: Path) -> None:
    secrets = Secrets()
    kept(secrets)
    init_ca(tmp_path)
    cert, key = (tmp_path / "ca.crt").read_bytes(), (tmp_path / "ca.key").read_bytes()
    # The old CA certificate stays trusted while clients still have certificates from it.
    secrets.data["rt-ca"] = {"tls.crt": cert + secrets.data["rt-ca"]["tls.crt"], "tls.key": key}

    assert kept(secrets) == ["rt-0", "feed"]
    assert secrets.data["feed"]["ca.crt"].count(b"BEGIN CERTIFICATE") == 2


def test_corrupt_pair_is_reissued_and_corrupt_ca_raises_certificate_error() -> None:
    secrets = Secrets()
    kept(secrets)
    secrets.data["feed"]["tls.key"] = secrets.data["rt-0"]["tls.key"]

    assert kept(secrets) == ["feed"]
    secrets.data["rt-ca"]["tls.crt"] = b"nonsense"
    with pytest.raises(CertificateError):
        kept(secrets)


@pytest.mark.parametrize("stops_at", ["rt-ca", "rt-0", "feed"])
def test_failed_run_continues_with_same_ca_when_run_again(stops_at: str) -> None:
    class Failing(Secrets):
        def fill(self, name: str, data: Any, *, version: str) -> None:
            if name == stops_at:
                raise ApiRejected("no", where=name)
            super().fill(name, data, version=version)

    secrets, order_of_secrets = Failing(), ["rt-ca", "rt-0", "feed"]
    with pytest.raises(ApiRejected):
        kept(secrets)
    again = Secrets()
    again.data, again.versions = secrets.data, secrets.versions
    before = {name: dict(data) for name, data in again.data.items()}

    assert kept(again) == order_of_secrets[order_of_secrets.index(stops_at) :]
    for name in order_of_secrets[: order_of_secrets.index(stops_at)]:
        assert again.data[name] == before[name]


@pytest.mark.parametrize("lost", ["tls.crt", "tls.key"])
def test_incomplete_ca_raises_certificate_error_and_is_not_replaced(lost: str) -> None:
    secrets = Secrets()
    kept(secrets)
    secrets.data["rt-ca"][lost] = b""
    before = dict(secrets.data["rt-ca"])

    with pytest.raises(CertificateError, match="half of a CA"):
        kept(secrets)
    assert secrets.data["rt-ca"] == before


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": "no/name"},
        {"days": 30},
        {"days": "90"},
        {"certificates": [ORDER["certificates"][0], ORDER["certificates"][0]]},
        {"certificates": [ORDER["certificates"][1] | {"secret": "rt-ca"}]},
        {"certificates": [ORDER["certificates"][0] | {"ips": ["nowhere"]}]},
        {"certificates": [ORDER["certificates"][0] | {"role": "king"}]},
        {"certificates": [ORDER["certificates"][0] | {"lease": ["g"]}]},
        {"certificates": [ORDER["certificates"][0] | {"dns": [1]}]},
        {"certificates": ["rt-0"]},
        {"more": 1},
    ],
)
def test_invalid_order_raises_certificate_error(changes: dict[str, Any]) -> None:
    with pytest.raises(CertificateError):
        order(**changes)


def test_renewal_reason_names_empty_secret_other_ca_or_invalid_certificate() -> None:
    wanted = order().certificates[0]

    assert why_renew({}, wanted, ca=b"", renew_days=1, now=datetime.now(UTC)) == "there is none"
    has = {"ca.crt": b"a", "tls.crt": b"b", "tls.key": b"c"}
    assert why_renew(has, wanted, ca=b"d", renew_days=1, now=datetime.now(UTC)) == "the CA is another one"
    assert "not valid" in str(why_renew(has, wanted, ca=b"a", renew_days=1, now=datetime.now(UTC)))


class Answers(BaseHTTPRequestHandler):
    """The required part of the Kubernetes API."""

    secrets: dict[str, dict[str, Any]]
    missing_bytes = 0
    """How many bytes of each answer are missing, because the API ends first."""

    def do_GET(self) -> None:
        self._answer()

    def do_PATCH(self) -> None:
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(body)

    def _answer(self, body: dict[str, Any] | None = None) -> None:
        prefix, name = self.path.rsplit("/", 1)
        secret = self.secrets.get(name)
        if prefix != "/api/v1/namespaces/prod/secrets" or self.headers["Authorization"] != "Bearer secret":
            status = 403
        elif secret is None:
            status = 404
        elif body is not None and body["metadata"] != secret["metadata"]:
            status = 409
        else:
            status = 200
            if body is not None:
                version = int(secret["metadata"]["resourceVersion"]) + 1
                secret["data"] = {**secret.get("data", {}), **body["data"]}
                secret["metadata"] = {"resourceVersion": str(version)}
        content = json.dumps(secret if status == 200 else {}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) + self.missing_bytes))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: object) -> None:
        """Log nothing."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[ThreadingHTTPServer, Path]]:
    """Start a server with three empty Secrets, and create the service account of a pod."""
    init_ca(tmp_path / "pki")
    ca, cert, key = issue(tmp_path / "pki", Identity("api", "node", "api"), loopback=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    names = ("rt-ca", "rt-0", "feed")
    Answers.secrets = {name: {"metadata": {"resourceVersion": "1"}} for name in names}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    account = tmp_path / "account"
    account.mkdir()
    for name, text in (("ca.crt", ca.read_text()), ("namespace", "prod"), ("token", "secret")):
        (account / name).write_text(text)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server, account
    server.shutdown()
    thread.join()
    server.server_close()


def environment(server: ThreadingHTTPServer) -> dict[str, str]:
    return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server_port)}


def test_certs_kubernetes_command_fills_secrets_of_its_own_namespace(
    cluster: tuple[ThreadingHTTPServer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, account = cluster
    path = tmp_path / "wanted.json"
    path.write_text(json.dumps(ORDER))
    monkeypatch.setattr("rt.cli.commands.certs.api_of", lambda variables: api_of(variables, account=account))

    runs = [
        CliRunner().invoke(cli, ["certs", "kubernetes", str(path)], env=environment(server)) for _ in range(2)
    ]

    assert [run.exit_code for run in runs] == [0, 0], runs[0].output
    assert "Made rt-ca, rt-0, feed; kept 0." in runs[0].stderr
    assert "Made none; kept 3." in runs[1].stderr
    assert b"BEGIN CERTIFICATE" in base64.b64decode(Answers.secrets["feed"]["data"]["tls.crt"])


def test_api_rejection_names_cause_or_remedy(cluster: tuple[ThreadingHTTPServer, Path]) -> None:
    server, account = cluster
    api = api_of(environment(server), account=account)
    version = api.get("rt-0").version
    api.fill("rt-0", {"a": b"b"}, version=version)

    with pytest.raises(ApiRejected, match="409"):
        api.fill("rt-0", {"a": b"c"}, version=version)
    with pytest.raises(ApiRejected, match="The chart creates it"):
        api.get("other")
    (account / "token").write_text("wrong")
    with pytest.raises(ApiRejected, match="The Role of the service account"):
        api_of(environment(server), account=account).get("rt-0")
    Answers.secrets["rt-0"] = {"data": {"a": "?"}, "metadata": {"resourceVersion": "1"}}
    with pytest.raises(ApiRejected, match="no Secret"):
        api.get("rt-0")


def test_truncated_api_response_raises_api_rejected(
    cluster: tuple[ThreadingHTTPServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, account = cluster
    monkeypatch.setattr(Answers, "missing_bytes", 5)
    with pytest.raises(ApiRejected, match="cannot reach the Kubernetes API") as caught:
        api_of(environment(server), account=account).get("rt-0")
    assert "5 more expected" in str(caught.value)


def test_missing_pod_environment_or_service_account_raises_api_rejected(tmp_path: Path) -> None:
    with pytest.raises(ApiRejected, match="does not run in a pod"):
        api_of({})
    with pytest.raises(ApiRejected, match="no service account"):
        ClusterApi("127.0.0.1", 1, account=tmp_path)
