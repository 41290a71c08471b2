from rt.v1 import leases_pb2 as _leases_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Command(_message.Message):
    __slots__ = ("version", "merge", "open", "fence", "close", "roll", "configure", "join", "restore", "trim", "hold", "release", "reset", "ask", "decide", "acquire_leases", "renew_leases", "release_leases", "expire_leases", "close_session", "forget", "open_sealed", "limit_silence", "reset_group", "write_table", "delete_table", "post_request", "raise_feature_level", "request_members", "cancel_members", "settle_members")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    TRIM_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    DECIDE_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_LEASES_FIELD_NUMBER: _ClassVar[int]
    RENEW_LEASES_FIELD_NUMBER: _ClassVar[int]
    RELEASE_LEASES_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_LEASES_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SESSION_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    OPEN_SEALED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SILENCE_FIELD_NUMBER: _ClassVar[int]
    RESET_GROUP_FIELD_NUMBER: _ClassVar[int]
    WRITE_TABLE_FIELD_NUMBER: _ClassVar[int]
    DELETE_TABLE_FIELD_NUMBER: _ClassVar[int]
    POST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    RAISE_FEATURE_LEVEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SETTLE_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    merge: Merge
    open: Open
    fence: Fence
    close: Close
    roll: Roll
    configure: Configure
    join: Join
    restore: Restore
    trim: Trim
    hold: Hold
    release: Release
    reset: Reset
    ask: Ask
    decide: Decide
    acquire_leases: AcquireLeases
    renew_leases: RenewLeases
    release_leases: ReleaseLeases
    expire_leases: ExpireLeases
    close_session: CloseSession
    forget: Forget
    open_sealed: OpenSealed
    limit_silence: LimitSilence
    reset_group: ResetGroup
    write_table: WriteTable
    delete_table: DeleteTable
    post_request: PostRequest
    raise_feature_level: RaiseFeatureLevel
    request_members: RequestMembers
    cancel_members: CancelMembers
    settle_members: SettleMembers
    def __init__(self, version: _Optional[int] = ..., merge: _Optional[_Union[Merge, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., roll: _Optional[_Union[Roll, _Mapping]] = ..., configure: _Optional[_Union[Configure, _Mapping]] = ..., join: _Optional[_Union[Join, _Mapping]] = ..., restore: _Optional[_Union[Restore, _Mapping]] = ..., trim: _Optional[_Union[Trim, _Mapping]] = ..., hold: _Optional[_Union[Hold, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., reset: _Optional[_Union[Reset, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., decide: _Optional[_Union[Decide, _Mapping]] = ..., acquire_leases: _Optional[_Union[AcquireLeases, _Mapping]] = ..., renew_leases: _Optional[_Union[RenewLeases, _Mapping]] = ..., release_leases: _Optional[_Union[ReleaseLeases, _Mapping]] = ..., expire_leases: _Optional[_Union[ExpireLeases, _Mapping]] = ..., close_session: _Optional[_Union[CloseSession, _Mapping]] = ..., forget: _Optional[_Union[Forget, _Mapping]] = ..., open_sealed: _Optional[_Union[OpenSealed, _Mapping]] = ..., limit_silence: _Optional[_Union[LimitSilence, _Mapping]] = ..., reset_group: _Optional[_Union[ResetGroup, _Mapping]] = ..., write_table: _Optional[_Union[WriteTable, _Mapping]] = ..., delete_table: _Optional[_Union[DeleteTable, _Mapping]] = ..., post_request: _Optional[_Union[PostRequest, _Mapping]] = ..., raise_feature_level: _Optional[_Union[RaiseFeatureLevel, _Mapping]] = ..., request_members: _Optional[_Union[RequestMembers, _Mapping]] = ..., cancel_members: _Optional[_Union[CancelMembers, _Mapping]] = ..., settle_members: _Optional[_Union[SettleMembers, _Mapping]] = ...) -> None: ...

class Merge(_message.Message):
    __slots__ = ("number", "sequenced_ns", "ranges")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCED_NS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    number: int
    sequenced_ns: int
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(self, number: _Optional[int] = ..., sequenced_ns: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("session_id", "run", "roll", "start", "end", "first", "count", "chain_start", "chain_end")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CHAIN_START_FIELD_NUMBER: _ClassVar[int]
    CHAIN_END_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    run: int
    roll: int
    start: int
    end: int
    first: int
    count: int
    chain_start: int
    chain_end: int
    def __init__(self, session_id: _Optional[int] = ..., run: _Optional[int] = ..., roll: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., chain_start: _Optional[int] = ..., chain_end: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("session", "incarnation", "dedup_id", "run", "run_id", "newest")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEDUP_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    session: str
    incarnation: bytes
    dedup_id: str
    run: int
    run_id: bytes
    newest: int
    def __init__(self, session: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., dedup_id: _Optional[str] = ..., run: _Optional[int] = ..., run_id: _Optional[bytes] = ..., newest: _Optional[int] = ...) -> None: ...

class OpenSealed(_message.Message):
    __slots__ = ("session", "incarnation", "dedup_id", "newest", "runs")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEDUP_ID_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    session: str
    incarnation: bytes
    dedup_id: str
    newest: int
    runs: _containers.RepeatedCompositeFieldContainer[SealedRun]
    def __init__(self, session: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., dedup_id: _Optional[str] = ..., newest: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[SealedRun, _Mapping]]] = ...) -> None: ...

class SealedRun(_message.Message):
    __slots__ = ("run", "run_id", "roll", "offset", "number")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    run: int
    run_id: bytes
    roll: int
    offset: int
    number: int
    def __init__(self, run: _Optional[int] = ..., run_id: _Optional[bytes] = ..., roll: _Optional[int] = ..., offset: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("session_id", "run", "later")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    run: int
    later: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[int] = ..., run: _Optional[int] = ..., later: _Optional[_Iterable[int]] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("session_id", "run", "roll", "offset", "number", "later", "announced")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    run: int
    roll: int
    offset: int
    number: int
    later: _containers.RepeatedScalarFieldContainer[int]
    announced: SessionEnd
    def __init__(self, session_id: _Optional[int] = ..., run: _Optional[int] = ..., roll: _Optional[int] = ..., offset: _Optional[int] = ..., number: _Optional[int] = ..., later: _Optional[_Iterable[int]] = ..., announced: _Optional[_Union[SessionEnd, _Mapping]] = ...) -> None: ...

class Roll(_message.Message):
    __slots__ = ("number", "run", "roll", "sequenced_ns")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    SEQUENCED_NS_FIELD_NUMBER: _ClassVar[int]
    number: int
    run: int
    roll: int
    sequenced_ns: int
    def __init__(self, number: _Optional[int] = ..., run: _Optional[int] = ..., roll: _Optional[int] = ..., sequenced_ns: _Optional[int] = ...) -> None: ...

class Configure(_message.Message):
    __slots__ = ("roll_bytes", "roll_minutes", "session_bytes_max", "retention_minutes", "retention_bytes", "retention_disk_percent", "hold_bytes_max", "sessions_max", "sessions_per_name_max", "session_idle_minutes")
    ROLL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROLL_MINUTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    RETENTION_MINUTES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_DISK_PERCENT_FIELD_NUMBER: _ClassVar[int]
    HOLD_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_PER_NAME_MAX_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDLE_MINUTES_FIELD_NUMBER: _ClassVar[int]
    roll_bytes: int
    roll_minutes: int
    session_bytes_max: int
    retention_minutes: int
    retention_bytes: int
    retention_disk_percent: int
    hold_bytes_max: int
    sessions_max: int
    sessions_per_name_max: int
    session_idle_minutes: int
    def __init__(self, roll_bytes: _Optional[int] = ..., roll_minutes: _Optional[int] = ..., session_bytes_max: _Optional[int] = ..., retention_minutes: _Optional[int] = ..., retention_bytes: _Optional[int] = ..., retention_disk_percent: _Optional[int] = ..., hold_bytes_max: _Optional[int] = ..., sessions_max: _Optional[int] = ..., sessions_per_name_max: _Optional[int] = ..., session_idle_minutes: _Optional[int] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("node", "disk", "address")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node: str
    disk: bytes
    address: str
    def __init__(self, node: _Optional[str] = ..., disk: _Optional[bytes] = ..., address: _Optional[str] = ...) -> None: ...

class Restore(_message.Message):
    __slots__ = ("node", "disk")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    node: str
    disk: bytes
    def __init__(self, node: _Optional[str] = ..., disk: _Optional[bytes] = ...) -> None: ...

class Trim(_message.Message):
    __slots__ = ("up_to", "reason", "trimmed_ns")
    UP_TO_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_NS_FIELD_NUMBER: _ClassVar[int]
    up_to: int
    reason: int
    trimmed_ns: int
    def __init__(self, up_to: _Optional[int] = ..., reason: _Optional[int] = ..., trimmed_ns: _Optional[int] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("name", "position", "at_ns")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    name: str
    position: int
    at_ns: int
    def __init__(self, name: _Optional[str] = ..., position: _Optional[int] = ..., at_ns: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ResetGroup(_message.Message):
    __slots__ = ("group", "position", "is_deletion", "at_ns")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IS_DELETION_FIELD_NUMBER: _ClassVar[int]
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    group: str
    position: int
    is_deletion: bool
    at_ns: int
    def __init__(self, group: _Optional[str] = ..., position: _Optional[int] = ..., is_deletion: _Optional[bool] = ..., at_ns: _Optional[int] = ...) -> None: ...

class CloseSession(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class LimitSilence(_message.Message):
    __slots__ = ("session_id", "run", "milliseconds")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    run: int
    milliseconds: int
    def __init__(self, session_id: _Optional[int] = ..., run: _Optional[int] = ..., milliseconds: _Optional[int] = ...) -> None: ...

class Forget(_message.Message):
    __slots__ = ("session_ids",)
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("id", "until_ns", "command")
    ID_FIELD_NUMBER: _ClassVar[int]
    UNTIL_NS_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    until_ns: int
    command: bytes
    def __init__(self, id: _Optional[bytes] = ..., until_ns: _Optional[int] = ..., command: _Optional[bytes] = ...) -> None: ...

class Decide(_message.Message):
    __slots__ = ("id", "at_ns", "refused")
    ID_FIELD_NUMBER: _ClassVar[int]
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    at_ns: int
    refused: str
    def __init__(self, id: _Optional[bytes] = ..., at_ns: _Optional[int] = ..., refused: _Optional[str] = ...) -> None: ...

class RaiseFeatureLevel(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: int
    def __init__(self, level: _Optional[int] = ...) -> None: ...

class AcquireLeases(_message.Message):
    __slots__ = ("request", "owner", "duration_ms", "names")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    owner: str
    duration_ms: int
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request: _Optional[bytes] = ..., owner: _Optional[str] = ..., duration_ms: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewLeases(_message.Message):
    __slots__ = ("request", "owner", "leases")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    owner: str
    leases: _containers.RepeatedCompositeFieldContainer[HeldLease]
    def __init__(self, request: _Optional[bytes] = ..., owner: _Optional[str] = ..., leases: _Optional[_Iterable[_Union[HeldLease, _Mapping]]] = ...) -> None: ...

class ReleaseLeases(_message.Message):
    __slots__ = ("request", "owner", "leases")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    owner: str
    leases: _containers.RepeatedCompositeFieldContainer[HeldLease]
    def __init__(self, request: _Optional[bytes] = ..., owner: _Optional[str] = ..., leases: _Optional[_Iterable[_Union[HeldLease, _Mapping]]] = ...) -> None: ...

class HeldLease(_message.Message):
    __slots__ = ("name", "token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    token: int
    def __init__(self, name: _Optional[str] = ..., token: _Optional[int] = ...) -> None: ...

class ExpireLeases(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[IdleLease]
    def __init__(self, leases: _Optional[_Iterable[_Union[IdleLease, _Mapping]]] = ...) -> None: ...

class IdleLease(_message.Message):
    __slots__ = ("name", "token", "renewals")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    name: str
    token: int
    renewals: int
    def __init__(self, name: _Optional[str] = ..., token: _Optional[int] = ..., renewals: _Optional[int] = ...) -> None: ...

class WriteTable(_message.Message):
    __slots__ = ("lease", "owner", "token", "commit", "request", "part", "is_last", "clears", "deletes", "puts")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    CLEARS_FIELD_NUMBER: _ClassVar[int]
    DELETES_FIELD_NUMBER: _ClassVar[int]
    PUTS_FIELD_NUMBER: _ClassVar[int]
    lease: str
    owner: str
    token: int
    commit: int
    request: bytes
    part: int
    is_last: bool
    clears: _containers.RepeatedScalarFieldContainer[str]
    deletes: _containers.RepeatedScalarFieldContainer[str]
    puts: _containers.RepeatedCompositeFieldContainer[_leases_pb2.TableRow]
    def __init__(self, lease: _Optional[str] = ..., owner: _Optional[str] = ..., token: _Optional[int] = ..., commit: _Optional[int] = ..., request: _Optional[bytes] = ..., part: _Optional[int] = ..., is_last: _Optional[bool] = ..., clears: _Optional[_Iterable[str]] = ..., deletes: _Optional[_Iterable[str]] = ..., puts: _Optional[_Iterable[_Union[_leases_pb2.TableRow, _Mapping]]] = ...) -> None: ...

class DeleteTable(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: str
    def __init__(self, lease: _Optional[str] = ...) -> None: ...

class PostRequest(_message.Message):
    __slots__ = ("lease", "id", "at_ns", "until_ns", "content")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_NS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    lease: str
    id: bytes
    at_ns: int
    until_ns: int
    content: bytes
    def __init__(self, lease: _Optional[str] = ..., id: _Optional[bytes] = ..., at_ns: _Optional[int] = ..., until_ns: _Optional[int] = ..., content: _Optional[bytes] = ...) -> None: ...

class RequestMembers(_message.Message):
    __slots__ = ("adds", "address", "removes")
    ADDS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REMOVES_FIELD_NUMBER: _ClassVar[int]
    adds: str
    address: str
    removes: str
    def __init__(self, adds: _Optional[str] = ..., address: _Optional[str] = ..., removes: _Optional[str] = ...) -> None: ...

class CancelMembers(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SettleMembers(_message.Message):
    __slots__ = ("number", "why")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    number: int
    why: str
    def __init__(self, number: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class Reset(_message.Message):
    __slots__ = ("is_hard", "epoch", "at_ns", "request", "forced_by")
    IS_HARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    FORCED_BY_FIELD_NUMBER: _ClassVar[int]
    is_hard: bool
    epoch: int
    at_ns: int
    request: bytes
    forced_by: str
    def __init__(self, is_hard: _Optional[bool] = ..., epoch: _Optional[int] = ..., at_ns: _Optional[int] = ..., request: _Optional[bytes] = ..., forced_by: _Optional[str] = ...) -> None: ...

class SequencerState(_message.Message):
    __slots__ = ("version", "cluster", "configuration", "instruction", "sequenced_ns", "position", "merged", "sessions", "watermarks", "segments", "next_session_id", "disks", "joins", "holds", "last_reset", "cleared", "asked", "decided_ns", "force", "leases", "lease_token", "released", "closed", "forgotten", "runs_cut_short", "tables", "pages", "member_requests", "member_request", "settled_members")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCED_NS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WATERMARKS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DISKS_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    LAST_RESET_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    DECIDED_NS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    RUNS_CUT_SHORT_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    MEMBER_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SETTLED_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    cluster: bytes
    configuration: Configure
    instruction: int
    sequenced_ns: int
    position: int
    merged: MergedEnd
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    watermarks: _containers.RepeatedCompositeFieldContainer[Watermark]
    segments: _containers.RepeatedCompositeFieldContainer[MergedSegment]
    next_session_id: int
    disks: _containers.RepeatedCompositeFieldContainer[NodeDisk]
    joins: int
    holds: _containers.RepeatedCompositeFieldContainer[Hold]
    last_reset: Reset
    cleared: Cleared
    asked: _containers.RepeatedCompositeFieldContainer[Ask]
    decided_ns: int
    force: Force
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    lease_token: int
    released: _containers.RepeatedScalarFieldContainer[bytes]
    closed: _containers.RepeatedScalarFieldContainer[int]
    forgotten: bytes
    runs_cut_short: int
    tables: _containers.RepeatedCompositeFieldContainer[LeaseTable]
    pages: _containers.RepeatedCompositeFieldContainer[TablePage]
    member_requests: int
    member_request: MemberRequest
    settled_members: SettleMembers
    def __init__(self, version: _Optional[int] = ..., cluster: _Optional[bytes] = ..., configuration: _Optional[_Union[Configure, _Mapping]] = ..., instruction: _Optional[int] = ..., sequenced_ns: _Optional[int] = ..., position: _Optional[int] = ..., merged: _Optional[_Union[MergedEnd, _Mapping]] = ..., sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ..., watermarks: _Optional[_Iterable[_Union[Watermark, _Mapping]]] = ..., segments: _Optional[_Iterable[_Union[MergedSegment, _Mapping]]] = ..., next_session_id: _Optional[int] = ..., disks: _Optional[_Iterable[_Union[NodeDisk, _Mapping]]] = ..., joins: _Optional[int] = ..., holds: _Optional[_Iterable[_Union[Hold, _Mapping]]] = ..., last_reset: _Optional[_Union[Reset, _Mapping]] = ..., cleared: _Optional[_Union[Cleared, _Mapping]] = ..., asked: _Optional[_Iterable[_Union[Ask, _Mapping]]] = ..., decided_ns: _Optional[int] = ..., force: _Optional[_Union[Force, _Mapping]] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., lease_token: _Optional[int] = ..., released: _Optional[_Iterable[bytes]] = ..., closed: _Optional[_Iterable[int]] = ..., forgotten: _Optional[bytes] = ..., runs_cut_short: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[LeaseTable, _Mapping]]] = ..., pages: _Optional[_Iterable[_Union[TablePage, _Mapping]]] = ..., member_requests: _Optional[int] = ..., member_request: _Optional[_Union[MemberRequest, _Mapping]] = ..., settled_members: _Optional[_Union[SettleMembers, _Mapping]] = ...) -> None: ...

class MemberRequest(_message.Message):
    __slots__ = ("number", "adds", "address", "removes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADDS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REMOVES_FIELD_NUMBER: _ClassVar[int]
    number: int
    adds: str
    address: str
    removes: str
    def __init__(self, number: _Optional[int] = ..., adds: _Optional[str] = ..., address: _Optional[str] = ..., removes: _Optional[str] = ...) -> None: ...

class LeaseTable(_message.Message):
    __slots__ = ("lease", "commits", "request", "staged_token", "staged_request", "staged")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    STAGED_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STAGED_REQUEST_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    lease: str
    commits: int
    request: bytes
    staged_token: int
    staged_request: bytes
    staged: _containers.RepeatedCompositeFieldContainer[StagedPart]
    def __init__(self, lease: _Optional[str] = ..., commits: _Optional[int] = ..., request: _Optional[bytes] = ..., staged_token: _Optional[int] = ..., staged_request: _Optional[bytes] = ..., staged: _Optional[_Iterable[_Union[StagedPart, _Mapping]]] = ...) -> None: ...

class StagedPart(_message.Message):
    __slots__ = ("clears", "deletes", "puts")
    CLEARS_FIELD_NUMBER: _ClassVar[int]
    DELETES_FIELD_NUMBER: _ClassVar[int]
    PUTS_FIELD_NUMBER: _ClassVar[int]
    clears: _containers.RepeatedScalarFieldContainer[str]
    deletes: _containers.RepeatedScalarFieldContainer[str]
    puts: _containers.RepeatedCompositeFieldContainer[_leases_pb2.TableRow]
    def __init__(self, clears: _Optional[_Iterable[str]] = ..., deletes: _Optional[_Iterable[str]] = ..., puts: _Optional[_Iterable[_Union[_leases_pb2.TableRow, _Mapping]]] = ...) -> None: ...

class TablePage(_message.Message):
    __slots__ = ("lease", "rows")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    lease: str
    rows: _containers.RepeatedCompositeFieldContainer[_leases_pb2.TableRow]
    def __init__(self, lease: _Optional[str] = ..., rows: _Optional[_Iterable[_Union[_leases_pb2.TableRow, _Mapping]]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("name", "owner", "token", "duration_ms", "request", "renewals", "attempt")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    token: int
    duration_ms: int
    request: bytes
    renewals: int
    attempt: int
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., token: _Optional[int] = ..., duration_ms: _Optional[int] = ..., request: _Optional[bytes] = ..., renewals: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Cleared(_message.Message):
    __slots__ = ("epoch", "position", "session_id", "run")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    position: int
    session_id: int
    run: int
    def __init__(self, epoch: _Optional[int] = ..., position: _Optional[int] = ..., session_id: _Optional[int] = ..., run: _Optional[int] = ...) -> None: ...

class Force(_message.Message):
    __slots__ = ("request", "node")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    node: str
    def __init__(self, request: _Optional[bytes] = ..., node: _Optional[str] = ...) -> None: ...

class NodeDisk(_message.Message):
    __slots__ = ("node", "id", "joined", "is_whole", "address")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node: str
    id: bytes
    joined: int
    is_whole: bool
    address: str
    def __init__(self, node: _Optional[str] = ..., id: _Optional[bytes] = ..., joined: _Optional[int] = ..., is_whole: _Optional[bool] = ..., address: _Optional[str] = ...) -> None: ...

class MergedEnd(_message.Message):
    __slots__ = ("has_segment", "run", "roll", "offset", "first", "created_ns", "declared", "chain", "total_bytes", "next_run")
    HAS_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CREATED_NS_FIELD_NUMBER: _ClassVar[int]
    DECLARED_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEXT_RUN_FIELD_NUMBER: _ClassVar[int]
    has_segment: bool
    run: int
    roll: int
    offset: int
    first: int
    created_ns: int
    declared: _containers.RepeatedScalarFieldContainer[int]
    chain: int
    total_bytes: int
    next_run: int
    def __init__(self, has_segment: _Optional[bool] = ..., run: _Optional[int] = ..., roll: _Optional[int] = ..., offset: _Optional[int] = ..., first: _Optional[int] = ..., created_ns: _Optional[int] = ..., declared: _Optional[_Iterable[int]] = ..., chain: _Optional[int] = ..., total_bytes: _Optional[int] = ..., next_run: _Optional[int] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("id", "name", "incarnation", "dedup_id", "is_superseded", "last_run", "was_opened", "active_runs", "has_consumed", "roll", "offset", "number", "chain", "done_run", "has_done", "done_roll", "done_offset", "done_number", "waits_for", "fenced_end", "runs_cut_short", "silence_ms_max", "is_closed_in_order")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEDUP_ID_FIELD_NUMBER: _ClassVar[int]
    IS_SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    LAST_RUN_FIELD_NUMBER: _ClassVar[int]
    WAS_OPENED_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_RUNS_FIELD_NUMBER: _ClassVar[int]
    HAS_CONSUMED_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    DONE_RUN_FIELD_NUMBER: _ClassVar[int]
    HAS_DONE_FIELD_NUMBER: _ClassVar[int]
    DONE_ROLL_FIELD_NUMBER: _ClassVar[int]
    DONE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    DONE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    FENCED_END_FIELD_NUMBER: _ClassVar[int]
    RUNS_CUT_SHORT_FIELD_NUMBER: _ClassVar[int]
    SILENCE_MS_MAX_FIELD_NUMBER: _ClassVar[int]
    IS_CLOSED_IN_ORDER_FIELD_NUMBER: _ClassVar[int]
    id: int
    name: str
    incarnation: bytes
    dedup_id: str
    is_superseded: bool
    last_run: int
    was_opened: bool
    active_runs: _containers.RepeatedCompositeFieldContainer[SessionRun]
    has_consumed: bool
    roll: int
    offset: int
    number: int
    chain: int
    done_run: int
    has_done: bool
    done_roll: int
    done_offset: int
    done_number: int
    waits_for: int
    fenced_end: int
    runs_cut_short: int
    silence_ms_max: int
    is_closed_in_order: bool
    def __init__(self, id: _Optional[int] = ..., name: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., dedup_id: _Optional[str] = ..., is_superseded: _Optional[bool] = ..., last_run: _Optional[int] = ..., was_opened: _Optional[bool] = ..., active_runs: _Optional[_Iterable[_Union[SessionRun, _Mapping]]] = ..., has_consumed: _Optional[bool] = ..., roll: _Optional[int] = ..., offset: _Optional[int] = ..., number: _Optional[int] = ..., chain: _Optional[int] = ..., done_run: _Optional[int] = ..., has_done: _Optional[bool] = ..., done_roll: _Optional[int] = ..., done_offset: _Optional[int] = ..., done_number: _Optional[int] = ..., waits_for: _Optional[int] = ..., fenced_end: _Optional[int] = ..., runs_cut_short: _Optional[int] = ..., silence_ms_max: _Optional[int] = ..., is_closed_in_order: _Optional[bool] = ...) -> None: ...

class SessionRun(_message.Message):
    __slots__ = ("run", "run_id", "is_fenced", "is_closed", "roll", "offset", "number", "announced")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    IS_FENCED_FIELD_NUMBER: _ClassVar[int]
    IS_CLOSED_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    run: int
    run_id: bytes
    is_fenced: bool
    is_closed: bool
    roll: int
    offset: int
    number: int
    announced: SessionEnd
    def __init__(self, run: _Optional[int] = ..., run_id: _Optional[bytes] = ..., is_fenced: _Optional[bool] = ..., is_closed: _Optional[bool] = ..., roll: _Optional[int] = ..., offset: _Optional[int] = ..., number: _Optional[int] = ..., announced: _Optional[_Union[SessionEnd, _Mapping]] = ...) -> None: ...

class Watermark(_message.Message):
    __slots__ = ("dedup_id", "wanted")
    DEDUP_ID_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    dedup_id: str
    wanted: int
    def __init__(self, dedup_id: _Optional[str] = ..., wanted: _Optional[int] = ...) -> None: ...

class MergedSegment(_message.Message):
    __slots__ = ("run", "roll", "first", "end", "size_bytes", "created_ns", "sealed_ns", "trimmed_ns", "reason")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_NS_FIELD_NUMBER: _ClassVar[int]
    SEALED_NS_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_NS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run: int
    roll: int
    first: int
    end: int
    size_bytes: int
    created_ns: int
    sealed_ns: int
    trimmed_ns: int
    reason: int
    def __init__(self, run: _Optional[int] = ..., roll: _Optional[int] = ..., first: _Optional[int] = ..., end: _Optional[int] = ..., size_bytes: _Optional[int] = ..., created_ns: _Optional[int] = ..., sealed_ns: _Optional[int] = ..., trimmed_ns: _Optional[int] = ..., reason: _Optional[int] = ...) -> None: ...

class WritePlan(_message.Message):
    __slots__ = ("instruction", "sequenced_ns", "run", "roll", "offset", "first_position", "end_position", "blocks", "chain", "total_bytes", "end_offset", "consumed")
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCED_NS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    END_POSITION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    instruction: int
    sequenced_ns: int
    run: int
    roll: int
    offset: int
    first_position: int
    end_position: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockWrite]
    chain: int
    total_bytes: int
    end_offset: int
    consumed: _containers.RepeatedCompositeFieldContainer[SessionEnd]
    def __init__(self, instruction: _Optional[int] = ..., sequenced_ns: _Optional[int] = ..., run: _Optional[int] = ..., roll: _Optional[int] = ..., offset: _Optional[int] = ..., first_position: _Optional[int] = ..., end_position: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockWrite, _Mapping]]] = ..., chain: _Optional[int] = ..., total_bytes: _Optional[int] = ..., end_offset: _Optional[int] = ..., consumed: _Optional[_Iterable[_Union[SessionEnd, _Mapping]]] = ...) -> None: ...

class BlockWrite(_message.Message):
    __slots__ = ("head", "is_declaration", "session_id", "run", "roll", "start", "end", "chain_end", "message_count")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    IS_DECLARATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CHAIN_END_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    head: bytes
    is_declaration: bool
    session_id: int
    run: int
    roll: int
    start: int
    end: int
    chain_end: int
    message_count: int
    def __init__(self, head: _Optional[bytes] = ..., is_declaration: _Optional[bool] = ..., session_id: _Optional[int] = ..., run: _Optional[int] = ..., roll: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., chain_end: _Optional[int] = ..., message_count: _Optional[int] = ...) -> None: ...

class SessionEnd(_message.Message):
    __slots__ = ("session_id", "run", "roll", "offset", "number", "chain")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    run: int
    roll: int
    offset: int
    number: int
    chain: int
    def __init__(self, session_id: _Optional[int] = ..., run: _Optional[int] = ..., roll: _Optional[int] = ..., offset: _Optional[int] = ..., number: _Optional[int] = ..., chain: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("boot", "sequence", "is_full", "clock_ns", "segments", "merged", "disk_bytes", "disk_free_bytes", "joins", "connected", "members_version")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_VERSION_FIELD_NUMBER: _ClassVar[int]
    boot: bytes
    sequence: int
    is_full: bool
    clock_ns: int
    segments: _containers.RepeatedCompositeFieldContainer[SegmentReport]
    merged: MergedReport
    disk_bytes: int
    disk_free_bytes: int
    joins: int
    connected: _containers.RepeatedScalarFieldContainer[int]
    members_version: int
    def __init__(self, boot: _Optional[bytes] = ..., sequence: _Optional[int] = ..., is_full: _Optional[bool] = ..., clock_ns: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[SegmentReport, _Mapping]]] = ..., merged: _Optional[_Union[MergedReport, _Mapping]] = ..., disk_bytes: _Optional[int] = ..., disk_free_bytes: _Optional[int] = ..., joins: _Optional[int] = ..., connected: _Optional[_Iterable[int]] = ..., members_version: _Optional[int] = ...) -> None: ...

class SegmentReport(_message.Message):
    __slots__ = ("session_id", "run", "roll", "boundaries", "announced", "final")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    run: int
    roll: int
    boundaries: bytes
    announced: SessionEnd
    final: SessionEnd
    def __init__(self, session_id: _Optional[int] = ..., run: _Optional[int] = ..., roll: _Optional[int] = ..., boundaries: _Optional[bytes] = ..., announced: _Optional[_Union[SessionEnd, _Mapping]] = ..., final: _Optional[_Union[SessionEnd, _Mapping]] = ...) -> None: ...

class MergedReport(_message.Message):
    __slots__ = ("instruction", "chain", "bytes", "position", "stopped")
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    instruction: int
    chain: int
    bytes: int
    position: int
    stopped: str
    def __init__(self, instruction: _Optional[int] = ..., chain: _Optional[int] = ..., bytes: _Optional[int] = ..., position: _Optional[int] = ..., stopped: _Optional[str] = ...) -> None: ...

class Told(_message.Message):
    __slots__ = ("report", "again", "summary", "fetch", "differs")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_FIELD_NUMBER: _ClassVar[int]
    report: Report
    again: ReportAgain
    summary: Summary
    fetch: Fetch
    differs: Differs
    def __init__(self, report: _Optional[_Union[Report, _Mapping]] = ..., again: _Optional[_Union[ReportAgain, _Mapping]] = ..., summary: _Optional[_Union[Summary, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., differs: _Optional[_Union[Differs, _Mapping]] = ...) -> None: ...

class Differs(_message.Message):
    __slots__ = ("instruction", "got", "wanted")
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    GOT_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    instruction: int
    got: int
    wanted: int
    def __init__(self, instruction: _Optional[int] = ..., got: _Optional[int] = ..., wanted: _Optional[int] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("session_id", "run", "roll", "offset", "holder")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    run: int
    roll: int
    offset: int
    holder: str
    def __init__(self, session_id: _Optional[int] = ..., run: _Optional[int] = ..., roll: _Optional[int] = ..., offset: _Optional[int] = ..., holder: _Optional[str] = ...) -> None: ...

class ReportAgain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Summary(_message.Message):
    __slots__ = ("clock_ns", "merged", "disk_bytes", "disk_free_bytes", "step", "step_done", "step_total", "data_silent_s", "clients", "feature_level_latest", "rt_version", "address", "members_wait", "bootstraps")
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_DONE_FIELD_NUMBER: _ClassVar[int]
    STEP_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DATA_SILENT_S_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LEVEL_LATEST_FIELD_NUMBER: _ClassVar[int]
    RT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_WAIT_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAPS_FIELD_NUMBER: _ClassVar[int]
    clock_ns: int
    merged: MergedReport
    disk_bytes: int
    disk_free_bytes: int
    step: str
    step_done: int
    step_total: int
    data_silent_s: float
    clients: ConnectedClients
    feature_level_latest: int
    rt_version: str
    address: str
    members_wait: str
    bootstraps: bool
    def __init__(self, clock_ns: _Optional[int] = ..., merged: _Optional[_Union[MergedReport, _Mapping]] = ..., disk_bytes: _Optional[int] = ..., disk_free_bytes: _Optional[int] = ..., step: _Optional[str] = ..., step_done: _Optional[int] = ..., step_total: _Optional[int] = ..., data_silent_s: _Optional[float] = ..., clients: _Optional[_Union[ConnectedClients, _Mapping]] = ..., feature_level_latest: _Optional[int] = ..., rt_version: _Optional[str] = ..., address: _Optional[str] = ..., members_wait: _Optional[str] = ..., bootstraps: _Optional[bool] = ...) -> None: ...

class ConnectedClients(_message.Message):
    __slots__ = ("clients", "left_out")
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    clients: _containers.RepeatedCompositeFieldContainer[ConnectedClient]
    left_out: int
    def __init__(self, clients: _Optional[_Iterable[_Union[ConnectedClient, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...

class ConnectedClient(_message.Message):
    __slots__ = ("role", "name", "session", "lag_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAG_S_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    session: str
    lag_s: float
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., session: _Optional[str] = ..., lag_s: _Optional[float] = ...) -> None: ...

class ToControl(_message.Message):
    __slots__ = ("hello", "propose", "report")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    hello: DataHello
    propose: bytes
    report: DataReport
    def __init__(self, hello: _Optional[_Union[DataHello, _Mapping]] = ..., propose: _Optional[bytes] = ..., report: _Optional[_Union[DataReport, _Mapping]] = ...) -> None: ...

class DataHello(_message.Message):
    __slots__ = ("boot", "instruction", "disk")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    boot: bytes
    instruction: int
    disk: bytes
    def __init__(self, boot: _Optional[bytes] = ..., instruction: _Optional[int] = ..., disk: _Optional[bytes] = ...) -> None: ...

class DataReport(_message.Message):
    __slots__ = ("segments", "merged", "disk_bytes", "disk_free_bytes", "forgotten", "joins", "step", "connected", "clients", "members_version")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_VERSION_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[SegmentReport]
    merged: MergedReport
    disk_bytes: int
    disk_free_bytes: int
    forgotten: _containers.RepeatedCompositeFieldContainer[SessionEnd]
    joins: int
    step: DataStep
    connected: _containers.RepeatedScalarFieldContainer[int]
    clients: ConnectedClients
    members_version: int
    def __init__(self, segments: _Optional[_Iterable[_Union[SegmentReport, _Mapping]]] = ..., merged: _Optional[_Union[MergedReport, _Mapping]] = ..., disk_bytes: _Optional[int] = ..., disk_free_bytes: _Optional[int] = ..., forgotten: _Optional[_Iterable[_Union[SessionEnd, _Mapping]]] = ..., joins: _Optional[int] = ..., step: _Optional[_Union[DataStep, _Mapping]] = ..., connected: _Optional[_Iterable[int]] = ..., clients: _Optional[_Union[ConnectedClients, _Mapping]] = ..., members_version: _Optional[int] = ...) -> None: ...

class DataStep(_message.Message):
    __slots__ = ("step", "done", "total")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    step: str
    done: int
    total: int
    def __init__(self, step: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class ToData(_message.Message):
    __slots__ = ("snapshot", "applied", "standing", "fetch", "reset_refused")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    RESET_REFUSED_FIELD_NUMBER: _ClassVar[int]
    snapshot: ControlSnapshot
    applied: Applied
    standing: Standing
    fetch: Fetch
    reset_refused: ResetRefused
    def __init__(self, snapshot: _Optional[_Union[ControlSnapshot, _Mapping]] = ..., applied: _Optional[_Union[Applied, _Mapping]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., reset_refused: _Optional[_Union[ResetRefused, _Mapping]] = ...) -> None: ...

class ResetRefused(_message.Message):
    __slots__ = ("request", "why")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    why: str
    def __init__(self, request: _Optional[bytes] = ..., why: _Optional[str] = ...) -> None: ...

class ControlSnapshot(_message.Message):
    __slots__ = ("index", "state", "plans", "epoch_id")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_ID_FIELD_NUMBER: _ClassVar[int]
    index: int
    state: bytes
    plans: _containers.RepeatedScalarFieldContainer[bytes]
    epoch_id: int
    def __init__(self, index: _Optional[int] = ..., state: _Optional[bytes] = ..., plans: _Optional[_Iterable[bytes]] = ..., epoch_id: _Optional[int] = ...) -> None: ...

class Applied(_message.Message):
    __slots__ = ("index", "command")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    index: int
    command: bytes
    def __init__(self, index: _Optional[int] = ..., command: _Optional[bytes] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("node", "leader", "term", "role", "epoch", "is_caught_up", "nodes", "epoch_id", "leader_gap_s", "is_resetting", "members_version")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_GAP_S_FIELD_NUMBER: _ClassVar[int]
    IS_RESETTING_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_VERSION_FIELD_NUMBER: _ClassVar[int]
    node: str
    leader: str
    term: int
    role: str
    epoch: int
    is_caught_up: bool
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStanding]
    epoch_id: int
    leader_gap_s: float
    is_resetting: bool
    members_version: int
    def __init__(self, node: _Optional[str] = ..., leader: _Optional[str] = ..., term: _Optional[int] = ..., role: _Optional[str] = ..., epoch: _Optional[int] = ..., is_caught_up: _Optional[bool] = ..., nodes: _Optional[_Iterable[_Union[NodeStanding, _Mapping]]] = ..., epoch_id: _Optional[int] = ..., leader_gap_s: _Optional[float] = ..., is_resetting: _Optional[bool] = ..., members_version: _Optional[int] = ...) -> None: ...

class NodeStanding(_message.Message):
    __slots__ = ("name", "address", "is_connected", "is_counted", "summary", "summary_age_s", "clock_offset_s", "is_learner", "raft_address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    IS_COUNTED_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_AGE_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_S_FIELD_NUMBER: _ClassVar[int]
    IS_LEARNER_FIELD_NUMBER: _ClassVar[int]
    RAFT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    is_connected: bool
    is_counted: bool
    summary: Summary
    summary_age_s: float
    clock_offset_s: float
    is_learner: bool
    raft_address: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., is_connected: _Optional[bool] = ..., is_counted: _Optional[bool] = ..., summary: _Optional[_Union[Summary, _Mapping]] = ..., summary_age_s: _Optional[float] = ..., clock_offset_s: _Optional[float] = ..., is_learner: _Optional[bool] = ..., raft_address: _Optional[str] = ...) -> None: ...
