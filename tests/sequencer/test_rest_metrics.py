from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from rest_node import node_view

from sequencer.rest.metrics import Metric, exposition, metrics_of
from sequencer.rest.node_view import Counts, Histogram
from sequencer.rest.syncs import BOUNDS_S, Durations

_VALUE = r"-?(?:\d+(?:\.\d+)?(?:e[+-]\d+)?|\+?Inf|NaN)"
_LABEL = r'[a-z_]+="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(rf"([a-z_]+)(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? ({_VALUE})")


def parsed(text: str) -> dict[str, float]:
    """Samples by name and labels; strict: one HELP, one TYPE, then the samples of that metric alone."""
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


def test_metrics_of_a_node_are_read_by_a_strict_reader_and_by_prometheus_own() -> None:
    counts = Counts(
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
    )

    text = exposition(metrics_of(node_view(counts=counts)))

    found = parsed(text)
    assert found["rt_merged_position"] == 360
    assert found["rt_merge_lag_bytes"] == 0
    assert found["rt_push_bytes_total"] == 900
    assert found['rt_refused_total{at="push",reason="Fenced"}'] == 2
    assert found['rt_http_requests_total{port="rest",status="200"}'] == 7
    assert found['rt_sessions{state="open"}'] == 2
    assert found['rt_peer_connected{peer="n2"}'] == 1
    assert found["rt_raft_term"] == 5
    assert (found["rt_is_leader"], found["rt_has_leader"], found["rt_is_ready"]) == (0, 1, 1)
    assert found["rt_disk_free_bytes"] == 400
    assert found["rt_segments"] == 3
    assert [found[f'rt_fsync_seconds_bucket{{le="{le}"}}'] for le in ("0.1", "1.0", "+Inf")] == [3, 4, 5]
    assert (found["rt_fsync_seconds_sum"], found["rt_fsync_seconds_count"]) == (4.5, 5)
    families = list(text_string_to_metric_families(text))
    theirs = {sample.name for family in families for sample in family.samples}
    assert theirs == {key.partition("{")[0] for key in found}


def test_no_label_names_a_session_or_a_certificate() -> None:
    assert not re.search(r'"(feed|sub|other|op)"', exposition(metrics_of(node_view())))


@given(
    text=st.text(max_size=20).filter(lambda text: "\r" not in text),
    label=st.text(max_size=20).filter(lambda text: "\r" not in text),
    value=st.one_of(st.integers(0, 2**63), st.floats(0, 1e300)),
)
def test_whatever_a_help_or_label_says_is_read_back(text: str, label: str, value: float) -> None:
    told = exposition([Metric("rt_x", "gauge", text, [({"l": label}, value)])])

    (family,) = text_string_to_metric_families(told)
    (sample,) = family.samples
    assert sample.labels == {"l": label}
    assert math.isclose(sample.value, value)
    assert told.count("\n") == 3


@given(st.lists(st.floats(0, 10), max_size=50))
def test_durations_are_counted_by_the_least_bound_that_holds_them(seconds: list[float]) -> None:
    durations = Durations()
    for one in seconds:
        durations.add(one)

    found = durations.histogram()

    for index, bound in enumerate(BOUNDS_S):
        assert sum(found.counts[: index + 1]) == sum(one <= bound for one in seconds)
    assert sum(found.counts) == len(seconds)
    assert found.total == pytest.approx(sum(seconds))
