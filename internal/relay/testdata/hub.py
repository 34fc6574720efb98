"""A hub of coding-relay-v1, written from the frame table alone, driven by lines.

Prints its URL. Then each line of JSON on stdin is a command:
  {"do":"run","key":K,"daemon_id":D,"payload":{…},"timeout":S}   {"do":"cancel","key":K}
  {"do":"wait","daemon_id":D}   {"do":"drop","daemon_id":D}   {"do":"raw","daemon_id":D,"text":T}   {"do":"stop"}
and what happens is a line of JSON on stdout, with the key of its job:
  {"event":…}   {"end":"finished"|"fenced"|"refused"}   {"ready":D}
A tool call is answered with {"jsonrpc":"2.0","id":…,"result":{"echo":…}}.
"""

import asyncio
import hmac
import json
import secrets
import sys

import websockets

PROTOCOL = "coding-relay-v1"


class Hub:
    def __init__(self, token, cancel_timeout):
        self.token, self.cancel_timeout = token, cancel_timeout
        self.daemons, self.jobs, self.fenced = {}, {}, set()
        self.keys = {}

    def say(self, **line):
        print(json.dumps(line), flush=True)

    async def handle(self, ws):
        try:
            hello = json.loads(await asyncio.wait_for(ws.recv(), 10))
        except (TimeoutError, ValueError, websockets.ConnectionClosed):
            return
        if not isinstance(hello, dict) or hello.get("type") != "daemon.hello":
            return await ws.close(1008, "hello required")
        name = str(hello.get("daemon_id", "")).strip()
        if not 1 <= len(name) <= 128:
            return await ws.close(1008, "daemon_id")
        if self.token and not hmac.compare_digest(str(hello.get("token", "")), self.token):
            return await ws.close(1008, "invalid token")
        if hello.get("protocol") != PROTOCOL:
            return await ws.close(1008, "protocol")
        if name in self.daemons or name in self.fenced:
            return await ws.close(1008, "connected or fenced")
        self.daemons[name] = ws
        await ws.send(json.dumps(dict(type="daemon.ready", daemon_id=name, protocol=PROTOCOL)))
        self.say(ready=name)
        try:
            async for message in ws:
                await self.frame(ws, message)
        except websockets.ConnectionClosed:
            pass
        finally:
            del self.daemons[name]
            for job in [j for j in self.jobs.values() if j["ws"] is ws]:
                self.fenced.add(name)
                job["lost"] = True
                job["done"].set()
            self.say(gone=name, code=ws.close_code)

    async def frame(self, ws, message):
        try:
            frame = json.loads(message)
        except ValueError:
            return
        if not isinstance(frame, dict):
            return
        job = self.jobs.get(frame.get("job_id"))
        if frame.get("type") == "daemon.ping":
            await ws.send('{"type":"daemon.pong"}')
        if not job or job["ws"] is not ws:
            return
        if frame["type"] == "run.event" and isinstance(frame.get("event"), dict):
            if not job["cancelling"]:
                self.say(key=job["key"], event=frame["event"])
        elif frame["type"] == "run.finished":
            job["done"].set()
        elif frame["type"] == "mcp.request":
            payload = frame["payload"]
            def answer(one):
                return dict(jsonrpc="2.0", id=one["id"], result=dict(echo=one))
            if isinstance(payload, list):
                reply = [answer(one) for one in payload if "id" in one] or None
            else:
                reply = answer(payload) if "id" in payload else None
            await ws.send(json.dumps(dict(
                type="mcp.response", request_id=frame["request_id"], job_id=frame["job_id"], payload=reply)))

    async def run(self, key, daemon_id, payload, timeout=60):
        ws = self.daemons.get(daemon_id)
        if daemon_id in self.fenced or not ws:
            return self.say(key=key, end="refused")
        job_id = secrets.token_urlsafe(16)
        job = dict(key=key, ws=ws, done=asyncio.Event(), cancelling=False, lost=False)
        self.jobs[job_id] = self.keys[key] = job
        try:
            await ws.send(json.dumps(dict(type="run.start", job_id=job_id, payload=payload)))
            stop = asyncio.create_task(asyncio.sleep(timeout))
            job["stop"] = stop
            done = asyncio.create_task(job["done"].wait())
            await asyncio.wait([stop, done], return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not done.done():
                job["cancelling"] = True
                await ws.send(json.dumps(dict(type="run.cancel", job_id=job_id)))
                await asyncio.wait([done], timeout=self.cancel_timeout)
                if not done.done():
                    job["lost"] = True
            done.cancel()
        except websockets.ConnectionClosed:
            job["lost"] = True
        if job["lost"]:
            self.fenced.add(daemon_id)
        del self.jobs[job_id]
        self.say(key=key, end="fenced" if job["lost"] else "finished")

    async def command(self, line):
        do = line.pop("do")
        if do == "run":
            await self.run(**line)
        elif do == "cancel":
            self.keys[line["key"]]["stop"].cancel()
        elif do == "wait":
            while line["daemon_id"] not in self.daemons:
                await asyncio.sleep(0.01)
            self.say(here=line["daemon_id"])
        elif do == "drop":
            await self.daemons[line["daemon_id"]].close(1012)
        elif do == "raw":
            await self.daemons[line["daemon_id"]].send(line["text"])


async def main():
    token, cancel_timeout = sys.argv[1], float(sys.argv[2])
    hub = Hub(token, cancel_timeout)
    async with websockets.serve(hub.handle, "127.0.0.1", 0, max_size=32 << 20) as server:
        port = server.sockets[0].getsockname()[1]
        print(f"ws://127.0.0.1:{port}", flush=True)
        reader = asyncio.StreamReader(limit=64 << 20)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        tasks = set()
        while raw := await reader.readline():
            line = json.loads(raw)
            if line["do"] == "stop":
                break
            task = asyncio.create_task(hub.command(line))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


asyncio.run(main())
