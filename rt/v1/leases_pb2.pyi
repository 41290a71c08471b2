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
