"""A host that keeps processes in memory, behind the run API of the genuine SDK."""

import asyncio
import base64
from typing import Any

import pytest
from langbot_plugin.api.entities.builtin.runner.context import RunnerContext
from langbot_plugin.api.proxies.runner import RunnerAPIProxy
from langbot_plugin.entities.io.errors import (
    ActionCallError,
    ActionCallTimeoutError,
    ConnectionClosedError,
)


def refusal(code: str, message: str = "no", **more: Any) -> ActionCallError:
    return ActionCallError(message, {"error": {"code": code, "message": message, **more}})


class Host:
    """Answers the five calls; ``faults`` are raised, in order, before an answer or, for
    those of ``lost``, after it was made."""

    def __init__(self):
        self.calls: list[tuple[str, dict, float]] = []
        self.faults: list[Exception] = []
        self.lost: list[Exception] = []
        self.opened: dict[str, dict] = {}
        self.input = b""
        self.input_eof = False
        self.window = 1 << 20
        self.log: list[tuple[str, bytes]] = []
        self.log_eof = False
        self.kept_from = 0
        self.exit: dict | None = None
        self.state = "running"
        self.closes: list[dict] = []
        self.io = {"max_write_bytes": 10, "max_read_bytes": 7, "max_wait_ms": 1000}
        self.news = asyncio.Event()
        self.waiting = asyncio.Event()  # a read waits for output

    def say(self, stream: str, data: bytes) -> None:
        self.log.append((stream, data))
        self.news.set()

    def end(self, code: int = 0) -> None:
        self.log_eof, self.exit, self.state = True, {"kind": "exited", "code": code}, "exited"
        self.news.set()

    async def call_action(self, action, data, timeout=15.0):
        self.calls.append((action.value, data, timeout))
        if self.faults:
            raise self.faults.pop(0)
        answer = await getattr(self, action.value)(dict(data))
        if self.lost:
            raise self.lost.pop(0)
        return answer

    def process(self) -> dict:
        return {
            "handle": "h1",
            "request_id": next(iter(self.opened), ""),
            "state": self.state,
            "generation": 3,
            "cleanup": "pending",
            "io": self.io,
            "stdin": {"accepted": len(self.input), "eof": self.input_eof, "window_bytes": self.window},
            "cursor": str(sum(len(d) for _, d in self.log)),
            **({"exit": self.exit} if self.exit else {}),
            "a_later_field": [1],
        }

    async def open_run_process(self, data):
        before = self.opened.setdefault(data["request_id"], data)
        if before != data:
            raise refusal("conflict")
        return self.process()

    async def get_run_process(self, data):
        if data.get("handle") != "h1" and data.get("request_id") not in self.opened:
            raise refusal("not_found")
        return self.process()

    async def write_run_process(self, data):
        offset, part = data["offset"], base64.b64decode(data["data_base64"], validate=True)
        if offset > len(self.input) or self.input[offset:][: len(part)] != part[: len(self.input) - offset]:
            raise refusal("conflict")
        fresh = part[len(self.input) - offset :]
        if fresh and not self.window:
            raise refusal("exhausted", "the child does not read", details={"window_bytes": 0})
        took = fresh[: self.window]
        self.input += took
        self.window -= len(took)
        if data["eof"] and took == fresh:
            self.input_eof = True
        return {"accepted": len(self.input), "eof": self.input_eof, "window_bytes": self.window}

    async def read_run_process(self, data):
        at = int(data["cursor"] or 0)
        whole = sum(len(d) for _, d in self.log)
        if at >= whole and not self.log_eof and data["wait_ms"]:
            self.news.clear()
            self.waiting.set()
            try:
                await asyncio.wait_for(self.news.wait(), data["wait_ms"] / 1000)
            except asyncio.TimeoutError:
                pass
        answer: dict[str, Any] = {"records": [], "oldest_cursor": str(self.kept_from)}
        if at < self.kept_from:
            answer["gap"] = {"from": str(at), "to": str(self.kept_from), "bytes": self.kept_from - at}
            at = self.kept_from
        room, position, offsets = data.get("max_bytes", 100), 0, {"stdout": 0, "stderr": 0}
        for stream, piece in self.log:
            skip = min(max(at - position, 0), len(piece))
            part = piece[skip:][:room]
            if part and position + skip == at:
                answer["records"].append(
                    {"stream": stream, "offset": offsets[stream] + skip, "data_base64": base64.b64encode(part).decode()}
                )
                at += len(part)
                room -= len(part)
            position += len(piece)
            offsets[stream] += len(piece)
        answer["next_cursor"] = str(at)
        answer["eof"] = self.log_eof and at == position
        if answer["eof"] and self.exit:
            answer["exit"] = self.exit
        return answer

    async def close_run_process(self, data):
        self.closes.append(data)
        await asyncio.sleep(0)
        return {"quiescent": True, "receipt": {"id": "r"}, "process": self.process()}


@pytest.fixture
def host():
    return Host()


def context(**runtime) -> RunnerContext:
    return RunnerContext.model_validate(
        {
            "run_id": "run-1",
            "trigger": {"type": "message"},
            "event": {"event_id": "e", "event_type": "message.received", "source": "test"},
            "input": {"text": "x"},
            "delivery": {"surface": "test"},
            "resources": {},
            "runtime": {"langbot_version": "4.11.0", **runtime},
        }
    )


@pytest.fixture
def api(host):
    return RunnerAPIProxy(ctx=context(), plugin_runtime_handler=host)


lost_answer = ActionCallTimeoutError("Action call timed out")
broken = ConnectionClosedError("Connection closed")
