"""Invalid chart values are rejected by the closed schema or by checks when the chart renders."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from chart_bench import CHART, load_yaml, objects, refusal, upgrading

from rt.units import parse_size

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = next(load_yaml((CHART / "values.yaml").read_text()))
OF_KUBERNETES = {
    *("podSecurityContext", "securityContext", "affinity", "dnsConfig", "global"),
    *("startupProbe", "readinessProbe", "livenessProbe"),
}
"""Objects that Kubernetes defines completely, and values that parent charts put into `global`."""


def closed(schema: Mapping[str, Any], values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Return the keys that only the schema or only the values have, and the paths where the schema allows any
    key.
    """
    if schema.get("additionalProperties") is not False:
        yield f"{path}: takes any key"
    known = schema.get("properties", {})
    yield from (f"{path}.{key}: only in one of both" for key in set(known) ^ set(values))
    for key in set(known) & set(values):
        if isinstance(values[key], dict) and "properties" in known[key] and key not in OF_KUBERNETES:
            inner = {**dict.fromkeys(known[key]["properties"]), **values[key]}
            yield from closed(known[key], inner, f"{path}.{key}")


def test_schema_lists_exactly_the_values_of_the_chart() -> None:
    assert list(closed(SCHEMA, VALUES)) == []


@pytest.mark.parametrize(
    "text",
    [
        '{"replicaCount": 2}',
        '{"replicaCount": 9}',
        '{"replicaCount": "3"}',
        '{"replicas": 3}',
        '{"stream": "no such/name"}',
        '{"config": {"rollBytes": "many"}}',
        '{"config": {"retention": {"diskPercent": 101}}}',
        '{"config": {"retention": {"days": 7}}}',
        '{"config": {"extra": {"Bad-Key": 1}}}',
        '{"config": {"extra": {"nested": {"a": 1}}}}',
        '{"image": {"digest": "sha256:short"}}',
        '{"image": {"pullPolicy": "Sometimes"}}',
        '{"ports": {"data": 0}}',
        '{"tls": {"source": "none"}}',
        '{"tls": {"enabled": false}}',
        '{"tls": {"extraDnsNames": ["*.example.com"]}}',
        '{"tls": {"clients": [{"name": "a"}]}}',
        '{"tls": {"clients": [{"name": "a", "role": "node"}]}}',
        '{"persistence": {"accessModes": ["ReadWriteMany"]}}',
        '{"persistence": {"size": "big"}}',
        '{"externalAccess": {"hosts": ["a b"]}}',
        '{"podAntiAffinity": "maybe"}',
        '{"updateStrategy": {"type": "Recreate"}}',
        '{"extraEnv": [{"value": "no name"}]}',
        '{"merge": {"secret": {}}}',
        '{"service": null}',
        '{"tls": {"clients": null}}',
        '{"networkPolicy": {"apiServerPorts": []}}',
        '{"clusterDomain": ""}',
        '{"image": {"tag": 20261122}}',
    ],
)
def test_invalid_values_are_rejected_by_schema(text: str) -> None:
    assert "schema" in refusal(json.loads(text))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"persistence": {"existingClaim": "c"}}', "share no volume"),
        (
            '{"tls": {"source": "existingSecret", "clients": [{"name": "a", "role": "operator"}]}}',
            "nothing makes certificates",
        ),
        ('{"tls": {"ca": {"secret": "a", "configMap": "b"}}}', "not both"),
        ('{"tls": {"clients": [{"name": "a", "role": "operator", "dedupIds": ["d"]}]}}', "only publishers"),
        (
            '{"tls": {"clients": [{"name": "a", "role": "operator"}, {"name": "a", "role": "publisher"}]}}',
            "two certificates for the Secret",
        ),
        ('{"externalAccess": {"enabled": true, "hosts": ["a.example.com"]}}', "one for each of the 3 nodes"),
        ('{"externalAccess": {"enabled": true, "nodePorts": [30000]}}', "one for each of the 3 nodes"),
        ('{"preStopSeconds": 50}', "terminationGracePeriodSeconds: at least"),
        ('{"ports": {"data": 7000}}', "taken twice"),
        ('{"service": {"externalTrafficPolicy": "Local"}}', "NodePort or LoadBalancer only"),
        ('{"service": {"type": "NodePort", "loadBalancerClass": "c"}}', "LoadBalancer only"),
        ('{"tls": {"selfSigned": {"days": 90}}}', "fewer than days"),
        ('{"tls": {"clients": [{"name": "Feed_1", "role": "publisher"}]}}', "give that client a secret"),
        ('{"tls": {"clients": [{"name": "CA", "role": "publisher", "secret": "a"}]}}', "the CA's own files"),
        ('{"tls": {"clients": [{"name": "a", "role": "operator", "leases": ["g"]}]}}', "hold leases"),
        ('{"config": {"extra": {"data_port": 5002}}}', "config.extra.data_port: the chart sets it itself"),
        ('{"podDisruptionBudget": {"maxUnavailable": 2}}', "without more than 1 of its nodes"),
        (
            '{"tls": {"clients": [{"name": "a", "role": "operator", "secret": "trades-rt-tls-ca"}]}}',
            "two certificates for the Secret trades-rt-tls-ca",
        ),
        ('{"fullnameOverride": "1st"}', "cannot be a service's"),
    ],
)
def test_conflicting_values_are_rejected_with_reason(text: str, why: str) -> None:
    assert why in refusal(json.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"persistence": {"existingClaim": "c"}, "replicaCount": 1}',
        '{"config": {"retention": {"minutes": 0, "bytes": "0"}}}',
        '{"externalAccess": {"enabled": true, "hosts": ["a.example.com", "2001:db8::1", "192.0.2.1"]}}',
        '{"livenessProbe": null, "global": {"ofAnother": "chart"}}',
    ],
)
def test_valid_values_are_accepted(text: str) -> None:
    assert refusal(json.loads(text)) == ""


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ({}, {"config": {"rollMinutes": 5}}, ""),
        ({"replicaCount": 1}, {"replicaCount": 3}, ""),
        ({}, {"replicaCount": 7}, ""),
        ({"replicaCount": 5}, {"replicaCount": 1}, ""),
        ({"stream": "a"}, {"stream": "b"}, 'belong to stream = "a" and cannot be changed to stream = "b"'),
        ({"stream": "a"}, {"stream": "b", "existingConfigMap": "of-mine"}, ""),
    ],
)
def test_upgrade_is_rejected_only_if_stream_changes(
    before: dict[str, Any], after: dict[str, Any], why: str
) -> None:
    said = refusal(upgrading(after, objects(before)))

    assert why in said
    assert bool(why) == bool(said)


@pytest.mark.parametrize("size", ["90Gi", "500M", "1.5Ti", "1024", "10GiB", "0"])
def test_sizes_valid_for_node_are_accepted_by_chart(size: str) -> None:
    parse_size(size)

    assert refusal({"config": {"rollBytes": size, "retention": {"bytes": size}}}) == ""
