from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Place(_message.Message):
    __slots__ = ("run", "roll", "offset")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    run: int
    roll: int
    offset: int
    def __init__(self, run: _Optional[int] = ..., roll: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("place", "data")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    place: Place
    data: bytes
    def __init__(self, place: _Optional[_Union[Place, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("place", "end", "is_last_of_run", "sealed_ns")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_OF_RUN_FIELD_NUMBER: _ClassVar[int]
    SEALED_NS_FIELD_NUMBER: _ClassVar[int]
    place: Place
    end: int
    is_last_of_run: bool
    sealed_ns: int
    def __init__(self, place: _Optional[_Union[Place, _Mapping]] = ..., end: _Optional[int] = ..., is_last_of_run: _Optional[bool] = ..., sealed_ns: _Optional[int] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("hello", "run", "chunk", "sealed", "whole_runs", "status")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    WHOLE_RUNS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    hello: PushHello
    run: Run
    chunk: Chunk
    sealed: Sealed
    whole_runs: WholeRuns
    status: PushStatus
    def __init__(self, hello: _Optional[_Union[PushHello, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., whole_runs: _Optional[_Union[WholeRuns, _Mapping]] = ..., status: _Optional[_Union[PushStatus, _Mapping]] = ...) -> None: ...

class PushStatus(_message.Message):
    __slots__ = ("waiting_bytes", "stalled_ms", "silence_limit")
    WAITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    STALLED_MS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    waiting_bytes: int
    stalled_ms: int
    silence_limit: SilenceLimit
    def __init__(self, waiting_bytes: _Optional[int] = ..., stalled_ms: _Optional[int] = ..., silence_limit: _Optional[_Union[SilenceLimit, _Mapping]] = ...) -> None: ...

class SilenceLimit(_message.Message):
    __slots__ = ("run", "milliseconds")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    run: int
    milliseconds: int
    def __init__(self, run: _Optional[int] = ..., milliseconds: _Optional[int] = ...) -> None: ...

class WholeRuns(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[WholeRun]
    def __init__(self, runs: _Optional[_Iterable[_Union[WholeRun, _Mapping]]] = ...) -> None: ...

class WholeRun(_message.Message):
    __slots__ = ("run", "run_id", "data", "end", "sealed_ns")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SEALED_NS_FIELD_NUMBER: _ClassVar[int]
    run: int
    run_id: bytes
    data: bytes
    end: int
    sealed_ns: int
    def __init__(self, run: _Optional[int] = ..., run_id: _Optional[bytes] = ..., data: _Optional[bytes] = ..., end: _Optional[int] = ..., sealed_ns: _Optional[int] = ...) -> None: ...

class PushHello(_message.Message):
    __slots__ = ("version", "stream", "session", "incarnation", "dedup_id", "cluster", "version_latest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEDUP_ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_LATEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    stream: str
    session: str
    incarnation: bytes
    dedup_id: str
    cluster: bytes
    version_latest: int
    def __init__(self, version: _Optional[int] = ..., stream: _Optional[str] = ..., session: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., dedup_id: _Optional[str] = ..., cluster: _Optional[bytes] = ..., version_latest: _Optional[int] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("run", "run_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run: int
    run_id: bytes
    def __init__(self, run: _Optional[int] = ..., run_id: _Optional[bytes] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("start", "opened", "progress", "silence_limit")
    START_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    start: PushStart
    opened: RunOpened
    progress: Progress
    silence_limit: SilenceLimit
    def __init__(self, start: _Optional[_Union[PushStart, _Mapping]] = ..., opened: _Optional[_Union[RunOpened, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., silence_limit: _Optional[_Union[SilenceLimit, _Mapping]] = ...) -> None: ...

class PushStart(_message.Message):
    __slots__ = ("cluster", "epoch", "members", "node", "place", "has_place", "takes_status", "silence_limit", "version", "nodes")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    HAS_PLACE_FIELD_NUMBER: _ClassVar[int]
    TAKES_STATUS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    cluster: bytes
    epoch: int
    members: int
    node: str
    place: Place
    has_place: bool
    takes_status: bool
    silence_limit: SilenceLimit
    version: int
    nodes: KnownNodes
    def __init__(self, cluster: _Optional[bytes] = ..., epoch: _Optional[int] = ..., members: _Optional[int] = ..., node: _Optional[str] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., has_place: _Optional[bool] = ..., takes_status: _Optional[bool] = ..., silence_limit: _Optional[_Union[SilenceLimit, _Mapping]] = ..., version: _Optional[int] = ..., nodes: _Optional[_Union[KnownNodes, _Mapping]] = ...) -> None: ...

class KnownNodes(_message.Message):
    __slots__ = ("nodes", "version")
    NODES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[KnownNode]
    version: int
    def __init__(self, nodes: _Optional[_Iterable[_Union[KnownNode, _Mapping]]] = ..., version: _Optional[int] = ...) -> None: ...

class KnownNode(_message.Message):
    __slots__ = ("name", "endpoint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    endpoint: str
    def __init__(self, name: _Optional[str] = ..., endpoint: _Optional[str] = ...) -> None: ...

class RunOpened(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: int
    def __init__(self, run: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("durable", "durable_number", "merged_run", "merged_number", "merged")
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    DURABLE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    MERGED_RUN_FIELD_NUMBER: _ClassVar[int]
    MERGED_NUMBER_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    durable: Place
    durable_number: int
    merged_run: int
    merged_number: int
    merged: Place
    def __init__(self, durable: _Optional[_Union[Place, _Mapping]] = ..., durable_number: _Optional[int] = ..., merged_run: _Optional[int] = ..., merged_number: _Optional[int] = ..., merged: _Optional[_Union[Place, _Mapping]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("hello", "progress", "acknowledged")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    hello: PullHello
    progress: PullProgress
    acknowledged: Acknowledged
    def __init__(self, hello: _Optional[_Union[PullHello, _Mapping]] = ..., progress: _Optional[_Union[PullProgress, _Mapping]] = ..., acknowledged: _Optional[_Union[Acknowledged, _Mapping]] = ...) -> None: ...

class PullHello(_message.Message):
    __slots__ = ("version", "stream", "merged", "session", "version_latest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_LATEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    stream: str
    merged: PullMerged
    session: PullSession
    version_latest: int
    def __init__(self, version: _Optional[int] = ..., stream: _Optional[str] = ..., merged: _Optional[_Union[PullMerged, _Mapping]] = ..., session: _Optional[_Union[PullSession, _Mapping]] = ..., version_latest: _Optional[int] = ...) -> None: ...

class PullMerged(_message.Message):
    __slots__ = ("cluster", "place", "has_place", "end", "chain", "from_position", "from_latest", "from_timestamp_ns", "topics", "name", "acknowledged", "range")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    HAS_PLACE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    FROM_LATEST_FIELD_NUMBER: _ClassVar[int]
    FROM_TIMESTAMP_NS_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    cluster: bytes
    place: Place
    has_place: bool
    end: int
    chain: int
    from_position: int
    from_latest: bool
    from_timestamp_ns: int
    topics: _containers.RepeatedScalarFieldContainer[str]
    name: str
    acknowledged: Acknowledged
    range: PullRange
    def __init__(self, cluster: _Optional[bytes] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., has_place: _Optional[bool] = ..., end: _Optional[int] = ..., chain: _Optional[int] = ..., from_position: _Optional[int] = ..., from_latest: _Optional[bool] = ..., from_timestamp_ns: _Optional[int] = ..., topics: _Optional[_Iterable[str]] = ..., name: _Optional[str] = ..., acknowledged: _Optional[_Union[Acknowledged, _Mapping]] = ..., range: _Optional[_Union[PullRange, _Mapping]] = ...) -> None: ...

class Acknowledged(_message.Message):
    __slots__ = ("name", "position")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    name: str
    position: int
    def __init__(self, name: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class PullRange(_message.Message):
    __slots__ = ("end", "outline_bytes")
    END_FIELD_NUMBER: _ClassVar[int]
    OUTLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    end: int
    outline_bytes: int
    def __init__(self, end: _Optional[int] = ..., outline_bytes: _Optional[int] = ...) -> None: ...

class PullSession(_message.Message):
    __slots__ = ("session_id", "place", "chain")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    place: Place
    chain: int
    def __init__(self, session_id: _Optional[int] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., chain: _Optional[int] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("start", "chunk", "sealed", "trimmed", "complete", "hold_refused", "outline")
    START_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    HOLD_REFUSED_FIELD_NUMBER: _ClassVar[int]
    OUTLINE_FIELD_NUMBER: _ClassVar[int]
    start: PullStart
    chunk: Chunk
    sealed: Sealed
    trimmed: Trimmed
    complete: CompleteUpTo
    hold_refused: HoldRefused
    outline: Outline
    def __init__(self, start: _Optional[_Union[PullStart, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., trimmed: _Optional[_Union[Trimmed, _Mapping]] = ..., complete: _Optional[_Union[CompleteUpTo, _Mapping]] = ..., hold_refused: _Optional[_Union[HoldRefused, _Mapping]] = ..., outline: _Optional[_Union[Outline, _Mapping]] = ...) -> None: ...

class PullStart(_message.Message):
    __slots__ = ("cluster", "epoch", "node", "place", "first", "session", "dedup_id", "end", "found", "version", "nodes")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DEDUP_ID_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    cluster: bytes
    epoch: int
    node: str
    place: Place
    first: int
    session: str
    dedup_id: str
    end: int
    found: TimeFound
    version: int
    nodes: KnownNodes
    def __init__(self, cluster: _Optional[bytes] = ..., epoch: _Optional[int] = ..., node: _Optional[str] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., first: _Optional[int] = ..., session: _Optional[str] = ..., dedup_id: _Optional[str] = ..., end: _Optional[int] = ..., found: _Optional[_Union[TimeFound, _Mapping]] = ..., version: _Optional[int] = ..., nodes: _Optional[_Union[KnownNodes, _Mapping]] = ...) -> None: ...

class TimeFound(_message.Message):
    __slots__ = ("position", "is_message")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IS_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    position: int
    is_message: bool
    def __init__(self, position: _Optional[int] = ..., is_message: _Optional[bool] = ...) -> None: ...

class Trimmed(_message.Message):
    __slots__ = ("run", "roll", "log_start", "reason")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    LOG_START_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run: int
    roll: int
    log_start: int
    reason: int
    def __init__(self, run: _Optional[int] = ..., roll: _Optional[int] = ..., log_start: _Optional[int] = ..., reason: _Optional[int] = ...) -> None: ...

class HoldRefused(_message.Message):
    __slots__ = ("name", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    why: str
    def __init__(self, name: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class CompleteUpTo(_message.Message):
    __slots__ = ("position",)
    POSITION_FIELD_NUMBER: _ClassVar[int]
    position: int
    def __init__(self, position: _Optional[int] = ...) -> None: ...

class Outline(_message.Message):
    __slots__ = ("waypoints",)
    WAYPOINTS_FIELD_NUMBER: _ClassVar[int]
    waypoints: _containers.RepeatedCompositeFieldContainer[Waypoint]
    def __init__(self, waypoints: _Optional[_Iterable[_Union[Waypoint, _Mapping]]] = ...) -> None: ...

class Waypoint(_message.Message):
    __slots__ = ("position", "log_bytes", "timestamp_high_ns")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_HIGH_NS_FIELD_NUMBER: _ClassVar[int]
    position: int
    log_bytes: int
    timestamp_high_ns: int
    def __init__(self, position: _Optional[int] = ..., log_bytes: _Optional[int] = ..., timestamp_high_ns: _Optional[int] = ...) -> None: ...

class PullProgress(_message.Message):
    __slots__ = ("position", "is_synced")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IS_SYNCED_FIELD_NUMBER: _ClassVar[int]
    position: int
    is_synced: bool
    def __init__(self, position: _Optional[int] = ..., is_synced: _Optional[bool] = ...) -> None: ...
