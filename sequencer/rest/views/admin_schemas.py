"""JSON Schemas of the operators' resources: configuration, holds, leases, trims, dedup ids, resets."""

from __future__ import annotations

from typing import Final

from sequencer.rest.base.schema_kinds import TIME, array, choice, flag, number, record, text

CONFIGURATION_KEYS: Final = {
    "rollBytes": "roll_bytes",
    "rollMinutes": "roll_minutes",
    "sessionBytesMax": "session_bytes_max",
    "retentionMinutes": "retention_minutes",
    "retentionBytes": "retention_bytes",
    "retentionDiskPercent": "retention_disk_percent",
    "holdBytesMax": "hold_bytes_max",
    "sessionsMax": "sessions_max",
    "sessionsPerNameMax": "sessions_per_name_max",
    "sessionIdleMinutes": "session_idle_minutes",
}
"""REST field name: attribute of `sequencer.state.state.Configuration`."""

CONFIGURATION: Final = record(
    "The replicated configuration, the same on every node.",
    {
        "rollBytes": number("The merged log rolls to a new segment at this size, in bytes."),
        "rollMinutes": number(
            "The merged log rolls at this age of its segment, in minutes. 0: never by age."
        ),
        "sessionBytesMax": number("Maximum bytes of one session in one merge instruction."),
        "retentionMinutes": number(
            "Segments are trimmed this many minutes after they were sealed. 0: never."
        ),
        "retentionBytes": number(
            "The oldest segments are trimmed above this total, in bytes. 0: never by size."
        ),
        "retentionDiskPercent": number(
            "The oldest segments are trimmed while the disks of a majority are fuller than this, in percent. "
            "0: never by disk usage."
        ),
        "holdBytesMax": number("Maximum bytes kept only for subscribers' holds. 0: holds are ignored."),
        "sessionsMax": number("Maximum open sessions of the cluster."),
        "sessionsPerNameMax": number("Maximum open sessions of one certificate name."),
        "sessionIdleMinutes": number(
            "A session without a publisher for this many minutes is closed. 0: never."
        ),
        "setByNode": array(
            choice("A field name.", [*CONFIGURATION_KEYS]),
            "Fields that this node's own settings set. POST /configuration cannot change them.",
        ),
    },
)

HOLDS: Final = array(
    record(
        "Data that is kept for a named subscriber.",
        {
            "name": text("Name of the subscriber."),
            "position": number("The subscriber has read everything below this position."),
            "lag": number("Messages from there to the end of the merged log."),
            "bytes": number("Approximate bytes of these messages that are kept."),
            "updateTime": text("When the subscriber last acknowledged. RFC 3339."),
            "isOverridden": flag("Whether messages it has not read were trimmed."),
        },
    ),
    "By name.",
)

LEASES: Final = array(
    record(
        "A held lease.",
        {
            "name": text("Name of the lease: its group and its resource."),
            "owner": text("Name in the owner's certificate, possibly with a suffix."),
            "token": number("Fencing token: greater than every earlier token of any lease."),
            "durationSeconds": {
                "type": "number",
                "minimum": 0,
                "description": "The lease expires if it is not renewed for this long, by the leader's clock.",
            },
            "renewals": number("Number of renewals."),
        },
    ),
    "By name.",
)

TRIMMED: Final = record(
    "The result of a trim.",
    {
        "logStart": number("First position that is kept."),
        "segments": number("Number of segments trimmed."),
        "bytes": number("Bytes of these segments."),
        "holdsOverridden": array(text("Subscriber name."), "Subscribers whose holds were overridden."),
    },
)

CLOSED_SESSION: Final = record(
    "A session that is being closed.",
    {
        "session": text("Its name."),
        "id": number("Of the incarnation, in this cluster."),
        "x": number("The start of its publisher of which nothing more is taken."),
    },
)

DEDUP_CLIENTS: Final = array(
    record(
        "Sessions of publishers that send the same messages with the same ids.",
        {
            "dedupId": text("The shared dedup id."),
            "wanted": number("Id of the next message to merge."),
            "sessions": array(
                record(
                    "An incarnation of a session.",
                    {
                        "id": number("Id of the incarnation in this cluster."),
                        "name": text("Name of the session."),
                        "isSuperseded": flag("Whether a newer incarnation replaced it."),
                        "isOpen": flag("Whether it has unmerged messages or may still receive some."),
                        "isConnected": flag("Whether its publisher is connected to this node."),
                        "number": number(
                            "All its messages below this id were merged or dropped as duplicates."
                        ),
                        "lag": number("Number of ids between `number` and `wanted`."),
                    },
                ),
                "By id; ended incarnations included.",
            ),
        },
    ),
    "By dedup id.",
)

RESET_STATUS: Final = record(
    "The last reset that this node knows of.",
    {
        "state": choice("idle: there was no reset.", ["idle", "running", "done", "failed"]),
        "kind": choice("Kind of reset. Empty: there was none.", ["", "soft", "hard"]),
        "epoch": number("The cluster epoch that the reset creates."),
        "startTime": text(f"Start time. {TIME}."),
        "endTime": text(f"End time. {TIME}."),
        "dropped": array(
            record(
                "Messages that were replicated and not merged.",
                {
                    "session": text("Session name."),
                    "sessionId": number("Id of the incarnation."),
                    "x": number("Run number of the session."),
                    "first": number("Number of the first message."),
                    "end": number("One past the number of the last message."),
                },
            ),
            "Messages that a hard reset dropped, by session.",
        ),
        "error": text("Why the reset failed. Empty: it did not fail."),
        "mayLose": text("What a reset without a majority may have lost. Empty: nothing."),
    },
)
