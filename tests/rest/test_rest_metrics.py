"""Prometheus metrics of a node: values, names, units, labels, and the exposition format."""

from __future__ import annotations

import math
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from page_bench import GIB, busy_node, busy_standing, busy_state
from prometheus_client.parser import text_string_to_metric_families
from rest_node import MINUTE, NOW, T0, node_view

from rt.exposition import Histogram, Metric, exposition
from rt.log.format.segment_table import TrimReason
from rt.v1 import sequencer_pb2 as pb
from sequencer.rest.base.node_snapshot import Counts, NodeSnapshot, TrimCounter
from sequencer.rest.views.node_metrics import metrics_of
from sequencer.sessions.sync_timing import BOUNDS_S, Durations
from sequencer.state.apply_result import CommandRejected, SegmentsTrimmed
from sequencer.state.state import SubscriberHold

_VALUE = r"-?(?:\d+(?:\.\d+)?(?:e[+-]\d+)?|\+?Inf|NaN)"
_LABEL = r'[a-z_]+="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(rf"([a-z_]+)(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? ({_VALUE})")
COUNTS = Counts(
    push_bytes=900,
    pull_bytes=700,
    push_streams=1,
    pull_streams=2,
    refused={("push", "Fenced"): 2, ("rest", "CertificateError"): 1},
    requests={("rest", 200): 7},
    syncs=Histogram((0.1, 1.0), (3, 1, 1), 4.5),
    cpu_s=1.25,
    memory_bytes=4096,
    certificate_end_s=1.8e9,
    trims=TrimCounter().after(SegmentsTrimmed(TrimReason.DISK, NOW, 80, 3, 300, ("audit", "export"))),
    overtaken=4,
)


def parsed(text: str) -> dict[str, float]:
    """Samples by name and labels. The parser is strict: one HELP, one TYPE, then only samples of that
    metric.
    """
    found: dict[str, float] = {}
    assert text.endswith("\n")
    lines = text[:-1].split("\n")
    seen: set[str] = set()
    while lines:
        hash_, word, name, _ = lines.pop(0).split(" ", 3)
        assert (hash_, word) == ("#", "HELP")
        hash_, word, typed, kind = lines.pop(0).split(" ")
        assert (hash_, word, typed) == ("#", "TYPE", name)
        assert name not in seen
        seen.add(name)
        assert name.endswith("_total") == (kind == "counter")
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        while lines and not lines[0].startswith("#"):
            sample = _SAMPLE.fullmatch(lines.pop(0))
            assert sample is not None
            assert sample[1] in {f"{name}{suffix}" for suffix in suffixes}
            key = f"{sample[1]}{{{sample[2]}}}" if sample[2] else sample[1]
            assert key not in found
            found[key] = float(sample[3])
    return found


def samples(node: NodeSnapshot) -> dict[str, float]:
    return parsed(exposition(metrics_of(node)))


def blank() -> NodeSnapshot:
    return NodeSnapshot("s", "n1", NOW, T0, pb.Standing())


def test_metrics_are_parsed_by_strict_parser_and_prometheus_parser() -> None:
    text = exposition(metrics_of(node_view(counts=COUNTS)))

    found = parsed(text)
    assert found["rt_merged_position"] == 360
    assert found["rt_merge_lag_bytes"] == 0
    assert found["rt_push_bytes_total"] == 900
    assert found['rt_rejections_total{at="push",reason="Fenced"}'] == 2
    assert found['rt_http_requests_total{port="rest",status="200"}'] == 7
    assert found['rt_sessions{state="open"}'] == 2
    assert found["rt_runs_cut_short_total"] == 3
    assert found['rt_peer_connected{peer="n2"}'] == 1
    assert found["rt_raft_term"] == 5
    assert (found["rt_is_leader"], found["rt_has_leader"], found["rt_is_ready"]) == (0, 1, 1)
    assert found["rt_disk_free_bytes"] == 400
    assert [found[f'rt_fsync_seconds_bucket{{le="{le}"}}'] for le in ("0.1", "1.0", "+Inf")] == [3, 4, 5]
    assert (found["rt_fsync_seconds_sum"], found["rt_fsync_seconds_count"]) == (4.5, 5)
    families = list(text_string_to_metric_families(text))
    theirs = {sample.name for family in families for sample in family.samples}
    assert theirs == {key.partition("{")[0] for key in found}


def test_metrics_report_retained_trimmed_and_held_data() -> None:
    found = samples(busy_node(counts=COUNTS))

    assert (found["rt_log_start_position"], found["rt_retained_segments"]) == (800_000, 33)
    kept = [one.size_bytes for one in busy_state().segments if not one.is_trimmed]
    assert found["rt_retained_bytes"] == sum(kept) + GIB // 8
    assert found["rt_retained_age_seconds"] == (40 - 9) * 4 * 3600 + 1800
    assert found['rt_trimmed_segments_total{reason="disk"}'] == 3
    assert found['rt_trimmed_segments_total{reason="time"}'] == 0
    assert found['rt_trimmed_bytes_total{reason="disk"}'] == 300
    assert (found["rt_retention_seconds"], found["rt_retention_bytes"]) == (7 * 86400, 90 * GIB)
    assert (found["rt_retention_disk_ratio"], found["rt_hold_max_bytes"]) == (0.9, 10 * GIB)
    assert (found['rt_holds{state="whole"}'], found['rt_holds{state="overridden"}']) == (2, 0)
    assert found["rt_hold_lag_messages"] == 1_600_400
    assert found["rt_held_bytes"] == 0
    assert (found["rt_holds_overridden_total"], found["rt_subscriber_gaps_total"]) == (2, 4)


