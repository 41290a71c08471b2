"""The options of Spark writes: their meaning, and the errors for invalid ones."""

from __future__ import annotations

import pytest

import rt
from rt.spark.options import ClusterSource
from rt.spark.sink.options import WriteOptions, parse_write_options

GIVEN = {
    "endpoints": "n1:5002, n2:5002",
    "stream": "trades",
    "ca": "/ca",
    "cert": "/cert",
    "key": "/key",
    "name": "copy",
    "ledger": "/shared",
}
NODES = ClusterSource(("n1:5002", "n2:5002"), "trades", "/ca", "/cert", "/key")


def test_option_names_are_case_insensitive() -> None:
    more = {"VERSION": "3", "Topic": " t ", "dedupid": "spark", "deliveryTimeoutMs": "1500", "path": "/disk"}
    wanted = WriteOptions(NODES, "copy", "/shared", "/disk", 3, " t ", "spark", 1.5)
    assert parse_write_options(GIVEN | more, streaming=False) == wanted
    assert parse_write_options(GIVEN, streaming=True) == WriteOptions(NODES, "copy", "/shared")


@pytest.mark.parametrize(
    ("checkpoint", "ledger"),
    [("/ck/q/", "/ck/q/rt"), ("file:/ck/q", "/ck/q/rt"), ("file:///ck/q", "/ck/q/rt")],
)
def test_ledger_of_streaming_write_defaults_to_its_checkpoint(checkpoint: str, ledger: str) -> None:
    given = {**GIVEN, "ledger": "", "checkpointLocation": checkpoint, "queryName": "q"}
    assert parse_write_options(given, streaming=True).ledger == ledger


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"ledger": ""}, "a write needs ledger as well"),
        ({"ledger": "", "checkpointLocation": "hdfs://a/ck"}, "a write needs ledger as well"),
        ({"ledger": "s3://a/b"}, "ledger cannot be 's3://a/b': expected an absolute path"),
        ({"name": "a/b"}, "name: not a valid name for a name"),
        ({"name": "a" * 49}, "at most 48 characters"),
        ({"endpoints": "n1"}, "the port is missing .at option endpoints.: got 'n1'"),
        ({"version": "1"}, "version is only for batch writes"),
        ({"deliveryTimeoutMs": "0"}, "deliveryTimeoutMs cannot be '0'"),
        ({"topic": "t" * 1025}, "at most 1024 bytes"),
        ({"dedupid": "a~b"}, "dedupId: not a valid name"),
        ({"legder": "/x"}, "Did you mean ledger"),
        ({"kafka.bootstrap.servers": "k:9092"}, "kafka.bootstrap.servers → endpoints"),
    ],
)
def test_invalid_write_option_is_rejected_by_name(change: dict[str, str], error: str) -> None:
    with pytest.raises(rt.InvalidOption, match=error):
        parse_write_options(GIVEN | change, streaming=True)
