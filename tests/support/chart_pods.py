"""Runs the chart's pods as local processes, in place of a kubelet, cert-manager and a cluster's DNS.

Commands, variables, files and certificates are those of the manifests. Three things differ: mounted
directories are below the bench's directory, each node listens at its own loopback address (`RT_LISTEN`), and
this address replaces the node's host name in the manifests.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from chart_bench import NAMESPACE, Object, objects, one, upgrading

from rt.log.check.compare import Comparison, compare
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import identity_from_uris
from rt.net.tls import TLS
from sequencer.localcluster.loopback import free_ports, issued_at

DEADLINE_S: Final = 240.0
POLL_S: Final = 0.2
USAGES: Final = {"node": {"digital signature", "client auth", "server auth"}}
FILES: Final = ("ca.crt", "tls.crt", "tls.key")


class Pods:
    """The stream of a release of the chart, below `root`, which must be a short path."""

    def __init__(self, root: Path, values: Mapping[str, Any]) -> None:
        self.root, self.secrets = root, root / "secrets"
        names = ("data", "raft", "rest", "health")
        self.ports = dict(zip(names, free_ports(4), strict=True))
        self._values: dict[str, Any] = {"ports": self.ports, "tls": {"source": "certManager"}, **values}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        init_ca(root / "ca", now=issued_at())
        self.upgrade({})

    # The release

    def upgrade(self, values: Mapping[str, Any]) -> None:
        """Install other values, as `helm upgrade --reuse-values` does. Running pods are not changed."""
        self._values = {**self._values, **values}
        is_new = not hasattr(self, "objects")
        self.objects = objects(self._values if is_new else upgrading(self._values, self.objects))
        self.set = one(self.objects, "StatefulSet")
        self.stream = tomllib.loads(self.settings(self.names[0]))["stream"]
        for certificate in self.of("Certificate"):
            if not (self.secrets / certificate["spec"]["secretName"]).exists():
                self.issue(certificate)

    def of(self, kind: str) -> list[Object]:
        """All objects of a kind."""
        return [each for each in self.objects if each["kind"] == kind]

    @property
    def names(self) -> list[str]:
        """The nodes' pods, by ordinal."""
        name = self.set["metadata"]["name"]
        return [f"{name}-{ordinal}" for ordinal in range(self.set["spec"]["replicas"])]

    def settings(self, pod: str) -> str:
        """Return the settings file of a node."""
        (volume,) = [
            each for each in self.set["spec"]["template"]["spec"]["volumes"] if each["name"] == "config"
        ]
        data = one(self.objects, "ConfigMap", volume["configMap"]["name"])["data"]
        text: str = data[f"{pod}.toml"]
        return text

    def jobs(self, word: str) -> list[Object]:
        """Return the pods of the jobs that change the members: of `match`, or of a hook."""
        return [
            {"metadata": job["metadata"], "spec": job["spec"]["template"]["spec"]}
            for job in self.of("Job")
            for hook in [job["metadata"].get("annotations", {}).get("helm.sh/hook", "match")]
            if job["metadata"]["labels"]["app.kubernetes.io/component"] == "scaling"
            if word in hook.split(",")
        ]

    @property
    def checksum(self) -> str:
        """The checksum that restarts the nodes when it changes."""
        found: str = self.set["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        return found

    def address(self, pod: str) -> str:
        """Return the address at which a pod listens."""
        return f"127.0.{os.getpid() % 250}.{10 + int(pod.rpartition('-')[2])}"

    @property
    def endpoints(self) -> list[str]:
        """The addresses at which publishers and subscribers reach the nodes."""
        return [f"{self.address(pod)}:{self.ports['data']}" for pod in self.names]

    # cert-manager

    def issue(self, certificate: Object) -> None:
        """Issue a Certificate as cert-manager does, if its issuer is the chart's. An existing one is
        replaced.
        """
        spec = certificate["spec"]
        if spec.get("isCA"):
            return
        identity = identity_from_uris(spec["uris"])
        assert set(spec["usages"]) == USAGES.get(identity.role, {"digital signature", "client auth"})
        ips = [ip_address(each) for each in spec.get("ipAddresses", [])]
        if identity.role == "node":
            ips.append(ip_address(self.address(identity.name)))
        issued = issue(
            *(self.root / "ca", identity), dns=spec.get("dnsNames", []), ips=ips, renew=True, now=issued_at()
        )
        directory = self.secrets / spec["secretName"]
        directory.mkdir(parents=True, exist_ok=True)
        for key, path in zip(FILES, issued, strict=True):
            shutil.copy(path, directory / key)
            path.unlink() if key != "ca.crt" else None

    def client(self, secret: str) -> TLS:
        """The certificate of a client, from its Secret."""
        return TLS(*(self.secrets / secret / key for key in FILES))

    # The kubelet

    def start(self, *pods: str) -> None:
        """Run these nodes, or all if none is given."""
        for pod in pods or self.names:
            spec = self.set["spec"]["template"]["spec"]
            (container,) = spec["containers"]
            self._running[pod] = self._run(pod, spec, container, {"RT_LISTEN": self.address(pod)})

    def run_to_its_end(self, pod: Object) -> subprocess.CompletedProcess[str]:
        """Run the one container of a pod, and wait."""
        name = pod["metadata"]["name"]
        process = self.begin(pod)
        process.wait(DEADLINE_S)
        return subprocess.CompletedProcess([], process.returncode, self.log(name))

    def begin(self, pod: Object) -> subprocess.Popen[bytes]:
        """Run the one container of a pod, with an empty log."""
        (container,) = pod["spec"]["containers"]
        (self.root / f"{pod['metadata']['name']}.log").unlink(missing_ok=True)
        return self._run(pod["metadata"]["name"], pod["spec"], container, {})

    def stop(self, pod: str) -> int:
        """Stop a node as a kubelet does, within its grace period. Return the exit status."""
        process = self._running.pop(pod)
        grace_s = self.set["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        process.terminate()
        return process.wait(DEADLINE_S + grace_s)

    def end_of(self, pod: str) -> int:
        """The exit status of a node that ends by itself."""
        return self._running.pop(pod).wait(DEADLINE_S)

    def kill(self, pod: str) -> None:
        """Kill a node with SIGKILL. None of its processes runs when this returns."""
        process = self._running.pop(pod)
        children: list[str] = []
        with contextlib.suppress(OSError):  # It has ended by itself.
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        with contextlib.ExitStack() as opened:
            ends = []
            for child in map(int, children):
                with contextlib.suppress(ProcessLookupError):
                    ends.append(os.pidfd_open(child))
                    opened.callback(os.close, ends[-1])
            process.kill()
            process.wait()
            for end in ends:
                assert select.select([end], [], [], DEADLINE_S)[0]

    def lose_volume(self, pod: str) -> None:
        """Delete the volume of a node that does not run."""
        shutil.rmtree(self._mount(pod, "/var/lib/rt"))

    def renew_certificates(self) -> None:
        """Issue new certificates for the nodes, and update at once every volume that holds them."""
        for certificate in self.of("Certificate"):
            self.issue(certificate)
        for pod in self._running:
            self._fill_volume(pod, self.set["spec"]["template"]["spec"], "tls", "/etc/rt/tls")

    def close(self) -> None:
        """Kill all running pods."""
        for pod in list(self._running):
            self.kill(pod)

    def log(self, pod: str) -> str:
        """Return the output of a pod."""
        return (self.root / f"{pod}.log").read_text(errors="replace")

    # Operating

    def _rest(self, pods: list[str], *words: str) -> subprocess.CompletedProcess[str]:
        endpoints = ",".join(f"{self.address(pod)}:{self.ports['data']}" for pod in pods)
        secret = self.secrets / f"{self.set['metadata']['name']}-client-ops"
        keys = zip(("--ca", "--cert", "--key"), (str(secret / key) for key in FILES), strict=True)
        command = [sys.executable, "-m", "rt", "rest", *words, "--endpoints", endpoints]
        return subprocess.run(
            [*command, *(word for pair in keys for word in pair)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def told(self, target: str) -> str:
        """Return what the nodes answer to a request for `target`."""
        done = self._rest(self.names, target)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def roles(self) -> dict[str, str]:
        """Return the roles of the members, as the nodes report them."""
        return {member["name"]: member["role"] for member in json.loads(self.told("/status"))["members"]}

    # Observing

    def answers(self, pod: str, probe: str) -> bool:
        """Whether a probe of the manifest succeeds."""
        container = self.set["spec"]["template"]["spec"]["containers"][0]
        get = container[probe]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports[get["port"]] == self.ports["health"]
        return self._health(pod, get["path"]) is not None

    def _health(self, pod: str, path: str) -> str | None:
        """Return the answer of the health port; None if the status is not 200."""
        try:
            url = f"http://{self.address(pod)}:{self.ports['health']}{path}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return None

    def served_certificate(self, pod: str, tls: TLS) -> bytes:
        """Return the certificate that a node presents at its REST port."""
        context = tls.ssl_client_context()
        context.check_hostname = False
        where = (self.address(pod), self.ports["rest"])
        with (
            socket.create_connection(where, timeout=DEADLINE_S) as sock,
            context.wrap_socket(sock) as secured,
        ):
            found = secured.getpeercert(binary_form=True)
            assert found is not None
            return found

    def wait(self, is_met: Callable[[], object], what: str) -> None:
        """Wait until the condition holds. Fail with the nodes' last output after a timeout, or if a node
        ends.
        """
        deadline = time.monotonic() + DEADLINE_S
        while not is_met():
            said = {pod: self.log(pod)[-1500:] for pod in self._running}
            ended = [pod for pod, process in self._running.items() if process.poll() is not None]
            assert not ended, (ended, said)
            assert time.monotonic() < deadline, (what, said)
            time.sleep(POLL_S)

    def wait_ready(self, *pods: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait until the readiness probes of these nodes succeed, or of all nodes if none is given."""
        for pod in pods or self.names:

            def is_ready(pod: str = pod) -> bool:
                meanwhile()
                return self.answers(pod, "readinessProbe")

            self.wait(is_ready, f"{pod} to be ready")

    def merged(self, pod: str) -> Path:
        """Return the directory of its merged log."""
        return self._mount(pod, "/var/lib/rt") / "node" / self.stream / "merged"

    def compare(self) -> Comparison:
        """Compare the merged logs of all nodes, byte by byte."""
        return compare([self.merged(pod) for pod in self.names])

    # Helpers

    def _mount(self, pod: str, path: str) -> Path:
        return self.root / pod / path.strip("/").replace("/", "-")

    def _local(self, pod: str, spec: Object, text: str) -> str:
        """Replace the paths and host names of the manifests by those of this machine."""
        mounts = [re.escape(mount["mountPath"]) for mount in spec["containers"][0]["volumeMounts"]]
        text = re.sub("|".join(mounts), lambda found: str(self._mount(pod, found[0])), text)
        return self._hosts(text)

    def _hosts(self, text: str) -> str:
        name, service = self.set["metadata"]["name"], self.set["spec"]["serviceName"]
        for pod in (f"{name}-{ordinal}" for ordinal in range(7)):
            text = text.replace(f"{pod}.{service}.{NAMESPACE}.svc.cluster.local", self.address(pod))
        return text

    def _run(
        self, pod: str, spec: Object, container: Object, more: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        for mount in container["volumeMounts"]:
            self._mount(pod, mount["mountPath"]).mkdir(parents=True, exist_ok=True)
            self._fill_volume(pod, spec, mount["name"], mount["mountPath"])
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **{key: value for key, value in os.environ.items() if key == "RT_RUN_MARK"},
        }
        for variable in container["env"]:
            value = variable.get("value")
            if value is None:
                assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
                value = pod
            environment[variable["name"]] = self._local(pod, spec, _expanded(value, environment))
        words = (*container["command"], *container.get("args", []))
        command = [self._local(pod, spec, _expanded(word, environment)) for word in words]
        with (self.root / f"{pod}.log").open("ab") as log:
            return subprocess.Popen(
                command, env={**environment, **more}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _fill_volume(self, pod: str, spec: Object, name: str, path: str) -> None:
        """Write the files of a volume and switch to them at once, as a kubelet does, by renaming a symbolic
        link.
        """
        found = [each for each in spec["volumes"] if each["name"] == name]
        files = self._files(pod, spec, found[0]) if found else None
        if files is None:
            return
        mount = self._mount(pod, path)
        aside = mount / f"..{time.monotonic_ns()}"
        for file, content in files.items():
            (aside / file).parent.mkdir(parents=True, exist_ok=True)
            (aside / file).write_bytes(content)
            (aside / file).chmod((found[0].get("projected") or found[0]["configMap"])["defaultMode"])
        (mount / "..data_tmp").symlink_to(aside.name)
        (mount / "..data_tmp").rename(mount / "..data")
        for top in {Path(file).parts[0] for file in files}:
            if not (mount / top).is_symlink():
                (mount / top).symlink_to(Path("..data", top))
        for old in mount.glob("..[0-9]*"):
            if old != aside:
                shutil.rmtree(old)

    def _files(self, pod: str, spec: Object, volume: Object) -> dict[str, bytes] | None:
        """Return the files of a volume; None if it is only a directory."""
        if "configMap" in volume:
            assert volume["configMap"]["defaultMode"] == 0o440
            data = one(self.objects, "ConfigMap", volume["configMap"]["name"])["data"]
            return {key: self._local(pod, spec, text).encode() for key, text in data.items()}
        if "projected" not in volume:
            return None
        files = {}
        for source in volume["projected"]["sources"]:
            secret = source["secret"]
            directory = self.secrets / secret["name"]
            assert directory.exists() or secret.get("optional"), secret["name"]
            if directory.exists():
                files |= {item["path"]: (directory / item["key"]).read_bytes() for item in secret["items"]}
        return files


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace each `$(NAME)` by the variable's value, as Kubernetes does."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)
