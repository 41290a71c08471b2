"""A changed replicaCount adds or removes members under load: three, five, three, five nodes."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from chart_bench import Object, objects, one, upgrading
from chart_feed import VALUES, Feed, check_nothing_is_lost
from chart_pods import Pods

from sequencer.localcluster.processes import nothing_left


def files_of(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of each node."""
    data = one(objects(values), "ConfigMap", "trades-rt-config")["data"]
    return {name.removesuffix(".toml"): tomllib.loads(text) for name, text in data.items()}


def hooks_of(values: dict[str, Any]) -> list[str]:
    """Return the hooks at which the job that removes members runs."""
    jobs = [each for each in objects(values) if each["kind"] == "Job"]
    return [said["helm.sh/hook"] for each in jobs if (said := each["metadata"].get("annotations", {}))]


@pytest.mark.parametrize("count", [1, 3, 5, 7])
def test_only_nodes_of_first_installation_bootstrap(count: int) -> None:
    files = files_of({"replicaCount": count})

    names = [f"trades-rt-{ordinal}" for ordinal in range(7)]
    assert list(files) == names
    for ordinal, name in enumerate(names):
        assert files[name]["bootstrap"] is (ordinal < count)
        assert set(files[name]["members"]) == {*names[:count], name}


@pytest.mark.parametrize(("before", "after"), [(3, 5), (5, 3), (1, 3), (1, 7), (7, 1)])
def test_nodes_keep_initial_members_without_bootstrap_after_replica_count_changes(
    before: int, after: int
) -> None:
    """This holds even if all these nodes have lost their disks, because other nodes may have the data."""
    was = files_of({"replicaCount": before})

    files = files_of(upgrading({"replicaCount": after}, objects({"replicaCount": before})))
    rendered_only = files_of({"replicaCount": after, "initialReplicaCount": before})

    assert files == rendered_only
    for name, said in files.items():
        assert said["members"] == was[name]["members"]
        assert not said["bootstrap"]


def test_cluster_back_at_initial_size_renders_initial_settings() -> None:
    installed = objects({})
    grown = objects(upgrading({"replicaCount": 5}, installed))

    assert files_of(upgrading({"replicaCount": 3}, grown)) == files_of({})


def test_removal_job_runs_before_scale_down_and_before_rollback() -> None:
    five = objects({"replicaCount": 5})

    assert hooks_of({}) == ["pre-rollback"]
    assert hooks_of(upgrading({"replicaCount": 7}, five)) == ["pre-rollback"]
    assert hooks_of(upgrading({"replicaCount": 5}, five)) == ["pre-rollback"]
    assert hooks_of(upgrading({"replicaCount": 3}, five)) == ["pre-upgrade,pre-rollback"]


def test_changed_replica_count_renames_scaling_job_and_keeps_pod_template() -> None:
    before, after = objects({}), objects(upgrading({"replicaCount": 5}, objects({})))

    def job(found: list[Object]) -> Object:
        (only,) = [each for each in found if "-scaling-" in each["metadata"]["name"] and _is_no_hook(each)]
        return only

    assert job(before)["metadata"]["name"] != job(after)["metadata"]["name"], "jobs cannot be changed"
    sets = [one(found, "StatefulSet")["spec"]["template"] for found in (before, after)]
    assert sets[0] == sets[1]


def _is_no_hook(found: Object) -> bool:
    return "annotations" not in found["metadata"]


@pytest.mark.parametrize(
    ("values", "is_there"),
    [
        ({}, True),
        ({"scaling": {"enabled": False}}, False),
        ({"diagnosticMode": True}, False),
        ({"tls": {"source": "existingSecret"}}, False),
        ({"tls": {"source": "existingSecret"}, "scaling": {"operatorSecret": "mine"}}, True),
        ({"tls": {"ca": {"configMap": "roots"}}}, True),
        ({"tls": {"ca": {"secret": "roots"}}}, True),
    ],
)
def test_scaling_jobs_are_rendered_only_if_enabled_and_with_certificate(
    values: dict[str, Any], is_there: bool
) -> None:
    found = [
        each for each in objects(values) if each["kind"] == "Job" and "-scaling-" in each["metadata"]["name"]
    ]

    assert len(found) == (2 if is_there else 0)
    for job in found:
        (volume,) = [each for each in job["spec"]["template"]["spec"]["volumes"] if each["name"] == "tls"]
        sources = [each.get("secret") or each["configMap"] for each in volume["projected"]["sources"]]
        paths = [item["path"] for source in sources for item in source["items"]]
        assert sorted(paths) == ["ca.crt", "tls.crt", "tls.key"]


