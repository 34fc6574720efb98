"""A hub of coding-relay-v1 for the bench, written from the table of frames: the
plain way to do it with asyncio and the websockets library. It is the baseline and
has that way's properties: messages are built into values, queues have no bound,
tool calls are made where frames are read, the library's limits stand.

Driven by lines on standard input and output, as relayhub.go is."""

import argparse
import asyncio
import hashlib
import hmac
import json
import os
import resource
import secrets
import sys
import time

import websockets

PROTOCOL = "coding-relay-v1"
CANCEL_TIMEOUT = 10.0


class Job:
    def __init__(self, link, job_id):
        self.link = link
        self.id = job_id
        self.queue = asyncio.Queue()
        self.finished = asyncio.get_running_loop().create_future()
        self.cancelling = False
        self.revoked = False


class Link:
    def __init__(self, ws, daemon_id):
        self.ws = ws
        self.id = daemon_id
        self.jobs = {}
        self.seen = time.monotonic()

    async def send(self, frame):
        await self.ws.send(json.dumps(frame, ensure_ascii=False))


class Hub:
    def __init__(self, token, state, tool_time):
        self.token = token
        self.state = state
        self.tool_time = tool_time
        self.links = {}
        self.fenced = set()
        self.stalled = []

    # What daemons say.

    async def serve(self, ws, path=None):
        try:
            hello = json.loads(await asyncio.wait_for(ws.recv(), 10))
        except Exception:
            return
        if not isinstance(hello, dict) or hello.get("type") != "daemon.hello":
            await ws.close(1008, "hello required")
            return
        daemon_id = str(hello.get("daemon_id") or "").strip()
        if not daemon_id or len(daemon_id) > 128:
            await ws.close(1008, "daemon_id required")
            return
        if self.token and not hmac.compare_digest(str(hello.get("token") or ""), self.token):
            await ws.close(1008, "invalid token")
            return
        if hello.get("protocol") != PROTOCOL:
            await ws.close(1008, "protocol")
            return
        if daemon_id in self.links or daemon_id in self.fenced:
            await ws.close(1008, "connected or fenced")
            return
        link = Link(ws, daemon_id)
        self.links[daemon_id] = link
        try:
            await link.send({"type": "daemon.ready", "daemon_id": daemon_id, "protocol": PROTOCOL})
            async for message in ws:
                await self.frame(link, message)
        except websockets.ConnectionClosed:
            pass
        finally:
            if self.links.get(daemon_id) is link:
                del self.links[daemon_id]
            for job in list(link.jobs.values()):
                self.fenced.add(daemon_id)
                job.revoked = True
                if not job.finished.done():
                    job.finished.set_result(False)
                job.queue.put_nowait({"type": "run.failed", "data": {"code": "relay.daemon_disconnected"}})
                job.queue.put_nowait(None)

    async def frame(self, link, message):
        try:
            frame = json.loads(message)
        except ValueError:
            return
        if not isinstance(frame, dict):
            return
        link.seen = time.monotonic()
        kind = frame.get("type")
        if kind == "daemon.ping":
            await link.send({"type": "daemon.pong"})
            return
        job = link.jobs.get(str(frame.get("job_id") or ""))
        if job is None:
            return
        if kind == "run.event":
            event = frame.get("event")
            if isinstance(event, dict) and not job.cancelling and not job.finished.done():
                job.queue.put_nowait(event)
        elif kind == "run.finished":
            job.revoked = True
            if not job.finished.done():
                job.finished.set_result(True)
            job.queue.put_nowait(None)
        elif kind == "mcp.request":
            await asyncio.sleep(self.tool_time)
            payload = frame.get("payload") or {}
            await link.send({"type": "mcp.response", "request_id": frame.get("request_id"), "job_id": job.id,
                             "payload": {"jsonrpc": "2.0", "id": payload.get("id"), "result": {}}})

    # What callers do.

    def marker(self, daemon_id):
        return os.path.join(self.state, hashlib.sha256(daemon_id.encode()).hexdigest() + ".pending")

    async def start(self, daemon_id, payload):
        if daemon_id in self.fenced:
            raise RuntimeError("fenced")
        link = self.links.get(daemon_id)
        if link is None:
            raise RuntimeError("offline")
        if self.state and not link.jobs:
            os.makedirs(self.state, mode=0o700, exist_ok=True)
            with open(self.marker(daemon_id), "x") as f:
                f.write(daemon_id)
                f.flush()
                os.fsync(f.fileno())
        job = Job(link, secrets.token_urlsafe(16))
        link.jobs[job.id] = job
        await link.send({"type": "run.start", "job_id": job.id, "payload": payload})
        return job

    async def settle(self, job):
        job.cancelling = True
        job.revoked = True
        ok = job.finished.done() and job.finished.result()
        if not job.finished.done():
            try:
                await job.link.send({"type": "run.cancel", "job_id": job.id})
                ok = await asyncio.wait_for(asyncio.shield(job.finished), CANCEL_TIMEOUT)
            except Exception:
                ok = False
        if not ok:
            self.fenced.add(job.link.id)
        job.link.jobs.pop(job.id, None)
        if self.state and not job.link.jobs and job.link.id not in self.fenced:
            os.unlink(self.marker(job.link.id))
        return ok

    async def events(self, job):
        while True:
            event = await job.queue.get()
            if event is None:
                return
            yield event

    async def follow(self, daemon_id, payload):
        job = await self.start(daemon_id, payload)
        n = 0
        try:
            async for event in self.events(job):
                n += 1
        finally:
            ok = await self.settle(job)
        if not ok:
            raise RuntimeError("a job was not acknowledged")
        return n

    async def begin(self, daemon_id, payload):
        job = await self.start(daemon_id, payload)
        if await job.queue.get() is None:
            raise RuntimeError("the job ended before its first event")
        return job

    async def do(self, ask):
        op, daemons, payload = ask["op"], ask.get("daemons") or [], ask.get("payload")
        if op == "jobs":
            begin, ends = time.monotonic(), [0.0] * len(daemons)

            async def one(i):
                n = await self.follow(daemons[i], payload)
                ends[i] = time.monotonic() - begin
                return n

            counts = await asyncio.gather(*[one(i) for i in range(len(daemons))])
            return {"events": sum(counts), "ends": ends}
        if op == "repeat":
            for _ in range(ask["n"]):
                await self.follow(daemons[0], payload)
            return {}
        if op == "cancel":
            times = []
            for _ in range(ask["n"]):
                job = await self.begin(daemons[0], payload)
                begin = time.monotonic()
                if not await self.settle(job):
                    raise RuntimeError("a cancel was not acknowledged")
                times.append(time.monotonic() - begin)
            return {"times": times}
        if op == "stall":
            self.stalled.append(await self.begin(daemons[0], payload))
            return {}
        if op == "flood":
            job = await self.begin(daemons[0], payload)
            self.stalled.append(job)

            async def read():
                async for _ in self.events(job):
                    pass

            job.reader = asyncio.create_task(read())
            return {}
        if op == "unstall":
            await self.settle(self.stalled.pop())
            return {}
        if op == "tool":
            fenced = 0

            async def tool(daemon_id):
                nonlocal fenced
                other = await self.begin(daemon_id, {"events": 1, "size": 0, "hold": True, "tool": False})
                calling = await self.start(daemon_id, {"events": 1, "size": 0, "hold": True, "tool": True})
                await asyncio.sleep(0.5)
                if not await self.settle(other):
                    fenced += 1
                await self.settle(calling)

            await asyncio.gather(*[tool(d) for d in daemons])
            return {"fenced": fenced}
        raise RuntimeError("no such op: " + op)


async def main():
    args = argparse.ArgumentParser()
    args.add_argument("--state", default="")
    args.add_argument("--token", default="")
    args.add_argument("--tool-time", type=float, default=12.0)
    args.add_argument("--compression", action="store_true")
    args = args.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    hub = Hub(args.token, args.state, args.tool_time)
    more = {} if args.compression else {"compression": None}
    reader = asyncio.StreamReader(limit=64 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    def reply(value):
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    async def answer(ask):
        begin = time.monotonic()
        try:
            value = await hub.do(ask)
        except Exception as e:
            value = {"error": str(e) or type(e).__name__}
        value.update(id=ask["id"], took=time.monotonic() - begin)
        reply(value)

    async with websockets.serve(hub.serve, "127.0.0.1", 0, **more) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        reply({"id": 0, "url": "ws://127.0.0.1:%d" % port})
        tasks = set()
        while line := await reader.readline():
            task = asyncio.create_task(answer(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        os._exit(0)


asyncio.run(main())