def test_hold_below_log_start_is_counted_as_overridden() -> None:
    state = busy_state()
    state.holds["late"] = SubscriberHold(799_999, NOW)

    found = samples(busy_node(state=state))

    assert (found['rt_holds{state="whole"}'], found['rt_holds{state="overridden"}']) == (2, 1)


def test_held_bytes_count_segments_due_for_trim_without_holds() -> None:
    state = busy_state()
    state.configuration = replace(state.configuration, retention_minutes=5 * 24 * 60)

    found = samples(busy_node(state=state))

    due = [one for one in state.segments if one.sealed_ns <= busy_node().now_ns - 5 * 24 * 60 * MINUTE]
    assert found["rt_held_bytes"] == 0
    state.holds["audit"] = SubscriberHold(800_000, NOW)
    assert samples(busy_node(state=state))["rt_held_bytes"] == sum(one.size_bytes for one in due[8:]) > 0


def test_lag_metrics_report_largest_lag() -> None:
    found = samples(busy_node())

    assert found["rt_replication_lag_messages"] == 900
    assert (found["rt_subscribers"], found["rt_subscriber_lag_messages"]) == (1, 400)
    assert found['rt_member_merge_lag_bytes{member="n1"}'] == 0
    assert found['rt_member_merge_lag_bytes{member="n3"}'] == 900_400 * 9000


def test_metrics_report_stopped_member_and_phase_progress() -> None:
    standing = busy_standing()
    for one in standing.nodes:
        if one.name == "n1":
            one.summary.step, one.summary.step_done, one.summary.step_total = "copying", 1, 4
        if one.name == "n3":
            one.summary.merged.stopped = "differs"

    found = samples(busy_node(standing=standing))

    assert [found[f'rt_member_stopped{{member="{name}"}}'] for name in ("n1", "n2", "n3")] == [0, 0, 1]
    assert (found['rt_node_phase{phase="copying"}'], found['rt_node_phase{phase="ready"}']) == (1, 0)
    assert found["rt_node_phase_progress_ratio"] == 0.25


def test_metric_names_are_the_same_for_blank_and_busy_node() -> None:
    def names(node: NodeSnapshot) -> list[str]:
        return [metric.name for metric in metrics_of(node)]

    assert names(blank()) == names(node_view()) == names(busy_node(counts=COUNTS))


def test_metric_names_end_in_their_unit() -> None:
    measured = {"bytes", "messages", "seconds", "ratio", "position", "segments"}

    for metric in metrics_of(busy_node(counts=COUNTS)):
        assert metric.name.startswith(("rt_", "process_"))
        assert metric.unit
        assert (metric.unit == "0 or 1") <= (metric.kind == "gauge")
        if metric.unit in measured:
            assert metric.name.removesuffix("_total").endswith(f"_{metric.unit}"), metric.name


@pytest.mark.slow
def test_promtool_check_reports_no_problems() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here: on Debian, apt-get install prometheus")
    text = exposition(metrics_of(busy_node(counts=COUNTS)))

    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_metric_labels_contain_no_session_subscriber_or_certificate_names() -> None:
    assert not re.search(r'"(feed|sub|other|op|d1)"', exposition(metrics_of(node_view())))
    assert not re.search(r'"(quotes|audit|export|desk|d1|trades:.*)"', exposition(metrics_of(busy_node())))


def test_trim_counter_adds_trims_by_reason_and_ignores_rejected_commands() -> None:
    first = SegmentsTrimmed(TrimReason.TIME, NOW, 10, 1, 100, ())
    second = SegmentsTrimmed(TrimReason.TIME, NOW, 40, 3, 300, ("a",))
    third = SegmentsTrimmed(TrimReason.DISK, NOW, 50, 1, 70, ("a", "b"))
    found = TrimCounter()

    for outcome in (first, CommandRejected("no"), second, third):
        found = found.after(outcome)

    assert dict(found.segments) == {TrimReason.TIME: 4, TrimReason.DISK: 1}
    assert dict(found.size_bytes) == {TrimReason.TIME: 400, TrimReason.DISK: 70}
    assert found.overridden == 3


@given(
    text=st.text(max_size=20).filter(lambda text: "\r" not in text),
    label=st.text(max_size=20).filter(lambda text: "\r" not in text),
    value=st.one_of(st.integers(0, 2**63), st.floats(0, 1e300)),
)
def test_label_and_value_round_trip_through_exposition_with_any_help_text(
    text: str, label: str, value: float
) -> None:
    told = exposition([Metric("rt_x", text, ("l",), {(label,): value})])

    (family,) = text_string_to_metric_families(told)
    (sample,) = family.samples
    assert sample.labels == {"l": label}
    assert math.isclose(sample.value, value)
    assert told.count("\n") == 3


@given(st.lists(st.floats(0, 10), max_size=50))
def test_durations_are_counted_in_smallest_fitting_bucket(seconds: list[float]) -> None:
    durations = Durations()
    for one in seconds:
        durations.add(one)

    found = durations.histogram()

    for index, bound in enumerate(BOUNDS_S):
        assert sum(found.counts[: index + 1]) == sum(one <= bound for one in seconds)
    assert sum(found.counts) == len(seconds)
    assert found.total == pytest.approx(sum(seconds))
