"""The shapes of the five calls. Fields that are not known here are ignored."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", populate_by_name=True, frozen=True)


def _from_base64(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("base64 text expected")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None


Base64Data = Annotated[bytes, BeforeValidator(_from_base64)]


class Winsize(_Model):
    """The size of a terminal in character cells."""

    rows: int = Field(ge=1, le=4096)
    cols: int = Field(ge=1, le=4096)


class Limits(_Model):
    """Bounds of one process. What is not set is the host's default."""

    deadline_ms: int | None = Field(default=None, ge=0)
    spool_bytes: int | None = Field(default=None, ge=0)
    overflow: str | None = None  # block or drop_oldest
    memory_bytes: int | None = Field(default=None, ge=0)
    pids: int | None = Field(default=None, ge=0)


class IOLimits(_Model):
    """How much one call may carry."""

    max_write_bytes: int = 256 << 10
    max_read_bytes: int = 256 << 10
    max_wait_ms: int = 20_000
    stdin_window_bytes: int = 256 << 10


class Exit(_Model):
    """How a process ended. ``kind`` is exited, signalled, oom, deadline, spawn_failed or
    unknown; only exited with code 0 is success."""

    kind: str
    code: int | None = None
    signal: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.kind == "exited" and self.code == 0


class StdinState(_Model):
    """How far the input was accepted: the next offset to write."""

    accepted: int = 0
    eof: bool = False
    window_bytes: int = 0


class ProcessInfo(_Model):
    """A process as its owner sees it."""

    handle: str
    request_id: str = ""
    state: str = ""
    generation: int = 0
    exit: Exit | None = None
    cleanup: str = ""
    fence: str = ""
    reason: str = ""
    io: IOLimits = Field(default_factory=IOLimits)
    stdin: StdinState = Field(default_factory=StdinState)
    cursor: str = ""


class Record(_Model):
    """A piece of output; offset counts the bytes of its stream."""

    stream: str
    offset: int
    data: Base64Data = Field(alias="data_base64")


class Gap(_Model):
    """Output that is no longer kept: cursors from up to, not including, to."""

    start: str = Field(default="", alias="from")
    end: str = Field(default="", alias="to")
    bytes: int = 0


class ReadResult(_Model):
    """A piece of the log. The same cursor returns the same bytes while they are kept."""

    records: list[Record] = Field(default_factory=list)
    next_cursor: str
    oldest_cursor: str = ""
    gap: Gap | None = None
    eof: bool = False
    exit: Exit | None = None


class CloseResult(_Model):
    """Whether the process and all it started are proven gone. If not, a fence stands."""

    quiescent: bool
    fence: Any = None
    receipt: Any = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of stdout or stderr, at an offset of that stream."""

    stream: str
    offset: int
    data: bytes
