"""Certificates and settings rendered by the chart fit the nodes, and only setting changes restart them."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from chart_bench import Object, objects, one, values_of

from rt.net.identity import identity_from_uris
from rt.net.k8s_certs import CertificateRequest, read_order
from sequencer.config.config import NodeConfig
from sequencer.config.config_loader import node_config

CLIENTS = [
    {"name": "feed1", "role": "publisher", "dedupIds": ["feed"], "leases": ["readers"]},
    {"name": "ops", "role": "operator", "secret": "ops-certificate"},
]
EXTERNAL = {"enabled": True, "hosts": ["a.example.com", "b.example.com", "192.0.2.1"]}
VALUES: dict[str, Any] = {"stream": "s", "externalAccess": EXTERNAL, "tls": {"clients": CLIENTS}}


def with_source(source: str) -> list[Object]:
    return objects(VALUES | {"tls": {**VALUES["tls"], "source": source}})


def order_of(found: list[Object]) -> CertificateRequest:
    text = one(found, "ConfigMap", "trades-rt-certificates")["data"]["wanted.json"]
    return read_order(text, where="wanted.json")


def config_of(values: dict[str, Any], pod: str, tmp_path: Any) -> NodeConfig:
    """The settings of a node, as it reads them itself."""
    found = objects(values)
    path = tmp_path / "node.toml"
    path.write_text(one(found, "ConfigMap", "trades-rt-config")["data"][f"{pod}.toml"])
    (container,) = one(found, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", pod).replace("$(RT_NAME)", pod) for each in container["env"]}
    return node_config({"config": str(path)}, variables, "/")


def test_self_signed_and_cert_manager_certificates_have_same_identities_and_hosts() -> None:
    ours = {one.secret: one for one in order_of(with_source("selfSigned")).certificates}
    theirs = [each["spec"] for each in with_source("certManager") if each["kind"] == "Certificate"]

    leaves = {spec["secretName"]: spec for spec in theirs if not spec.get("isCA")}
    assert set(leaves) == set(ours)
    for secret, spec in leaves.items():
        assert identity_from_uris(spec["uris"]) == ours[secret].identity
        assert tuple(spec.get("dnsNames", ())) == ours[secret].dns
        assert tuple(spec.get("ipAddresses", ())) == tuple(map(str, ours[secret].ips))


def test_node_certificate_covers_all_dialed_hosts_without_wildcards() -> None:
    first, _, third, *clients = order_of(with_source("selfSigned")).certificates

    assert first.identity.uri == "rt://s/node/trades-rt-0"
    wanted = {"trades-rt-0.trades-rt-headless.prod.svc.cluster.local", "trades-rt.prod.svc", "localhost"}
    assert wanted | {"trades-rt-0", "a.example.com"} <= set(first.dns)
    assert "192.0.2.1" in map(str, third.ips)
    assert not [name for name in first.dns if "*" in name]
    assert all(not client.hosts for client in clients)
    assert {client.secret for client in clients} >= {"trades-rt-client-feed1", "ops-certificate"}


def test_secrets_render_without_keys_and_job_may_patch_only_these_secrets() -> None:
    found = with_source("selfSigned")
    secrets = [each for each in found if each["kind"] == "Secret"]
    order = order_of(found)

    assert {each["metadata"]["name"] for each in secrets} == {
        order.ca,
        *(each.secret for each in order.certificates),
    }
    for secret in secrets:
        assert not {"data", "stringData"} & set(secret)
        assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    (rule,) = one(found, "Role")["rules"]
    assert set(rule["resourceNames"]) == {each["metadata"]["name"] for each in secrets}
    assert (rule["resources"], rule["verbs"]) == (["secrets"], ["get", "patch"])


def test_certificate_job_and_cron_job_share_pod_template() -> None:
    found = with_source("selfSigned")
    cron = one(found, "CronJob")["spec"]["jobTemplate"]["spec"]["template"]

    def only(found: list[Object]) -> Object:
        name = "trades-rt-certificates-"
        (job,) = [
            each for each in found if each["kind"] == "Job" and each["metadata"]["name"].startswith(name)
        ]
        return job

    job = only(found)
    assert job["spec"]["template"] == cron
    assert cron["spec"]["containers"][0]["command"][:3] == ["rt", "certs", "kubernetes"]
    assert "activeDeadlineSeconds" not in job["spec"], "nothing would begin it again"
    assert only(objects({}))["metadata"]["name"] != job["metadata"]["name"], "jobs cannot be changed"


@pytest.mark.parametrize("replicas", [1, 3, 5, 7])
def test_node_accepts_its_settings_and_is_listed_as_member(replicas: int, tmp_path: Any) -> None:
    pod = f"trades-rt-{replicas - 1}"

    config = config_of({"replicaCount": replicas}, pod, tmp_path)

    assert config.name == pod
    assert len(config.members) == replicas
    host = f"{pod}.trades-rt-headless.prod.svc.cluster.local"
    assert (config.members[pod].raft, config.members[pod].data) == (f"{host}:7000", f"{host}:5002")
    assert config.cert == f"/etc/rt/tls/{pod}/tls.crt"
    assert config.bootstrap


def test_chart_settings_reach_node_config(tmp_path: Any) -> None:
    said = values_of("everything")

    config = config_of({"config": said["config"], "ports": said["ports"]}, "trades-rt-0", tmp_path)

    assert config.replicated == {
        "roll_bytes": 256 * 2**20,
        "roll_minutes": 60,
        "retention_minutes": 1440,
        "retention_bytes": 8 * 2**30,
        "retention_disk_percent": 80,
        "hold_bytes_max": 2 * 2**30,
    }
    assert (config.data_port, config.raft_port, config.rest_port, config.health_port) == (
        *(15002, 17000),
        *(16000, 18080),
    )
    assert (config.log_level, config.log_format, config.listen) == ("debug", "text", "127.0.0.9")


def test_default_values_set_no_replicated_settings(tmp_path: Any) -> None:
    assert config_of({}, "trades-rt-0", tmp_path).replicated == {}


def test_pod_template_changes_only_with_node_settings() -> None:
    def template(values: dict[str, Any]) -> Any:
        return one(objects(values), "StatefulSet")["spec"]["template"]

    for values in (
        {"replicaCount": 1},
        {"tls": {"clients": CLIENTS}},
        {"metrics": {"dashboard": {"enabled": True}}},
    ):
        assert template(values) == template({})
    assert template({"config": {"rollMinutes": 5}}) != template({})
    off = {"configChecksumAnnotation": False}
    assert template(off | {"config": {"rollMinutes": 5}}) == template(off)


def test_immutable_stateful_set_fields_are_independent_of_chart_version() -> None:
    found = one(objects("default"), "StatefulSet")["spec"]

    fixed = str([found["volumeClaimTemplates"], found["selector"], found["serviceName"]])
    assert "0.1.0" not in fixed
    assert "helm.sh/chart" not in fixed


def test_extra_settings_with_quotes_render_as_valid_toml() -> None:
    found = objects({"config": {"extra": {"listen": 'a "quoted" \\ text', "more": True, "number": 10**9}}})

    said = tomllib.loads(one(found, "ConfigMap", "trades-rt-config")["data"]["trades-rt-0.toml"])
    assert (said["listen"], said["more"], said["number"]) == ('a "quoted" \\ text', True, 10**9)
