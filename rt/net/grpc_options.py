"""The options of every gRPC server and channel of rt, each with its reason. Pure.

gRPC's own defaults notice a peer that has fallen silent after minutes or never, let a second process share
the port, wait up to two minutes between attempts to connect, and let whoever connects without a word hold a
descriptor for as long as he likes. The ciphers, which are no option but read from the environment, stand in
`rt/v1/__init__.py`.

Measured with streams of 1 MiB messages over loopback and mutual TLS, grpc.aio at both ends on two cores,
about 3 CPU-seconds a GB: look-ahead (512 KiB to 16 MiB), measuring the link or not, frame size, write buffer,
read chunk, TLS frame size, preferred frame size and optimization_target all lie within the noise. So what
is set here is set for safety, and the rest left alone. What did help is `rpc.keep_freed_memory`.
"""

from __future__ import annotations

from typing import TypeAlias

Options: TypeAlias = tuple[tuple[str, int], ...]

CHUNK_BYTES_MAX = 2**20
"""Payload of one message. Measured: 256 KiB costs about the same, 4 MiB more."""

MESSAGE_BYTES_MAX = CHUNK_BYTES_MAX + 2**16
"""A chunk and what stands around it. Compressed messages are held to it as well, before they are unpacked
whole."""

METADATA_BYTES_MAX = 2**14
"""All headers or trailers of a call; ours take 6 KiB at most. More ends the call."""

KEEPALIVE_MS = 1000
UNACKNOWLEDGED_MS_MAX = 3000
PING_TIMEOUT_MS = 10_000
"""A peer that says nothing for `KEEPALIVE_MS` is asked. If its kernel does not acknowledge that either,
because the network or the machine is gone, the connection ends within `UNACKNOWLEDGED_MS_MAX`
(TCP_USER_TIMEOUT; what else `keepalive_timeout_ms` claims to bound it does not). If only the process does
not answer, because it is stopped, it ends within `PING_TIMEOUT_MS` (gRPC's default: a minute). That is
longer, as the question waits behind the data that was sent before it: up to a window of it, so links down
to `WINDOW_BYTES` per `PING_TIMEOUT_MS` (3 Mbit/s) carry both.
"""

HANDSHAKE_TIMEOUT_MS = 5000
"""From accepting a connection to the end of its TLS handshake; then its descriptor is free again."""

CONNECTIONS_MAX = 4096
STREAMS_PER_CONNECTION_MAX = 128
"""Calls of one connection at once; more wait at the peer. `rpc.StreamCaps` counts over a peer's
connections."""

WINDOW_BYTES = 4 * 2**20
"""What a server may send ahead of what a client's reader took: 40 MB/s at 100 ms round trip. Bounds
memory."""

SERVER_WINDOW_BYTES = 2**19
"""The same of a client and a server's reader. It is taken for each stream of each client, whether the server
reads or not. While the server reads, gRPC lets the whole message come: 1 MiB in a round trip, 10 MB/s at
100 ms. Measured over loopback: 512 KiB is as fast as 4 MiB."""

CONNECTION_AGE_MS = 3600 * 1000
CONNECTION_AGE_GRACE_MS = 60 * 1000
"""A connection lives with the certificates of its handshake. So it ends after about an hour: its calls have
the grace to end, and then end with UNAVAILABLE and are made again on a new one."""

CONNECTION_IDLE_MS = 5 * 60 * 1000
"""A connection without calls is closed after this; its client opens another when it needs one."""

CONNECT_TIMEOUT_MS = 3000
BACKOFF_MS_MIN = 100
BACKOFF_MS_MAX = 1000
"""Between attempts to connect (gRPC adds jitter): back within two seconds after any outage (default: two
minutes)."""

_BOTH: Options = (
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),  # else a random share between the two is refused
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", UNACKNOWLEDGED_MS_MAX),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),  # else a quiet stream is pinged twice and then never again
    # The window is fixed. gRPC would measure the link with pings of its own, which on a slow link wait behind
    # the data that they measure for longer than PING_TIMEOUT_MS.
    ("grpc.http2.bdp_probe", 0),
)


def server_options(*, handshake_timeout_ms: int = HANDSHAKE_TIMEOUT_MS) -> Options:
    """What a server is made with."""
    return (
        *_BOTH,
        *_held_to(MESSAGE_BYTES_MAX),
        ("grpc.http2.lookahead_bytes", SERVER_WINDOW_BYTES),
        ("grpc.so_reuseport", 0),  # else a second process gets a share of the connections, silently
        ("grpc.server_handshake_timeout_ms", handshake_timeout_ms),
        ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
        ("grpc.max_connection_age_ms", CONNECTION_AGE_MS),
        ("grpc.max_connection_idle_ms", CONNECTION_IDLE_MS),
        ("grpc.max_connection_age_grace_ms", CONNECTION_AGE_GRACE_MS),
        # Clients ask every KEEPALIVE_MS; a server that expects less of it ends the connection: "too many
        # pings".
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 2),  # a flood of pings ends the connection
    )


def channel_options(*, message_bytes_max: int = MESSAGE_BYTES_MAX) -> Options:
    """What a channel is made with."""
    return (
        *_BOTH,
        *_held_to(message_bytes_max),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.initial_reconnect_backoff_ms", BACKOFF_MS_MIN),
        ("grpc.max_reconnect_backoff_ms", BACKOFF_MS_MAX),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # by its name; it bounds one attempt
        (
            "grpc.dns_min_time_between_resolutions_ms",
            BACKOFF_MS_MAX,
        ),  # a node that moved is found (default 30 s)
        (
            "grpc.use_local_subchannel_pool",
            1,
        ),  # a new channel never takes over a connection of the old certificate
        (
            "grpc.enable_retries",
            0,
        ),  # a call is made again here, from where the receiver says; no copies for it
        ("grpc.enable_http_proxy", 0),  # http_proxy of the environment is for the web
        ("grpc.service_config_disable_resolution", 1),  # DNS says where, never how
    )


def _held_to(message_bytes_max: int) -> Options:
    """For what is received. Where more is sent, grpc.aio would end the call without saying why."""
    return (("grpc.max_receive_message_length", message_bytes_max),)
