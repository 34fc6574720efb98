"""The five calls over the run API of the SDK, repeated where that is safe.

All are safe to repeat: an open by its request_id, a write by its offset, a read by its
cursor. So a lost answer, a broken connection or a host that restarts is not the caller's
to handle, as long as the run's deadline and ``patience`` allow.
"""

from __future__ import annotations

import asyncio
import base64
import random
import time
import uuid
from typing import Any, Mapping, Sequence, TypeVar

from langbot_plugin.api.entities.builtin.runner.errors import (
    AgentAPIError,
    AgentAPIException,
)
from langbot_plugin.entities.io.actions.enums import ActionType
from pydantic import BaseModel, ValidationError

from stockade_runner.errors import ProcessError
from stockade_runner.models import (
    CloseResult,
    Limits,
    ProcessInfo,
    ReadResult,
    StdinState,
    Winsize,
)


class RunProcessAction(ActionType):
    """The actions of a run's processes."""

    OPEN = "open_run_process"
    WRITE = "write_run_process"
    READ = "read_run_process"
    GET = "get_run_process"
    CLOSE = "close_run_process"


CALL_SECONDS = 30.0  # of one attempt, beyond the time the host was asked to wait
OPEN_SECONDS = 120.0  # an image may have to be unpacked
CLOSE_SECONDS = 60.0  # beyond the grace: until the tree is proven gone
FIRST_DELAY = 0.05
MAX_DELAY = 2.0

_Answer = TypeVar("_Answer", bound=BaseModel)


class RunProcessAPI:
    """The five calls for one run.

    ``run`` is the :class:`RunnerContext` inside a runner's ``run``, or what
    ``get_run_api(ctx)`` returns. ``patience`` is for how many seconds a call is repeated
    that fails in a way that may pass; never beyond the run's deadline.
    """

    def __init__(self, run: Any, *, patience: float = 60.0):
        # A context carries the API; an API is what bounds its calls by the deadline.
        self._api = run if hasattr(run, "_bounded_timeout") else run.api
        inner = self._api
        while not hasattr(inner, "plugin_runtime_handler"):
            inner = inner._api
        self._handler = inner.plugin_runtime_handler
        self.run_id: str = self._api.run_id
        self.patience = patience

    async def open_run_process(
        self,
        argv: Sequence[str],
        *,
        request_id: str | None = None,
        target_ref: str | None = None,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
        pty: Winsize | None = None,
        limits: Limits | None = None,
    ) -> ProcessInfo:
        """Start a process. The same request_id with the same arguments is the same
        process, for ever: keep it if you want to find the process after a restart."""
        if isinstance(argv, (str, bytes)) or not argv:
            raise TypeError("argv is a list of the program and its arguments; no shell is involved")
        data: dict[str, Any] = {
            "request_id": request_id or str(uuid.uuid4()),
            "argv": list(argv),
            "cwd": cwd,
            "env": dict(env or {}),
            "stdin": stdin,
        }
        if target_ref is not None:
            data["target_ref"] = target_ref
        if pty is not None:
            data["pty"] = pty.model_dump()
        if limits is not None:
            data["limits"] = limits.model_dump(exclude_none=True)
        return await self._call(RunProcessAction.OPEN, data, OPEN_SECONDS, ProcessInfo)

    async def write_run_process(
        self, handle: str, offset: int, data: bytes, eof: bool = False
    ) -> StdinState:
        """Write input at an offset, and its end after it. Less than all may be accepted;
        other bytes at an offset that was accepted are a conflict."""
        payload = {
            "handle": handle,
            "offset": offset,
            "data_base64": base64.b64encode(data).decode("ascii"),
            "eof": eof,
        }
        return await self._call(RunProcessAction.WRITE, payload, CALL_SECONDS, StdinState)

    async def read_run_process(
        self,
        handle: str,
        cursor: str = "",
        *,
        max_bytes: int | None = None,
        wait_ms: int = 0,
    ) -> ReadResult:
        """Read from a cursor; empty is the oldest byte that is kept. If there is nothing
        yet the host waits up to wait_ms. Reading consumes nothing."""
        payload: dict[str, Any] = {"handle": handle, "cursor": cursor, "wait_ms": wait_ms}
        if max_bytes is not None:
            payload["max_bytes"] = max_bytes
        return await self._call(
            RunProcessAction.READ, payload, CALL_SECONDS + wait_ms / 1000, ReadResult
        )

    async def get_run_process(
        self, *, handle: str | None = None, request_id: str | None = None
    ) -> ProcessInfo:
        """The process as it is now, by its handle or by the id it was opened with."""
        return await self._call(
            RunProcessAction.GET, _named(handle, request_id), CALL_SECONDS, ProcessInfo
        )

    async def close_run_process(
        self,
        *,
        handle: str | None = None,
        request_id: str | None = None,
        reason: str = "",
        grace_ms: int | None = None,
    ) -> CloseResult:
        """Stop the process and all it started, and wait for the proof that they are gone.
        By request_id it also forbids an open that has not arrived yet."""
        payload: dict[str, Any] = {**_named(handle, request_id), "reason": reason}
        if grace_ms is not None:
            payload["grace_ms"] = grace_ms
        seconds = CLOSE_SECONDS + (5000 if grace_ms is None else grace_ms) / 1000
        return await self._call(RunProcessAction.CLOSE, payload, seconds, CloseResult)

    async def _call(
        self,
        action: RunProcessAction,
        data: dict[str, Any],
        seconds: float,
        answer: type[_Answer],
    ) -> _Answer:
        payload = {"run_id": self.run_id, **data}
        until = time.monotonic() + self.patience
        delay = FIRST_DELAY
        while True:
            # Raises when the run's deadline has passed; that ends the repeating.
            try:
                timeout = self._api._bounded_timeout(default=seconds)
            except AgentAPIException as error:
                raise ProcessError(error.error) from error
            try:
                raw = await self._handler.call_action(action, payload, timeout)
                return answer.model_validate(raw)
            except ValidationError as error:
                raise ProcessError(
                    AgentAPIError(
                        code="host.malformed_response",
                        message=f"the answer to {action.value} is not of its shape",
                        details={"errors": error.errors(include_input=False, include_url=False)},
                    )
                ) from error
            except AgentAPIException as error:
                failure = ProcessError(error.error)
                # A full pipe is the child's own pace, and the writer's to wait for.
                may_pass = failure.retryable and failure.code != "exhausted"
                if not may_pass or time.monotonic() >= until:
                    raise failure from error
            await asyncio.sleep(delay * random.uniform(0.5, 1))
            delay = min(2 * delay, MAX_DELAY)


def _named(handle: str | None, request_id: str | None) -> dict[str, Any]:
    if (handle is None) == (request_id is None):
        raise TypeError("exactly one of handle and request_id names a process")
    return {"handle": handle} if handle is not None else {"request_id": request_id}