# With real nodes


@pytest.mark.slow
def test_cluster_scales_from_three_to_five_to_three_to_five_under_load_despite_failures() -> None:
    root = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
    with nothing_left():
        pods = Pods(root, {**VALUES, "replicaCount": 3})
        try:
            pods.start()
            pods.wait_ready()
            feed = Feed(pods, root / "feed")
            change_ones_mind(pods, feed)
            grow(pods, feed)
            shrink(pods, feed)
            grow_again(pods, feed)
            feed.publisher.close(timeout=0)
        finally:
            pods.close()
            shutil.rmtree(root)


def change_ones_mind(pods: Pods, feed: Feed) -> None:
    """Start a change to five nodes, but only the fourth one has a host. Go back to three nodes."""
    names = pods.names
    pods.upgrade({"replicaCount": 5, "scaling": {"raiseFeatureLevel": False}})
    *_, fourth, fifth = pods.names
    pods.start(fourth)
    refused = run_job(pods, "match")
    assert refused.returncode == 1
    assert "rt features raise 2" in refused.stdout
    assert pods.roles() == dict.fromkeys(names, "voter")

    pods.upgrade({"scaling": {"raiseFeatureLevel": True}})
    kill_job_when_it_waits_for(pods, fifth)
    assert pods.roles() == {**dict.fromkeys(pods.names, "voter"), fifth: "learner"}
    pods.upgrade({"replicaCount": 3})
    feed.send()
    done = run_job(pods, "pre-upgrade")

    assert done.returncode == 0, done.stdout
    assert "member cancel" in done.stdout
    assert pods.roles() == dict.fromkeys(names, "voter")
    assert pods.end_of(fourth) == 1
    pods.lose_volume(fourth)


def grow(pods: Pods, feed: Feed) -> None:
    """Grow while one host is missing at first, the job is killed, and a node restarts."""
    checksum, names = pods.checksum, pods.names
    pods.upgrade({"replicaCount": 5})
    *_, fourth, fifth = pods.names
    pods.start(fourth)
    kill_job_when_it_waits_for(pods, fifth)
    feed.send()
    feed.wait()
    assert pods.stop(names[0]) == 0
    pods.start(names[0], fifth)

    done = run_job(pods, "match")

    assert done.returncode == 0, done.stdout
    assert pods.roles() == dict.fromkeys(pods.names, "voter")
    pods.wait_ready(meanwhile=feed.send)
    assert pods.checksum == checksum, "the members restart no node"
    again = run_job(pods, "match")
    assert (again.returncode, again.stdout.count("\n")) == (0, 1), "nothing is left to do"
    check_nothing_is_lost(pods, feed)


def shrink(pods: Pods, feed: Feed) -> None:
    """Remove two nodes while one of them is down, and repeat the upgrade."""
    *names, fourth, fifth = pods.names
    pods.kill(fifth)
    pods.upgrade({"replicaCount": 3})
    feed.send()

    done = run_job(pods, "pre-upgrade")

    assert done.returncode == 0, done.stdout
    assert pods.roles() == dict.fromkeys(names, "voter")
    again = run_job(pods, "pre-upgrade")
    assert (again.returncode, again.stdout.count("\n")) == (0, 1), "nothing is left to do"
    assert pods.end_of(fourth) == 1
    assert "this node was removed from the cluster" in pods.log(fourth)
    feed.send()
    assert run_job(pods, "match").returncode == 0
    pods.upgrade({})
    assert pods.jobs("pre-upgrade") == []
    check_nothing_is_lost(pods, feed)


def grow_again(pods: Pods, feed: Feed) -> None:
    """Grow again after the volumes of the removed nodes are deleted."""
    pods.upgrade({"replicaCount": 5})
    *_, fourth, fifth = pods.names
    pods.lose_volume(fourth)
    pods.lose_volume(fifth)
    pods.start(fourth, fifth)

    done = run_job(pods, "match")

    assert done.returncode == 0, done.stdout
    pods.wait_ready(meanwhile=feed.send)
    check_nothing_is_lost(pods, feed)


def kill_job_when_it_waits_for(pods: Pods, pod: str) -> None:
    (found,) = pods.jobs("match")
    job, name = pods.begin(found), found["metadata"]["name"]
    pods.wait(lambda: f"{pod} is not connected" in pods.log(name), f"the job to wait for {pod}")
    job.kill()
    job.wait()


def run_job(pods: Pods, word: str) -> subprocess.CompletedProcess[str]:
    (job,) = pods.jobs(word)
    return pods.run_to_its_end(job)
