"""Every rule between rendered objects detects an object that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chart_rules as rules
import pytest
from chart_bench import Object, objects, one


def pod(found: list[Object]) -> Any:
    return one(found, "StatefulSet")["spec"]["template"]


def node(found: list[Object]) -> Any:
    return pod(found)["spec"]["containers"][0]


BROKEN: list[tuple[rules.Rule, Callable[[list[Object]], Any]]] = [
    (
        rules.port_names_are_short_and_each_port_is_one,
        lambda found: node(found)["ports"][0].update(name="a-name-that-is-too-long"),
    ),
    (
        rules.port_names_are_short_and_each_port_is_one,
        lambda found: node(found)["ports"].append({"name": "again", "containerPort": 5002}),
    ),
    (
        rules.selectors_are_the_labels_of_their_pods,
        lambda found: pod(found)["metadata"]["labels"].pop("app.kubernetes.io/instance"),
    ),
    (
        rules.selectors_hold_nothing_that_changes,
        lambda found: one(found, "StatefulSet")["spec"]["selector"]["matchLabels"].update(version="1"),
    ),
    (
        rules.ports_that_are_named_exist,
        lambda found: node(found)["readinessProbe"]["httpGet"].update(port="nowhere"),
    ),
    (
        rules.ports_that_are_named_exist,
        lambda found: one(found, "Service", "trades-rt")["spec"]["ports"][0].update(targetPort="nowhere"),
    ),
    (rules.mounts_have_their_volumes, lambda found: pod(found)["spec"]["volumes"].pop()),
    (
        rules.config_maps_that_are_mounted_exist,
        lambda found: found.remove(one(found, "ConfigMap", "trades-rt-config")),
    ),
    (
        rules.service_accounts_and_roles_exist,
        lambda found: found.remove(one(found, "ServiceAccount", "trades-rt")),
    ),
    (rules.service_accounts_and_roles_exist, lambda found: found.remove(one(found, "Role"))),
    (
        rules.pods_are_restricted,
        lambda found: node(found)["securityContext"].update(readOnlyRootFilesystem=False),
    ),
    (rules.pods_are_restricted, lambda found: pod(found)["spec"]["securityContext"].update(runAsUser=0)),
    (
        rules.certificates_that_are_mounted_are_made,
        lambda found: found.remove(one(found, "Secret", "trades-rt-test-publisher")),
    ),
    (
        rules.secrets_are_never_in_variables,
        lambda found: node(found)["env"].append({"name": "A", "valueFrom": {"secretKeyRef": {}}}),
    ),
    (
        rules.labels_are_those_that_are_recommended,
        lambda found: one(found, "Service", "trades-rt")["metadata"].pop("labels"),
    ),
    (
        rules.policies_let_through_what_the_pods_need,
        lambda found: one(found, "NetworkPolicy", "trades-rt")["spec"]["ingress"].pop(1),
    ),
    (
        rules.policies_let_through_what_the_pods_need,
        lambda found: one(found, "NetworkPolicy", "trades-rt-test")["spec"]["egress"].pop(),
    ),
    (
        rules.policies_let_through_what_the_pods_need,
        lambda found: one(found, "NetworkPolicy", "trades-rt-scaling")["spec"]["egress"].pop(),
    ),
    (
        rules.policies_let_through_what_the_pods_need,
        lambda found: one(found, "NetworkPolicy", "trades-rt-certificates")["spec"]["egress"].pop(0),
    ),
]


@pytest.mark.parametrize(
    ("rule", "break_it"), BROKEN, ids=[f"{rule.__name__}-{at}" for at, (rule, _) in enumerate(BROKEN)]
)
def test_rule_reports_broken_object(rule: rules.Rule, break_it: Callable[[list[Object]], Any]) -> None:
    found = objects("default")
    assert list(rule(found)) == []

    break_it(found)

    assert list(rule(found)) != []


def test_every_rule_has_a_breaking_case() -> None:
    assert {rule for rule, _ in BROKEN} == set(rules.RULES)
