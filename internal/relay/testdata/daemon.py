"""A daemon of coding-relay-v1, written from the frame table alone.

Runs the job kinds below; everything it does to the wire is what the table says.
One connection, no reconnect: it ends when the hub closes.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys

import websockets


class Daemon:
    def __init__(self, ws):
        self.ws = ws
        self.jobs = {}
        self.calls = {}

    async def send(self, type_, **fields):
        await self.ws.send(json.dumps(dict(type=type_, **fields)))

    async def event(self, job, type_, **data):
        await self.send("run.event", job_id=job, event=dict(type=type_, data=data))

    async def call(self, job, payload):
        request = secrets.token_urlsafe(12)
        self.calls[request] = asyncio.get_running_loop().create_future()
        try:
            await self.send("mcp.request", request_id=request, job_id=job, payload=payload)
            return await asyncio.wait_for(self.calls[request], 20)
        finally:
            del self.calls[request]

    async def work(self, job, payload):
        kind = payload["kind"]
        if kind == "echo":
            for n in range(payload["events"]):
                await self.event(job, "message.delta", n=n, text=payload["text"])
        elif kind == "large":
            await self.event(job, "message.completed", text="x" * payload["bytes"])
        elif kind == "tool":
            for one in payload["calls"]:
                await self.event(job, "tool", answer=await self.call(job, one))
        elif kind == "fail":
            raise ValueError("as asked")
        elif kind in ("child", "deaf"):
            child = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
            await self.event(job, "child", pid=child.pid)
            try:
                await child.wait()
            finally:
                os.killpg(child.pid, signal.SIGKILL)
                await child.wait()

    async def run(self, job, payload):
        try:
            await self.work(job, payload)
        except asyncio.CancelledError:
            await self.event(job, "run.failed", error="cancelled", code="agent_runtime.daemon_cancelled", retryable=True)
            if payload["kind"] == "deaf":
                return
        except Exception as error:
            await self.event(job, "run.failed", error=str(error), code="agent_runtime.daemon_unexpected", retryable=False)
        await self.send("run.finished", job_id=job)

    async def serve(self):
        async for message in self.ws:
            frame = json.loads(message)
            job = frame.get("job_id")
            if frame["type"] == "run.start":
                if job in self.jobs:
                    raise RuntimeError("the same job twice")
                task = asyncio.create_task(self.run(job, frame["payload"]))
                self.jobs[job] = task
                task.add_done_callback(lambda _, job=job: self.jobs.pop(job, None))
            elif frame["type"] == "run.cancel":
                if job in self.jobs:
                    self.jobs[job].cancel()
            elif frame["type"] == "mcp.response":
                waiting = self.calls.get(frame["request_id"])
                if waiting and not waiting.done():
                    waiting.set_result(frame["payload"])
            elif frame["type"] == "run.cleanup":
                raise RuntimeError("a hub older than v1")


async def main():
    args = argparse.ArgumentParser()
    args.add_argument("--url", required=True)
    args.add_argument("--daemon-id", required=True)
    args.add_argument("--token", default="")
    args.add_argument("--compression", action="store_true")
    args = args.parse_args()
    compression = "deflate" if args.compression else None
    async with websockets.connect(args.url, max_size=32 << 20, compression=compression) as ws:
        await ws.send(json.dumps(dict(
            type="daemon.hello", daemon_id=args.daemon_id, protocol="coding-relay-v1", token=args.token,
            metadata=dict(pid=os.getpid(), cwd=os.getcwd(), platform=sys.platform))))
        ready = json.loads(await asyncio.wait_for(ws.recv(), 10))
        if ready["type"] != "daemon.ready" or ready["protocol"] != "coding-relay-v1":
            raise RuntimeError("not ready")
        daemon = Daemon(ws)
        try:
            await daemon.serve()
        except websockets.ConnectionClosed:
            pass
        finally:
            jobs = list(daemon.jobs.values())
            for task in jobs:
                task.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        print(json.dumps(dict(closed=ws.close_code, reason=ws.close_reason)), flush=True)


asyncio.run(main())
