"""A process as an object."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, AsyncIterator, Callable, Mapping, Sequence

from stockade_runner.api import RunProcessAPI
from stockade_runner.errors import OutputLost, ProcessError
from stockade_runner.models import (
    Chunk,
    CloseResult,
    Exit,
    Gap,
    IOLimits,
    Limits,
    ProcessInfo,
    Winsize,
)

WAIT_MS = 20_000  # of one read that waits; a run's connection carries many
READ_BYTES = 256 << 10
FULL_DELAY = 0.05  # first wait for a child that does not read
FULL_MAX_DELAY = 1.0
ENDED = ("fenced", "closed", "never_started")


def process_limits(ctx: Any) -> IOLimits | None:
    """How much one call of a run may carry, or None where the run may not run processes:
    to be looked at before anything is begun. ``ctx`` is the context of the runner."""
    told = ctx.runtime.metadata.get("run_process")
    return IOLimits.model_validate(told) if isinstance(told, dict) else None


async def open_process(
    run: Any,
    argv: Sequence[str],
    *,
    request_id: str | None = None,
    target_ref: str | None = None,
    cwd: str = "",
    env: Mapping[str, str] | None = None,
    stdin: bool = False,
    pty: Winsize | None = None,
    limits: Limits | None = None,
    patience: float = 60.0,
) -> Process:
    """Start a program for a run. ``run`` is the context of the runner, or what
    ``get_run_api(ctx)`` returns. Close the process, or use it with ``async with``."""
    api = RunProcessAPI(run, patience=patience)
    info = await api.open_run_process(
        argv,
        request_id=request_id,
        target_ref=target_ref,
        cwd=cwd,
        env=env,
        stdin=stdin,
        pty=pty,
        limits=limits,
    )
    return Process(api, info)


class Process:
    """A running process. Writes go in the order of the calls; each reader has its own
    position, so that output may be read more than once while it is kept."""

    def __init__(self, api: RunProcessAPI, info: ProcessInfo):
        self._api = api
        self._info = info
        self._offset = info.stdin.accepted
        self._unsure = False
        self._writing = asyncio.Lock()

    @classmethod
    async def find(cls, run: Any, request_id: str, *, patience: float = 60.0) -> Process:
        """The process that was opened with a request_id before, also by an earlier worker."""
        api = RunProcessAPI(run, patience=patience)
        return cls(api, await api.get_run_process(request_id=request_id))

    @property
    def handle(self) -> str:
        return self._info.handle

    @property
    def request_id(self) -> str:
        return self._info.request_id

    @property
    def io(self) -> IOLimits:
        return self._info.io

    async def info(self) -> ProcessInfo:
        """The process as it is now."""
        self._info = await self._api.get_run_process(handle=self.handle)
        return self._info

    async def write(self, data: bytes) -> None:
        """Write all of data to the process's input; waits while it does not read."""
        await self._write(bytes(data), eof=False)

    async def close_stdin(self) -> None:
        """End the process's input."""
        await self._write(b"", eof=True)

    async def _write(self, data: bytes, eof: bool) -> None:
        async with self._writing:
            if self._unsure:
                # An earlier write was cancelled half-way: only the host knows how far it came.
                self._offset = (await self.info()).stdin.accepted
                self._unsure = False
            view = memoryview(data)
            begin = self._offset
            end = begin + len(data)
            delay = FULL_DELAY
            while True:
                part = bytes(view[self._offset - begin :][: max(1, self.io.max_write_bytes)])
                last = self._offset + len(part) == end
                accepted = self._offset
                self._unsure = True
                try:
                    state = await self._api.write_run_process(
                        self.handle, self._offset, part, eof and last
                    )
                except ProcessError as error:
                    if error.code != "exhausted":
                        raise
                else:
                    accepted = state.accepted
                    if not self._offset <= accepted <= self._offset + len(part):
                        raise ProcessError.make(
                            "host.malformed_response",
                            f"of a write at {self._offset} the host accepted up to {accepted}",
                        )
                self._unsure = False
                moved = accepted > self._offset
                self._offset = accepted
                if accepted == end and (not data or moved) and (state.eof or not eof):
                    return
                if moved:
                    delay = FULL_DELAY
                    continue
                await asyncio.sleep(delay)
                delay = min(2 * delay, FULL_MAX_DELAY)

    async def output(
        self, cursor: str = "", *, on_gap: Callable[[Gap], None] | None = None
    ) -> AsyncIterator[Chunk]:
        """All output from a cursor on, until the process has closed it; empty is the oldest
        byte that is kept. Output that is no longer kept is OutputLost, or told to on_gap."""
        wait = min(WAIT_MS, self.io.max_wait_ms)
        most = min(READ_BYTES, self.io.max_read_bytes)
        while True:
            part = await self._api.read_run_process(
                self.handle, cursor, max_bytes=most, wait_ms=wait
            )
            if part.gap is not None:
                if on_gap is None:
                    raise OutputLost(part.gap)
                on_gap(part.gap)
            for record in part.records:
                yield Chunk(record.stream, record.offset, record.data)
            if part.eof:
                return
            cursor = part.next_cursor

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self.output()

    async def wait(self) -> Exit:
        """Wait until it is known how the process ended. The kind unknown is no success."""
        delay = 0.02
        while True:
            info = await self.info()
            if info.exit is not None:
                return info.exit
            if info.state == "never_started":
                raise ProcessError.make("conflict", "the process was closed before it started")
            if info.state in ENDED:
                return Exit(kind="unknown", detail="no exit status was recorded")
            if delay > 0.1 and info.cursor:
                # The end of the output is the usual sign of the end, and can be waited for.
                await self._api.read_run_process(
                    self.handle,
                    info.cursor,
                    max_bytes=1,
                    wait_ms=min(WAIT_MS, info.io.max_wait_ms),
                )
            await asyncio.sleep(delay)
            delay = min(2 * delay, 0.4)

    async def close(self, reason: str = "", grace_ms: int | None = None) -> CloseResult:
        """Stop the process and all it started. May be called at any time, and again."""
        return await self._api.close_run_process(
            handle=self.handle, reason=reason, grace_ms=grace_ms
        )

    async def __aenter__(self) -> Process:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        reason = "" if kind is None else kind.__name__
        closing = asyncio.ensure_future(self.close(reason=reason))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            # A run that is cancelled closes its processes all the same.
            await asyncio.wait([closing])
            raise
