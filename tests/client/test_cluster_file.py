"""The `.cluster` file round-trips; a torn, corrupt or old file never yields a wrong cluster or epoch."""

from pathlib import Path

import pytest

from rt.sidecar.cluster_file import CLUSTER_FILE, PushedCluster, read_cluster, write_cluster

CLUSTER = PushedCluster(bytes(range(1, 17)), 2**62 + 7)


def test_cluster_round_trips_with_documented_byte_layout(tmp_path: Path) -> None:
    write_cluster(str(tmp_path), CLUSTER)
    assert read_cluster(str(tmp_path)) == CLUSTER
    data = (tmp_path / CLUSTER_FILE).read_bytes()
    assert (len(data), data[:8], data[8:12], data[16:32]) == (44, b"RTCLUSTR", b"\1\0\0\0", CLUSTER.id)
    assert int.from_bytes(data[32:40], "little") == CLUSTER.epoch


def test_missing_file_gives_unknown_cluster(tmp_path: Path) -> None:
    assert read_cluster(str(tmp_path)) == PushedCluster(b"", 0)


@pytest.mark.parametrize("length", range(44))
def test_truncated_file_gives_complete_cluster_id_but_no_epoch(tmp_path: Path, length: int) -> None:
    """An earlier rt writes 32 bytes."""
    write_cluster(str(tmp_path), CLUSTER)
    data = (tmp_path / CLUSTER_FILE).read_bytes()
    (tmp_path / CLUSTER_FILE).write_bytes(data[:length])
    assert read_cluster(str(tmp_path)) == (PushedCluster() if length < 32 else PushedCluster(CLUSTER.id, 0))


@pytest.mark.parametrize("at", range(44))
def test_corrupt_byte_gives_no_other_cluster_or_epoch(tmp_path: Path, at: int) -> None:
    write_cluster(str(tmp_path), CLUSTER)
    data = bytearray((tmp_path / CLUSTER_FILE).read_bytes())
    data[at] ^= 0x10
    (tmp_path / CLUSTER_FILE).write_bytes(data)
    assert read_cluster(str(tmp_path)) == (PushedCluster() if at < 32 else PushedCluster(CLUSTER.id, 0))
