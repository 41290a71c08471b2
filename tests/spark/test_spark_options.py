"""Read options of the Spark source: how they are parsed, and errors for invalid ones."""

from pathlib import Path

import pytest

import rt
from rt.spark.options import ClusterSource
from rt.spark.sink import options as sink_options
from rt.spark.source.offset import Offset, parse_offset, parse_start
from rt.spark.source.options import (
    MAX_PARTITION_BYTES,
    NAMES,
    AtTime,
    DirectorySource,
    ReadOptions,
    parse_options,
)

LOG = {"path": "/log"}
NODES = {"endpoints": "n1:5002, n2:5002", "stream": "s", "ca": "/ca", "cert": "/cert", "key": "/key"}


def test_spark_docs_page_names_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    names = {*NAMES, *sink_options.NAMES}
    assert {name for name in names if f"`{name}`" not in page} == {"log"}, "log is another name of path"


def test_path_is_the_only_required_option_for_directory() -> None:
    assert parse_options(LOG) == ReadOptions(DirectorySource("/log"))
    assert parse_options({"log": "/log"}).where == DirectorySource("/log")
    assert parse_options(LOG).max_partition_bytes == MAX_PARTITION_BYTES


def test_node_options_are_endpoints_stream_and_three_tls_files() -> None:
    assert parse_options(NODES).where == ClusterSource(("n1:5002", "n2:5002"), "s", "/ca", "/cert", "/key")


def test_read_option_names_are_case_insensitive() -> None:
    options = parse_options({"PATH": "/log", "STARTINGoffsets": "5", "failondataloss": "FALSE"})
    assert (options.start, options.fail_on_data_loss) == (Offset(5, 0, 5), False)


@pytest.mark.parametrize(
    ("value", "start"),
    [
        ("earliest", "earliest"),
        ("LATEST", "latest"),
        ("0", Offset(0, 0, 0)),
        ("-2", "earliest"),
        ("-1", "latest"),
        ('{"position": 17}', Offset(17, 0, 17)),
        ('{"position": 17, "epoch": 65537, "first": 3}', Offset(17, 65537, 3)),
        (" 7 ", Offset(7, 0, 7)),
    ],
)
def test_starting_offsets_accept_names_numbers_and_json(value: str, start: object) -> None:
    assert parse_options({**LOG, "startingOffsets": value}).start == start


@pytest.mark.parametrize(
    ("value", "nanoseconds"),
    [
        ("1700000000000", 1_700_000_000_000_000_000),
        ("-1", -1_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000_000_000),
        ("2023-11-14T23:13:20.000001+01:00", 1_700_000_000_000_001_000),
    ],
)
def test_starting_timestamp_is_milliseconds_or_iso_8601_and_overrides_offsets(
    value: str, nanoseconds: int
) -> None:
    options = parse_options({**LOG, "startingTimestamp": value, "startingOffsets": "5"})
    assert options.start == AtTime(nanoseconds, "startingTimestamp")


@pytest.mark.parametrize(
    ("value", "size"), [("1", 1), ("64m", 64 * 2**20), ("2 GiB", 2**31), ("10kb", 10240), ("7b", 7)]
)
def test_sizes_are_bytes_or_have_unit(value: str, size: int) -> None:
    assert parse_options({**LOG, "maxBytesPerTrigger": value}).max_bytes_per_trigger == size


def test_topics_are_comma_separated_list_or_json() -> None:
    assert parse_options({**LOG, "topics": "trade, quote"}).topics == {"trade", "quote"}
    assert parse_options({**LOG, "topics": '["a,b", ""]'}).topics == {"a,b", ""}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "neither path nor endpoints is given"),
        ({**LOG, "startingOffset": "1"}, "unknown option 'startingOffset'. Did you mean startingOffsets"),
        ({**LOG, "warp": "1"}, "The options are path, log, endpoints"),
        ({"path": "hdfs://n/log"}, "path cannot be 'hdfs://n/log': expected a directory"),
        ({**NODES, "connectTimeoutMs": "0"}, "connectTimeoutMs cannot be '0': expected a whole number"),
        ({**LOG, "log": "/other"}, "path and log name different directories"),
        ({**LOG, **NODES}, "path and endpoints exclude each other"),
        ({**LOG, "ca": "/ca"}, "path and ca exclude each other"),
        ({"endpoints": "n1:5002", "stream": "s"}, "endpoints needs ca, cert, key as well"),
        ({**NODES, "endpoints": "n1"}, "the port is missing (at option endpoints): got 'n1'"),
        ({**NODES, "stream": "a/b"}, "stream: "),
        (
            {**LOG, "startingOffsets": "newest"},
            "startingOffsets cannot be 'newest': expected earliest, latest",
        ),
        ({**LOG, "startingOffsets": "-3"}, "startingOffsets cannot be '-3': expected a position"),
        ({**LOG, "startingOffsets": "1.5"}, "startingOffsets cannot be '1.5'"),
        ({**LOG, "startingOffsets": "true"}, "startingOffsets cannot be 'True'"),
        ({**LOG, "startingOffsets": '{"topic": {"0": 1}}'}, "startingOffsets cannot be"),
        ({**LOG, "startingOffsets": "[" * 100_000}, "startingOffsets cannot be"),
        ({**LOG, "endingOffsets": "earliest"}, "endingOffsets cannot be 'earliest': expected latest"),
        (
            {**LOG, "startingOffsets": "5", "endingOffsets": "4"},
            "endingOffsets cannot be '4': expected at least",
        ),
        ({**LOG, "startingTimestamp": "yesterday"}, "startingTimestamp cannot be 'yesterday'"),
        ({**LOG, "startingTimestamp": "2023-11-14T22:13:20"}, "expected a time with its zone"),
        ({**LOG, "endingTimestamp": "2300-01-01T00:00:00Z"}, "between the years 1678 and 2262"),
        ({**LOG, "endingTimestamp": "9999-12-31T23:00:00-02:00"}, "between the years 1678 and 2262"),
        ({**LOG, "startingTimestamp": "0001-01-01T00:00:00+01:00"}, "between the years 1678 and 2262"),
        ({**LOG, "topics": "[1]"}, "topics cannot be '[1]'"),
        ({**LOG, "failOnDataLoss": "yes"}, "failOnDataLoss cannot be 'yes': expected true or false"),
        ({**LOG, "minPartitions": "0"}, "minPartitions cannot be '0': expected a number above 0"),
        ({**LOG, "maxOffsetsPerTrigger": "many"}, "maxOffsetsPerTrigger cannot be 'many'"),
        (
            {**LOG, "maxBytesPerTrigger": "64 q"},
            "maxBytesPerTrigger cannot be '64 q': expected bytes above 0",
        ),
        ({**LOG, "startingOffsetsByTimestampStrategy": "x"}, "expected error or latest"),
    ],
)
def test_invalid_read_option_raises_one_line_error(given: dict[str, str], expected: str) -> None:
    with pytest.raises(rt.InvalidOption) as error:
        parse_options(given)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, ValueError)


