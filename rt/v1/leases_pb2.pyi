from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseRequest(_message.Message):
    __slots__ = ("request", "owner", "duration_ms", "leases")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    owner: str
    duration_ms: int
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRow]
    def __init__(self, request: _Optional[bytes] = ..., owner: _Optional[str] = ..., duration_ms: _Optional[int] = ..., leases: _Optional[_Iterable[_Union[LeaseRow, _Mapping]]] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaseListRequest(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    def __init__(self, prefix: _Optional[str] = ...) -> None: ...

class LeaseList(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRow]
    def __init__(self, leases: _Optional[_Iterable[_Union[LeaseRow, _Mapping]]] = ...) -> None: ...

class LeaseRow(_message.Message):
    __slots__ = ("name", "owner", "token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    token: int
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., token: _Optional[int] = ...) -> None: ...

class TableWrite(_message.Message):
    __slots__ = ("lease", "commit", "request", "part", "is_last", "clears", "deletes", "puts")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    CLEARS_FIELD_NUMBER: _ClassVar[int]
    DELETES_FIELD_NUMBER: _ClassVar[int]
    PUTS_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseRow
    commit: int
    request: bytes
    part: int
    is_last: bool
    clears: _containers.RepeatedScalarFieldContainer[str]
    deletes: _containers.RepeatedScalarFieldContainer[str]
    puts: _containers.RepeatedCompositeFieldContainer[TableRow]
    def __init__(self, lease: _Optional[_Union[LeaseRow, _Mapping]] = ..., commit: _Optional[int] = ..., request: _Optional[bytes] = ..., part: _Optional[int] = ..., is_last: _Optional[bool] = ..., clears: _Optional[_Iterable[str]] = ..., deletes: _Optional[_Iterable[str]] = ..., puts: _Optional[_Iterable[_Union[TableRow, _Mapping]]] = ...) -> None: ...

class TableRow(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class TableWriteReply(_message.Message):
    __slots__ = ("answer", "commits")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    answer: str
    commits: int
    def __init__(self, answer: _Optional[str] = ..., commits: _Optional[int] = ...) -> None: ...

class TableRead(_message.Message):
    __slots__ = ("lease", "page", "commits")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseRow
    page: int
    commits: int
    def __init__(self, lease: _Optional[_Union[LeaseRow, _Mapping]] = ..., page: _Optional[int] = ..., commits: _Optional[int] = ...) -> None: ...

class TableRows(_message.Message):
    __slots__ = ("commits", "rows", "next_page", "lease")
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    commits: int
    rows: _containers.RepeatedCompositeFieldContainer[TableRow]
    next_page: int
    lease: LeaseRow
    def __init__(self, commits: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[TableRow, _Mapping]]] = ..., next_page: _Optional[int] = ..., lease: _Optional[_Union[LeaseRow, _Mapping]] = ...) -> None: ...

class TableRequest(_message.Message):
    __slots__ = ("lease", "id", "wait_ms", "content", "until_ns")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    UNTIL_NS_FIELD_NUMBER: _ClassVar[int]
    lease: str
    id: bytes
    wait_ms: int
    content: bytes
    until_ns: int
    def __init__(self, lease: _Optional[str] = ..., id: _Optional[bytes] = ..., wait_ms: _Optional[int] = ..., content: _Optional[bytes] = ..., until_ns: _Optional[int] = ...) -> None: ...

class TableRequestReply(_message.Message):
    __slots__ = ("answer", "content", "owner")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    answer: str
    content: bytes
    owner: str
    def __init__(self, answer: _Optional[str] = ..., content: _Optional[bytes] = ..., owner: _Optional[str] = ...) -> None: ...

class TableRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[TableRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[TableRequest, _Mapping]]] = ...) -> None: ...
