"""The alert rules are complete, use existing metrics, and fire exactly in their cases."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prom_rules import HELM, check_names, known_metrics, labels_in, names_in, promtool

from sequencer.ipc import silence
from sequencer.rest.views import alarms

RULES_PATH = HELM / "alerts" / "rt.rules.yaml"
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES_PATH.read_text())["groups"]
RULES = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
DAY = 86400
GIB = 1 << 30

Series = dict[str, str]
"""Values by the minute for each name with labels, in the format of promtool's tests."""


def nodes(metric: str, *values: str) -> Series:
    """Return one series for each node."""
    return {f'{metric}{{job="rt",instance="n{number}"}}': value for number, value in enumerate(values, 1)}


def peers(*connected: tuple[str, str, int]) -> Series:
    """Return one series for each (node, peer, whether it is connected)."""
    return {
        f'rt_peer_connected{{job="rt",instance="{node}",peer="{peer}"}}': f"{is_connected}x40"
        for node, peer, is_connected in connected
    }


def disk(free: int, policy: str) -> Series:
    return {
        **nodes("rt_disk_bytes", "1000x40"),
        **nodes("rt_disk_free_bytes", f"{free}x40"),
        **nodes("rt_retention_disk_ratio", f"{policy}x40"),
    }


def certificate(days: float) -> Series:
    return nodes("rt_certificate_expiry_timestamp_seconds", f"{days * DAY + 1200:.0f}x40")


def members(metric: str, values: str) -> Series:
    """Return one series for each node, about the member n3."""
    return {f'{metric}{{job="rt",instance="n{number}",member="n3"}}': values for number in (1, 2)}


def stopped(value: int) -> Series:
    return {
        f'rt_member_stopped{{job="rt",instance="n{number}",member="n3"}}': f"{value}x40" for number in (1, 2)
    }


def queues(metric: str, *values: str, labels: str = "") -> Series:
    """Return one series for each host of streams, about the queue q."""
    return {
        f'{metric}{{job="rt",provider="p",host="h{number}",queue="q"{labels}}}': value
        for number, value in enumerate(values, 1)
    }


ALL = peers(("n1", "n2", 1), ("n1", "n3", 1), ("n2", "n1", 1), ("n2", "n3", 1))
ONE_AWAY = peers(("n1", "n2", 1), ("n1", "n3", 0), ("n2", "n1", 1), ("n2", "n3", 0))
LEADS = nodes("rt_is_leader", "1x40", "0x40")
FIVE = peers(*(("n1", f"n{peer}", int(peer < 5)) for peer in range(2, 6)))

