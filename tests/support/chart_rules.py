"""Rules between objects of the chart that no schema contains. Pure: a rule yields its violations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

Object: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[[Sequence[Object]], Iterator[str]]


def pods_of(objects: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """Yield every pod that the objects make: its owner, and its metadata and spec."""
    for each in objects:
        where = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] == "Pod":
            yield where, each
        elif each["kind"] in {"StatefulSet", "Job"}:
            yield where, each["spec"]["template"]
        elif each["kind"] == "CronJob":
            yield where, each["spec"]["jobTemplate"]["spec"]["template"]


def containers_of(pod: Object) -> list[Object]:
    """Return all containers, including the init containers."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def own_containers_of(pod: Object) -> list[Object]:
    """Return the chart's containers, without the user's."""
    return [each for each in containers_of(pod) if each["name"] in {"rt", "certificates", "scaling", "test"}]


def port_names_are_short_and_each_port_is_one(objects: Sequence[Object]) -> Iterator[str]:
    for where, pod in pods_of(objects):
        for container in containers_of(pod):
            ports = container.get("ports", [])
            yield from (f"{where}: {port['name']}" for port in ports if len(port["name"]) > 15)
            if len({port["containerPort"] for port in ports}) < len(ports):
                yield f"{where}: a port twice"


def selectors_are_the_labels_of_their_pods(objects: Sequence[Object]) -> Iterator[str]:
    labels = [pod["metadata"].get("labels", {}) for _, pod in pods_of(objects)]
    for each in objects:
        where = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] == "StatefulSet":
            wanted, among = (
                each["spec"]["selector"]["matchLabels"],
                [each["spec"]["template"]["metadata"]["labels"]],
            )
        elif each["kind"] == "Service":
            wanted, among = dict(each["spec"]["selector"]), labels
            wanted.pop("statefulset.kubernetes.io/pod-name", None)  # The controller sets this label.
        elif each["kind"] == "PodDisruptionBudget":
            wanted, among = each["spec"]["selector"]["matchLabels"], labels
        elif each["kind"] == "NetworkPolicy":
            wanted, among = each["spec"]["podSelector"]["matchLabels"], labels
        else:
            continue
        if not any(wanted.items() <= one.items() for one in among):
            yield f"{where} selects nothing"


def selectors_hold_nothing_that_changes(objects: Sequence[Object]) -> Iterator[str]:
    stable = {f"app.kubernetes.io/{word}" for word in ("name", "instance", "component")}
    for each in objects:
        if each["kind"] == "StatefulSet":
            spec = each["spec"]
            if set(spec["selector"]["matchLabels"]) != stable:
                yield f"selector {spec['selector']}"
            for claim in spec.get("volumeClaimTemplates", []):
                if set(claim["metadata"]["labels"]) != stable:
                    yield f"labels of a claim {claim['metadata']['labels']}"


def ports_that_are_named_exist(objects: Sequence[Object]) -> Iterator[str]:
    known = {
        port["name"]
        for _, pod in pods_of(objects)
        for container in containers_of(pod)
        for port in container.get("ports", [])
    }
    for each in objects:
        if each["kind"] == "Service":
            named = [port["targetPort"] for port in each["spec"]["ports"]]
        elif each["kind"] == "ServiceMonitor":
            named = [endpoint["port"] for endpoint in each["spec"]["endpoints"]]
        else:
            continue
        yield from (f"{each['kind']}: {name}" for name in named if name not in known)
    for where, pod in pods_of(objects):
        for container in containers_of(pod):
            own = {port["name"] for port in container.get("ports", [])}
            for key in ("startupProbe", "readinessProbe", "livenessProbe"):
                port = container.get(key, {}).get("httpGet", {}).get("port")
                if port is not None and port not in own:
                    yield f"{where}: {key} of {port}"


def mounts_have_their_volumes(objects: Sequence[Object]) -> Iterator[str]:
    claims = {
        f"StatefulSet {each['metadata']['name']}": {
            claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])
        }
        for each in objects
        if each["kind"] == "StatefulSet"
    }
    for where, pod in pods_of(objects):
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        if len(volumes) < len(pod["spec"].get("volumes", [])):
            yield f"{where}: a volume twice"
        volumes |= claims.get(where, set())
        for container in containers_of(pod):
            mounts = container.get("volumeMounts", [])
            yield from (f"{where}: {mount['name']}" for mount in mounts if mount["name"] not in volumes)
            if len({mount["mountPath"] for mount in mounts}) < len(mounts):
                yield f"{where}: two mounts at one path"