def test_consumer_is_rejected_without_streaming_or_endpoints() -> None:
    assert parse_options({**NODES, "consumer": "reader1"}).consumer == "reader1"
    assert parse_options({**NODES, "Consumer": "reader1"}, streaming=True).consumer == "reader1"
    with pytest.raises(rt.InvalidOption, match="consumer is only for streaming"):
        parse_options({**NODES, "consumer": "reader1"}, streaming=False)
    with pytest.raises(rt.InvalidOption, match="consumer needs endpoints"):
        parse_options({**LOG, "consumer": "reader1"}, streaming=True)
    with pytest.raises(rt.InvalidOption, match="consumer: not a valid name"):
        parse_options({**NODES, "consumer": "a/b"}, streaming=True)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("kafka.bootstrap.servers", "endpoints"),
        ("subscribe", "stream, and topics"),
        ("subscribePattern", "stream, and a filter on the column topic"),
        ("assign", "stream, and topics"),
        ("startingOffsetsByTimestamp", "startingTimestamp"),
        ("endingOffsetsByTimestamp", "endingTimestamp"),
        ("kafka.group.id", "consumer"),
        ("kafka.ssl.truststore.location", "ca, cert and key"),
        ("kafka.security.protocol", "ca, cert and key"),
        ("kafka.max.poll.records", "nothing: leave it out"),
    ],
)
def test_kafka_option_is_rejected_with_name_of_rt_option(name: str, here: str) -> None:
    with pytest.raises(rt.InvalidOption) as error:
        parse_options({name: "x"})
    assert f"unknown option {name!r}: an option of Spark's Kafka source" in str(error.value)
    assert f"{name} → {here}" in str(error.value)


def test_include_headers_is_rejected_as_write_option() -> None:
    with pytest.raises(rt.InvalidOption, match="includeHeaders → nothing: a write publishes the column"):
        sink_options.parse_write_options({"includeHeaders": "true"}, streaming=False)


def test_kafka_options_are_all_named_in_one_error() -> None:
    given = {"kafka.bootstrap.servers": "n:9092", "subscribe": "trades", "startingOffsets": "latest"}
    with pytest.raises(rt.InvalidOption) as error:
        parse_options(given)
    assert "kafka.bootstrap.servers → endpoints, the nodes as host:port; subscribe → stream" in str(
        error.value
    )
    assert "startingOffsets →" not in str(error.value)


def test_path_may_be_file_url() -> None:
    for url in ("file:/log", "file:///log"):
        assert parse_options({"path": url}).where == DirectorySource("/log")


def test_connect_timeout_ms_sets_connect_seconds_with_default_5() -> None:
    where = parse_options({**NODES, "connecttimeoutms": "250"}).where
    assert isinstance(where, ClusterSource)
    assert where.connect_seconds == 0.25
    assert ClusterSource(("n:1",), "s", "/ca", "/cert", "/key").connect_seconds == 5


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp"])
def test_ending_options_are_rejected_for_streams(name: str) -> None:
    with pytest.raises(rt.InvalidOption, match=f"{name} is for batch queries"):
        parse_options({**LOG, name: "5"}, streaming=True)


@pytest.mark.parametrize(
    "value", [None, True, 1.0, -1, 2**80, "5", {}, {"position": True}, {"offset": 1}, {"position": 1, "e": 1}]
)
def test_invalid_starting_offsets_are_rejected(value: object) -> None:
    with pytest.raises(rt.InvalidOption, match="startingOffsets cannot be"):
        parse_start("startingOffsets", value)


@pytest.mark.parametrize(
    "value", ["", "{", "5", '{"position": 1}', '{"position": 1, "epoch": 2, "first": -1}']
)
def test_invalid_offset_in_checkpoint_raises_invalid_option(value: str) -> None:
    with pytest.raises(rt.InvalidOption, match="the offset in the checkpoint cannot be"):
        parse_offset("the offset in the checkpoint", value)