CASES: dict[str, tuple[list[Series], list[Series]]] = {
    "RtNoLeader": (
        [nodes("rt_has_leader", "0x40", "0x40", "0x40")],
        [nodes("rt_has_leader", "0x40", "1x40", "1x40")],
    ),
    "RtStreamSilent": (
        [nodes("rt_has_leader", "1x10 _x30", "0x10 _x30")],
        [nodes("rt_has_leader", "1x10 _x30", "0x40")],
    ),
    "RtLeaderUnknown": ([nodes("rt_has_leader", "0x40", "1x40")], [nodes("rt_has_leader", "1x40", "1x40")]),
    "RtMemberAway": ([ONE_AWAY], [ALL, peers(("n1", "n3", 0), ("n2", "n3", 1))]),
    "RtNoSpareMember": ([{**ONE_AWAY, **LEADS}], [{**ALL, **LEADS}, {**FIVE, **LEADS}, ONE_AWAY]),
    "RtControlDown": ([nodes("rt_control_connected", "0x40")], [nodes("rt_control_connected", "1x40")]),
    "RtDataHung": (
        [members("rt_member_data_silent_seconds", "5x40")],
        [members("rt_member_data_silent_seconds", "2x40")],
    ),
    "RtControlHung": (
        [{**nodes("rt_control_silent_seconds", "5x40"), **nodes("rt_control_connected", "1x40")}],
        [
            {**nodes("rt_control_silent_seconds", "1x40"), **nodes("rt_control_connected", "1x40")},
            {**nodes("rt_control_silent_seconds", "50x40"), **nodes("rt_control_connected", "0x40")},
        ],
    ),
    "RtClockSkew": (
        [
            members("rt_member_clock_skew_seconds", "1.5x40"),
            members("rt_member_clock_skew_seconds", "-1.5x40"),
        ],
        [members("rt_member_clock_skew_seconds", "1x40")],
    ),
    "RtResetRunning": ([nodes("rt_reset_running", "1x40")], [nodes("rt_reset_running", "0x40")]),
    "RtDamageFound": (
        [nodes("rt_last_corruption_timestamp_seconds", "0 600x40")],
        [nodes("rt_last_corruption_timestamp_seconds", f"{-DAY}x40")],
    ),
    "RtNotReady": (
        [nodes("rt_is_ready", "0x40")],
        [nodes("rt_is_ready", "1x40"), nodes("rt_is_ready", "1 0x3 1x40")],
    ),
    "RtMergeStopped": (
        [stopped(1), nodes("rt_merge_stopped", "1x40")],
        [{**stopped(0), **nodes("rt_merge_stopped", "0x40")}],
    ),
    "RtMergeStandsStill": (
        [{**nodes("rt_replication_lag_seconds", "60x40"), **nodes("rt_merge_instructions_total", "7x40")}],
        [
            {
                **nodes("rt_replication_lag_seconds", "60x40"),
                **nodes("rt_merge_instructions_total", "0+5x40"),
            },
            {**nodes("rt_replication_lag_seconds", "0x40"), **nodes("rt_merge_instructions_total", "7x40")},
        ],
    ),
    "RtMergeLag": (
        [nodes("rt_merge_lag_bytes", f"{alarms.MERGE_LAG_BYTES + 1}x40")],
        [nodes("rt_merge_lag_bytes", f"{alarms.MERGE_LAG_BYTES}x40")],
    ),
    "RtReplicationLag": (
        [nodes("rt_replication_lag_seconds", f"{alarms.CLIENT_LAG_S + 1}x40")],
        [nodes("rt_replication_lag_seconds", f"{alarms.CLIENT_LAG_S}x40")],
    ),
    "RtPushStuck": (
        [{'rt_stuck_pushes{job="rt",instance="n1",reason="silent"}': "1x40"}],
        [{'rt_stuck_pushes{job="rt",instance="n1",reason="silent"}': "0x40"}],
    ),
    "RtPublisherSilent": (
        [nodes("rt_silent_publishers", "0x10 1x30")],
        [nodes("rt_silent_publishers", "0x40")],
    ),
    "RtRunCutShort": (
        [nodes("rt_runs_cut_short_total", "0x10 2x30")],
        [nodes("rt_runs_cut_short_total", "2x40")],
    ),
    "RtDiskAbovePolicy": (
        [disk(90, "0.9"), disk(490, "0.5"), disk(90, "0")],
        [disk(110, "0.9"), disk(110, "0"), disk(0, "1")],
    ),
    "RtDiskNearlyFull": ([disk(40, "0.9"), disk(40, "0")], [disk(60, "0.9"), disk(60, "0")]),
    "RtSubscriberOvertaken": (
        [nodes("rt_subscriber_gaps_total", "0x25 1x15")],
        [
            nodes("rt_subscriber_gaps_total", "0x40"),
            nodes("rt_subscriber_gaps_total", "0x3 1x37"),
        ],
    ),
    "RtHoldOverridden": (
        [{'rt_holds{job="rt",instance="n1",state="overridden"}': "1x40"}],
        [{'rt_holds{job="rt",instance="n1",state="overridden"}': "0x40"}],
    ),
    "RtHoldRefused": (
        [nodes("rt_holds_refused", "0x40", "1x40")],
        [nodes("rt_holds_refused", "0x40", "0x40")],
    ),
    "RtHoldLimit": (
        [{**nodes("rt_held_bytes", "8x40"), **nodes("rt_hold_max_bytes", "10x40")}],
        [
            {**nodes("rt_held_bytes", "7x40"), **nodes("rt_hold_max_bytes", "10x40")},
            {**nodes("rt_held_bytes", "11x40"), **nodes("rt_hold_max_bytes", "0x40")},
        ],
    ),
    "RtHoldAboveLimit": (
        [{**nodes("rt_held_bytes", "11x40"), **nodes("rt_hold_max_bytes", "10x40")}],
        [
            {**nodes("rt_held_bytes", "10x40"), **nodes("rt_hold_max_bytes", "10x40")},
            {**nodes("rt_held_bytes", "11x40"), **nodes("rt_hold_max_bytes", "0x40")},
        ],
    ),
    "RtSubscriberLag": (
        [{**nodes("rt_subscriber_lag_bytes", "90x40"), **nodes("rt_retained_bytes", "100x40")}],
        [{**nodes("rt_subscriber_lag_bytes", "70x40"), **nodes("rt_retained_bytes", "100x40")}],
    ),
    "RtStreamHostsSilent": (
        [queues("rt_streams_queue_owned", "1x10 _x30", "0x10 _x30")],
        [queues("rt_streams_queue_owned", "1x10 _x30", "0x40")],
    ),
    "RtQueueUnserved": (
        [queues("rt_streams_queue_owned", "0x40", "1x10 0x30")],
        [queues("rt_streams_queue_owned", "0x40", "1x40"), queues("rt_streams_queue_owned", "1x40 _x5")],
    ),
    "RtQueueFailed": (
        [queues("rt_streams_queue_failed", "0x40", "1x40")],
        [queues("rt_streams_queue_failed", "0x40", "0x40")],
    ),
    "RtQueueLost": (
        [queues("rt_streams_queue_losses_total", "0x25 1x15")],
        [
            queues("rt_streams_queue_losses_total", "3x40"),
            queues("rt_streams_queue_losses_total", "0x3 1x37"),
        ],
    ),
    "RtQueuePaused": (
        [queues("rt_streams_queue_paused", "1x40")],
        [queues("rt_streams_queue_paused", "0x20 1x20")],
    ),
    "RtConsumerStuck": (
        [queues("rt_streams_stuck_consumers", "2x40")],
        [queues("rt_streams_stuck_consumers", "0x40")],
    ),
    "RtConsumerFailing": (
        [queues("rt_streams_failing_consumers", "1x40")],
        [queues("rt_streams_failing_consumers", "0x25 1x15")],
    ),
    "RtSubscriptionFaulted": (
        [queues("rt_streams_consumers", "1x40", labels=',state="faulted"')],
        [
            queues("rt_streams_consumers", "0x40", labels=',state="faulted"'),
            queues("rt_streams_consumers", "1x40", labels=',state="served"'),
        ],
    ),
    "RtSubscriptionUnattended": (
        [queues("rt_streams_consumers", "1x40", labels=',state="unattended"')],
        [queues("rt_streams_consumers", "1x40", labels=',state="served"')],
    ),
    "RtQueueLag": (
        [queues("rt_streams_lag_events", "0+1000x40")],
        [
            queues("rt_streams_lag_events", "50000x40"),
            queues("rt_streams_lag_events", "0+10x40"),
            queues("rt_streams_lag_events", "90000-1000x40"),
        ],
    ),
    "RtDeadLetters": (
        [queues("rt_streams_dead_letters_total", "0x25 1x15")],
        [queues("rt_streams_dead_letters_total", "5x40")],
    ),
    "RtStreamGap": (
        [queues("rt_streams_gaps_total", "0x25 1x15")],
        [queues("rt_streams_gaps_total", "5x40")],
    ),
    "RtStreamReset": (
        [queues("rt_streams_resets_total", "0x25 1x15"), queues("rt_streams_resets_total", "_x20 1x20")],
        [queues("rt_streams_resets_total", "0x40")],
    ),
    "RtOwnerTimeout": (
        [queues("rt_streams_owner_timeouts_total", "0x25 1x15")],
        [queues("rt_streams_owner_timeouts_total", "5x40")],
    ),
    "RtCertificateExpires": ([certificate(13)], [certificate(15), certificate(2)]),
    "RtCertificateExpiresSoon": ([certificate(2), certificate(-1)], [certificate(4)]),
}
"""For each alert: series for which it fires after half an hour, and series for which it does not."""


