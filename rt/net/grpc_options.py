"""The options of every gRPC server and channel of rt, each with its reason. Pure.

gRPC's own defaults detect a silent peer after minutes or never, let a second process share the port, wait up
to two minutes between attempts to connect, and let a client that connects and sends nothing keep a descriptor
indefinitely. The ciphers are read from the environment: see `rt/v1/__init__.py`.

Measured with streams of 1 MiB messages over loopback and mutual TLS, grpc.aio at both ends on two cores,
about 3 CPU-seconds a GB: look-ahead (512 KiB to 16 MiB), bdp_probe, frame size, write buffer, read chunk, TLS
frame size, preferred frame size and optimization_target make no difference above the noise. So the options
here serve safety, and the others have their defaults. `memory_guard.keep_freed_memory` did help.
"""

from __future__ import annotations

from typing import TypeAlias

Options: TypeAlias = tuple[tuple[str, int], ...]

CHUNK_BYTES_MAX = 2**20
"""Payload of one message. Measured: 256 KiB costs about the same, 4 MiB more."""

MESSAGE_BYTES_MAX = CHUNK_BYTES_MAX + 2**16
"""A chunk and its message. Also limits compressed messages, before they are expanded completely."""

METADATA_BYTES_MAX = 2**14
"""All headers or trailers of a call; ours have at most 6 KiB. More ends the call."""

KEEPALIVE_MS = 1000
UNACKNOWLEDGED_MS_MAX = 3000
PING_TIMEOUT_MS = 10_000
"""A peer that is silent for `KEEPALIVE_MS` gets a ping. If its kernel does not acknowledge the ping, because
the network or the machine is down, the connection ends within `UNACKNOWLEDGED_MS_MAX` (TCP_USER_TIMEOUT;
`keepalive_timeout_ms` bounds nothing else). If only the process does not answer, because it is stopped, the
connection ends within `PING_TIMEOUT_MS` (gRPC's default: a minute). That is longer, because the ping waits
for up to a window of data sent before it. So links down to `WINDOW_BYTES` per `PING_TIMEOUT_MS` (3 Mbit/s)
work.
"""

HANDSHAKE_TIMEOUT_MS = 5000
"""From accepting a connection to the end of its TLS handshake; then its descriptor is free again."""

CONNECTIONS_MAX = 1024
"""An idle connection takes 40 to 80 KiB: tests/cluster/test_hostile_memory.py."""
STREAMS_PER_CONNECTION_MAX = 128
"""Concurrent calls of one connection; more wait at the peer. `StreamCaps` counts over all connections."""

PENDING_CALLS_MAX = 256
"""Calls that no handler has started to serve; more are rejected."""

WINDOW_BYTES = 4 * 2**20
"""Bytes a server may send before a client reads them: 40 MB/s at 100 ms round trip. Bounds memory."""

SERVER_WINDOW_BYTES = 2**16
"""Bytes a client may send before a server reads them. Each stream of each client can occupy it. While the
server reads, gRPC accepts the whole message: 1 MiB in two round trips, 5 MB/s at 100 ms.
"""

CONNECTION_AGE_MS = 3600 * 1000
CONNECTION_AGE_GRACE_MS = 60 * 1000
"""A connection keeps the certificates of its handshake, so it ends after about an hour. Calls that have not
ended after the grace end with UNAVAILABLE, and are repeated on a new connection.
"""

CONNECTION_IDLE_MS = 60 * 1000
"""A connection without calls is closed after this; its client opens another one when necessary."""

CONNECT_TIMEOUT_MS = 3000
BACKOFF_MS_MIN = 100
BACKOFF_MS_MAX = 1000
"""Maximum pause between attempts to connect (gRPC adds jitter). Clients reconnect within 2 s after an outage
(default: 2 min).
"""

_BOTH: Options = (
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),  # else sizes between the two fail at random
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", UNACKNOWLEDGED_MS_MAX),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),  # else a quiet stream gets two pings and then none
    # The window is fixed. Otherwise gRPC sends more pings to measure the link. On a slow link they wait
    # longer than PING_TIMEOUT_MS for the data before them.
    ("grpc.http2.bdp_probe", 0),
)


def server_options(*, handshake_timeout_ms: int = HANDSHAKE_TIMEOUT_MS) -> Options:
    return (
        *_BOTH,
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.http2.lookahead_bytes", SERVER_WINDOW_BYTES),
        ("grpc.so_reuseport", 0),  # else a second process gets a share of the connections, silently
        ("grpc.server_handshake_timeout_ms", handshake_timeout_ms),
        ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
        ("grpc.server.max_pending_requests", PENDING_CALLS_MAX),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS_MAX),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
        ("grpc.max_connection_age_ms", CONNECTION_AGE_MS),
        ("grpc.max_connection_idle_ms", CONNECTION_IDLE_MS),
        ("grpc.max_connection_age_grace_ms", CONNECTION_AGE_GRACE_MS),
        # Clients ping every KEEPALIVE_MS. A server that allows fewer ends the connection: "too many pings".
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 2),  # a flood of pings ends the connection
    )


def channel_options(
    *, message_bytes_max: int = MESSAGE_BYTES_MAX, window_bytes: int = WINDOW_BYTES
) -> Options:
    return (
        *_BOTH,
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.http2.lookahead_bytes", window_bytes),
        ("grpc.initial_reconnect_backoff_ms", BACKOFF_MS_MIN),
        ("grpc.max_reconnect_backoff_ms", BACKOFF_MS_MAX),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # despite its name, it bounds one attempt
        ("grpc.dns_min_time_between_resolutions_ms", BACKOFF_MS_MAX),  # finds moved nodes (default 30 s)
        ("grpc.use_local_subchannel_pool", 1),  # never reuse a connection of the old certificate
        ("grpc.enable_retries", 0),  # rt repeats calls from the receiver's position; gRPC keeps no copies
        ("grpc.enable_http_proxy", 0),  # http_proxy of the environment is for the web
        ("grpc.service_config_disable_resolution", 1),  # DNS gives addresses only, no configuration
    )
