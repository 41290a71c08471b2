from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupPositions(_message.Message):
    __slots__ = ("positions", "log_start", "log_end")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    LOG_START_FIELD_NUMBER: _ClassVar[int]
    LOG_END_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedCompositeFieldContainer[GroupPosition]
    log_start: int
    log_end: int
    def __init__(self, positions: _Optional[_Iterable[_Union[GroupPosition, _Mapping]]] = ..., log_start: _Optional[int] = ..., log_end: _Optional[int] = ...) -> None: ...

class GroupPosition(_message.Message):
    __slots__ = ("name", "position")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    name: str
    position: int
    def __init__(self, name: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...