@pytest.mark.parametrize("name", RULES)
def test_alert_has_severity_summary_and_description(name: str) -> None:
    rule = RULES[name]

    assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
    assert re.fullmatch(r"Rt[A-Z]\w+", name)
    assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
    assert set(rule["annotations"]) == {"summary", "description"}
    assert all(text.endswith(".") for text in rule["annotations"].values())
    assert len(rule["annotations"]["description"]) > 80


@pytest.mark.parametrize("name", RULES)
def test_alert_uses_only_existing_metrics_and_available_labels(name: str) -> None:
    rule = RULES[name]
    check_names(rule["expr"], where=name)

    told = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    grouped = re.findall(r"max by \(([^)]*)\)", rule["expr"])
    left = {label.strip() for group in grouped for label in group.split(",")}
    has_all = not grouped or " or rt_" in rule["expr"]
    of_metrics = {label for metric in names_in(rule["expr"]) for label in known_metrics()[metric]}
    own = {"namespace", "job", "instance"} | of_metrics | labels_in(rule["expr"])
    assert told <= (left | own if has_all else left)


def test_alert_names_are_unique_and_required_metrics_have_alerts() -> None:
    assert sum(len(group["rules"]) for group in GROUPS) == len(RULES)
    assert len({group["name"] for group in GROUPS}) == len(GROUPS)
    assert set(CASES) == set(RULES)
    asked = " ".join(rule["expr"] for rule in RULES.values())
    for metric in (
        *("rt_merge_lag_bytes", "rt_replication_lag_seconds", "rt_has_leader", "rt_member_stopped"),
        *(
            "rt_retention_disk_ratio",
            "rt_certificate_expiry_timestamp_seconds",
            "rt_subscriber_gaps_total",
        ),
    ):
        assert metric in asked


