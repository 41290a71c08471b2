from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupPositions(_message.Message):
    __slots__ = ("positions", "log_start", "log_end", "epoch")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    LOG_START_FIELD_NUMBER: _ClassVar[int]
    LOG_END_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedCompositeFieldContainer[GroupPosition]
    log_start: int
    log_end: int
    epoch: LogEpoch
    def __init__(self, positions: _Optional[_Iterable[_Union[GroupPosition, _Mapping]]] = ..., log_start: _Optional[int] = ..., log_end: _Optional[int] = ..., epoch: _Optional[_Union[LogEpoch, _Mapping]] = ...) -> None: ...

class LogEpoch(_message.Message):
    __slots__ = ("number", "forced", "runs")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    number: int
    forced: bytes
    runs: _containers.RepeatedCompositeFieldContainer[LogRun]
    def __init__(self, number: _Optional[int] = ..., forced: _Optional[bytes] = ..., runs: _Optional[_Iterable[_Union[LogRun, _Mapping]]] = ...) -> None: ...

class LogRun(_message.Message):
    __slots__ = ("run", "first")
    RUN_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    run: int
    first: int
    def __init__(self, run: _Optional[int] = ..., first: _Optional[int] = ...) -> None: ...

class GroupPosition(_message.Message):
    __slots__ = ("name", "position")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    name: str
    position: int
    def __init__(self, name: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...
