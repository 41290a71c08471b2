"""What is told of what operators decide on: configuration, holds, trims, dedup ids, resets. Pure."""

from __future__ import annotations

from typing import Final

from sequencer.rest.schema_kinds import TIME, array, choice, flag, number, record, text

CONFIGURATION_KEYS: Final = {
    "rollBytes": "roll_bytes",
    "rollMinutes": "roll_minutes",
    "sessionBytesMax": "session_bytes_max",
    "timeMinutes": "time_minutes",
    "limit": "limit_bytes",
    "diskPercent": "disk_percent",
    "holdLimit": "hold_limit_bytes",
}
"""What the fields of a configuration are called in `sequencer.state.Configuration`."""

CONFIGURATION: Final = record(
    "What commands change, the same on every node.",
    {
        "rollBytes": number("A merged segment is followed by the next at that size."),
        "rollMinutes": number("And at that age; 0: never by age."),
        "sessionBytesMax": number("Most bytes of one session in one instruction."),
        "timeMinutes": number("Segments are trimmed so long after they were sealed; 0: never by age."),
        "limit": number("So are the oldest while more bytes are kept; 0: never by size."),
        "diskPercent": number("And while most disks are fuller; 0: never for want of space."),
        "holdLimit": number("Most bytes that are kept for subscribers' holds alone; 0: none."),
        "setByNode": array(
            choice("A field of these.", [*CONFIGURATION_KEYS]),
            "What the settings of the node that answers say, so that it cannot be changed by request.",
        ),
    },
)

HOLDS: Final = array(
    record(
        "What a named subscriber wants to be kept.",
        {
            "name": text("Of the subscriber."),
            "position": number("It has everything below."),
            "lag": number("Messages behind that, up to the end of the merged log."),
            "bytes": number("About how many bytes of them are kept."),
            "updateTime": text("When it last said so, RFC 3339."),
            "isOverridden": flag("Whether some of what it wants was trimmed."),
        },
    ),
    "By name.",
)

LEASES: Final = array(
    record(
        "A lease that is held.",
        {
            "name": text("Its group, and what it is for."),
            "owner": text("Name in the certificate of its owner, or that with a suffix."),
            "token": number("Greater than every one that was given before, of whatever lease."),
            "durationSeconds": {
                "type": "number",
                "minimum": 0,
                "description": "It lapses when it is not renewed for so long, by the leader's clock.",
            },
            "renewals": number("How often its time began anew."),
        },
    ),
    "By name.",
)

TRIMMED: Final = record(
    "What was trimmed.",
    {
        "logStart": number("The first position that is kept."),
        "segments": number("How many went."),
        "bytes": number("Of these."),
        "holdsOverridden": array(text("Its name."), "The subscribers for whom some of it was held back."),
    },
)

DEDUP_CLIENTS: Final = array(
    record(
        "Publishers that send the same messages with the same ids.",
        {
            "dedupId": text("The dedup id that they share."),
            "wanted": number("The id of the next message that is merged."),
            "sessions": array(
                record(
                    "An incarnation of a session.",
                    {
                        "id": number("Of the incarnation, in this cluster."),
                        "name": text("Of the session."),
                        "isSuperseded": flag("A newer incarnation took over."),
                        "isOpen": flag("Whether anything of it is still to be merged or to come."),
                        "isConnected": flag("Whether its publisher pushes to the node that answers."),
                        "number": number("Everything below that id is merged of it, or was left out."),
                        "lag": number("Ids that it is behind `wanted`."),
                    },
                ),
                "By id; also those that ended.",
            ),
        },
    ),
    "By dedup id.",
)

RESET_STATUS: Final = record(
    "The last reset that the node that answers knows of.",
    {
        "state": choice("idle: there was none.", ["idle", "running", "done", "failed"]),
        "kind": choice("Empty: there was none.", ["", "soft", "hard"]),
        "epoch": number("Of the cluster: the one that the reset makes."),
        "startTime": text(f"When it began. {TIME}."),
        "endTime": text(f"When it ended. {TIME}."),
        "dropped": array(
            record(
                "Messages that were replicated and not merged.",
                {
                    "session": text("Its name."),
                    "sessionId": number("Of the incarnation."),
                    "x": number("Session number."),
                    "first": number("The number of the first one."),
                    "end": number("One past that of the last one."),
                },
            ),
            "What a hard reset dropped, by session.",
        ),
        "error": text("Why it failed; empty: it did not."),
        "mayLose": text("What one without a majority may have lost; empty: nothing."),
    },
)