def config_maps_that_are_mounted_exist(objects: Sequence[Object]) -> Iterator[str]:
    made = {each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"}
    for where, pod in pods_of(objects):
        for volume in pod["spec"].get("volumes", []):
            name = volume.get("configMap", {}).get("name")
            if name is not None and name not in made and not name.startswith("company-"):
                yield f"{where}: {name}"


def service_accounts_and_roles_exist(objects: Sequence[Object]) -> Iterator[str]:
    made = {(each["kind"], each["metadata"]["name"]) for each in objects}
    for where, pod in pods_of(objects):
        name = pod["spec"]["serviceAccountName"]
        if ("ServiceAccount", name) not in made and name != "streams":
            yield f"{where}: {name}"
        if pod["spec"]["automountServiceAccountToken"] is not False:
            yield f"{where}: a token"
    for each in objects:
        if each["kind"] == "RoleBinding":
            named = [
                ("Role", each["roleRef"]["name"]),
                *((one["kind"], one["name"]) for one in each["subjects"]),
            ]
            yield from (f"RoleBinding: {one}" for one in named if one not in made)


def pods_are_restricted(objects: Sequence[Object]) -> Iterator[str]:
    """Check the Pod Security Standard "restricted" for every container of the chart."""
    for where, pod in pods_of(objects):
        spec = pod["spec"]
        own = spec["securityContext"]
        if not (
            own["runAsNonRoot"]
            and own["runAsUser"] >= 10000
            and own["seccompProfile"]["type"] == "RuntimeDefault"
        ):
            yield f"{where}: {own}"
        if any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")) or spec["enableServiceLinks"]:
            yield f"{where}: the host's, or variables of services"
        for container in own_containers_of(pod):
            security = container["securityContext"]
            if security["allowPrivilegeEscalation"] or not security["readOnlyRootFilesystem"]:
                yield f"{where}: {security}"
            if security["capabilities"] != {"drop": ["ALL"]}:
                yield f"{where}: capabilities"
            if not {"requests", "limits"} <= set(container["resources"]):
                yield f"{where}: no resources"


def certificates_that_are_mounted_are_made(objects: Sequence[Object]) -> Iterator[str]:
    made = {each["metadata"]["name"] for each in objects if each["kind"] == "Secret"}
    made |= {each["spec"]["secretName"] for each in objects if each["kind"] == "Certificate"}
    for where, pod in pods_of(objects):
        for volume in pod["spec"].get("volumes", []):
            for source in volume.get("projected", {}).get("sources", []):
                secret = source.get("secret")
                is_given = not secret or secret.get("optional") or secret["name"].startswith("company-")
                if not is_given and secret["name"] not in made:
                    yield f"{where}: {secret['name']}"
            if volume.get("projected", {"defaultMode": 0o440})["defaultMode"] != 0o440:
                yield f"{where}: keys that others may read"


def secrets_are_never_in_variables(objects: Sequence[Object]) -> Iterator[str]:
    for where, pod in pods_of(objects):
        for container in containers_of(pod):
            for variable in container.get("env", []):
                if "secretKeyRef" in variable.get("valueFrom", {}):
                    yield f"{where}: {variable['name']}"


def labels_are_those_that_are_recommended(objects: Sequence[Object]) -> Iterator[str]:
    wanted = {
        f"app.kubernetes.io/{word}" for word in ("name", "instance", "version", "managed-by", "component")
    }
    for each in objects:
        if "-extra" in each["metadata"]["name"] or "-text" in each["metadata"]["name"]:
            continue
        if not {*wanted, "helm.sh/chart"} <= set(each["metadata"].get("labels", {})):
            yield f"{each['kind']} {each['metadata']['name']}"


def policies_let_through_what_the_pods_need(objects: Sequence[Object]) -> Iterator[str]:
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    every = [pod["metadata"]["labels"] for _, pod in pods_of(objects) if "labels" in pod["metadata"]]
    labels = {each["app.kubernetes.io/component"]: each for each in every}
    (ports,) = [
        {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        for _, pod in pods_of(objects)
        for container in pod["spec"]["containers"]
        if container["name"] == "rt"
    ]
    for source, port in (("node", "data"), ("node", "raft"), ("test", "data"), ("scaling", "data")):
        if source in labels:
            ends = (("Egress", labels[source], labels["node"]), ("Ingress", labels["node"], labels[source]))
            for way, own, peer in ends:
                if not _is_let_through(policies, way, own, peer, ports[port]):
                    yield f"{way} of {port}, from a {source}"
    for component, own in labels.items():
        if not _is_let_through(policies, "Egress", own, {}, 53):
            yield f"a {component} finds no names"


def _is_let_through(policies: Sequence[Object], way: str, own: Object, peer: Object, port: int) -> bool:
    """Whether the policies allow traffic at `port` between pods with the labels `own` and `peer`. `way` is
    its direction, seen from `own`.
    """
    word = {"Egress": "to", "Ingress": "from"}[way]
    about = [
        policy
        for policy in policies
        if way in policy["policyTypes"] and policy["podSelector"]["matchLabels"].items() <= own.items()
    ]
    rules = [rule for policy in about for rule in policy[way.lower()]]
    return not about or any(
        any(each["port"] == port for each in rule.get("ports", []))
        and (
            word not in rule
            or any(
                set(each) == {"podSelector"} and each["podSelector"]["matchLabels"].items() <= peer.items()
                for each in rule[word]
            )
        )
        for rule in rules
    )


RULES: Final[Sequence[Rule]] = (
    port_names_are_short_and_each_port_is_one,
    selectors_are_the_labels_of_their_pods,
    selectors_hold_nothing_that_changes,
    ports_that_are_named_exist,
    mounts_have_their_volumes,
    config_maps_that_are_mounted_exist,
    service_accounts_and_roles_exist,
    pods_are_restricted,
    certificates_that_are_mounted_are_made,
    secrets_are_never_in_variables,
    labels_are_those_that_are_recommended,
    policies_let_through_what_the_pods_need,
)