def test_alert_thresholds_match_alarm_thresholds() -> None:
    def number(name: str) -> list[float]:
        return [float(found) for found in re.findall(r"[<>]=? (\d+(?: \* \d+)?)$", RULES[name]["expr"])]

    assert number("RtMergeLag") == [alarms.MERGE_LAG_BYTES]
    assert number("RtReplicationLag") == [alarms.CLIENT_LAG_S]
    assert f">= {alarms.SOON_PERCENT / 100} * max" in RULES["RtHoldLimit"]["expr"]
    for name, seconds in (
        ("RtCertificateExpires", alarms.CERTIFICATE_WARNING_S),
        ("RtCertificateExpiresSoon", alarms.CERTIFICATE_CRITICAL_S),
    ):
        assert f"time() < {seconds // DAY} * {DAY}" in RULES[name]["expr"]
    assert f">= {silence.HUNG_S:g}" in RULES["RtDataHung"]["expr"]
    assert f">= {silence.HUNG_S:g}" in RULES["RtControlHung"]["expr"]
    assert f"> {alarms.CLOCK_SKEW_S:g}" in RULES["RtClockSkew"]["expr"]
    assert f"< {alarms.DAMAGE_S}" in RULES["RtDamageFound"]["expr"]


@pytest.mark.slow
def test_promtool_accepts_alert_rules() -> None:
    done = subprocess.run(
        [promtool(), "check", "rules", RULES_PATH], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


@pytest.mark.slow
def test_alerts_fire_in_bad_cases_and_not_in_good_ones(tmp_path: Path) -> None:
    program = promtool()
    cases = [
        (name, series, is_bad)
        for name, (bad, good) in CASES.items()
        for series, is_bad in [*((one, True) for one in bad), *((one, False) for one in good)]
    ]
    test: dict[str, Any] = {"interval": "1m", "input_series": [], "promql_expr_test": []}
    for number, (name, series, is_bad) in enumerate(cases):
        job = f"case{number}"  # Each case is a separate stream.
        for key, values in series.items():
            key = key.replace('job="rt"', f'job="{job}"')
            test["input_series"].append({"series": key, "values": values})
        expression = f'count(ALERTS{{alertname="{name}",job="{job}",alertstate="firing"}}) > bool 0'
        samples = [{"labels": "{}", "value": 1}] if is_bad else []
        test["promql_expr_test"].append({"expr": expression, "eval_time": "30m", "exp_samples": samples})
    path = tmp_path / "tests.yaml"
    path.write_text(
        json.dumps({"rule_files": [str(RULES_PATH)], "evaluation_interval": "30s", "tests": [test]})
    )

    done = subprocess.run([program, "test", "rules", path], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
