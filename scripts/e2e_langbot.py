"""The genuine LangBot against a Plugin Runtime, end to end.

Starts the runtime given after "--" and LangBot, headless and with its own SQLite,
in a new directory on free ports of loopback; then does through LangBot's HTTP API
what an operator and a user do: install a package from a file, look at it, call its
tool and its command from a chat, see its event handler change a message, read its
page, icon, readme, assets and logs, change its settings, kill and restart the
runtime, upgrade and remove the plugin. Prints one line a step; the exit code is 0
only if every step did what it should.

    e2e_langbot.py [--no-logs] --langbot LANGBOT -- RUNTIME [ARG…]

In the arguments of the runtime {control} and {debug} become its two ports. It runs
in the directory it may keep its data in.
"""

import argparse
import asyncio
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import websockets

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PATIENCE = 90  # seconds that any one thing may take


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def pack(name, *replace):
    """A package of testdata/plugins/NAME, with manifest.yaml first."""
    root = os.path.join(ROOT, "testdata", "plugins", name)
    names = []
    for folder, _, files in os.walk(root):
        if "__pycache__" not in folder:
            names += [os.path.relpath(os.path.join(folder, f), root) for f in files]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for n in sorted(names, key=lambda n: (n != "manifest.yaml", n)):
            with open(os.path.join(root, n), "rb") as f:
                data = f.read()
            if n == "manifest.yaml":
                for old, new in zip(replace[::2], replace[1::2]):
                    data = data.replace(old.encode(), new.encode())
            z.writestr(n, data)
    return out.getvalue()


class Failed(Exception):
    pass


def check(ok, what, saw=None):
    if not ok:
        raise Failed(f"{what}: {json.dumps(saw)[:1500] if saw is not None else 'no'}")


def wait(what, fn):
    """Calls fn until it answers something; what it last raised or answered is told."""
    end = time.monotonic() + PATIENCE
    last = None
    while time.monotonic() < end:
        try:
            last = fn()
            if last:
                return last
        except (Failed, OSError, httpx.HTTPError, KeyError, TypeError, ValueError, websockets.WebSocketException) as e:
            last = repr(e)
        time.sleep(0.2)
    raise Failed(f"waited {PATIENCE} s for {what}; last: {last}")


class Child:
    """A program in a session of its own, its output in a file."""

    def __init__(self, name, argv, cwd, env=None):
        self.log = os.path.join(cwd, name + ".log")
        self.name = name
        with open(self.log, "ab") as out:
            self.p = subprocess.Popen(
                argv, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )

    def stop(self, sig=signal.SIGTERM):
        """Ends it, and after 20 s its whole session."""
        if self.p.poll() is None:
            self.p.send_signal(sig)
            try:
                self.p.wait(20)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.p.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.p.wait()


class Model(BaseHTTPRequestHandler):
    """A chat model that says what it is told, and calls a tool when told "tool NAME JSON"."""

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        last = body["messages"][-1]
        said = last["content"]
        if isinstance(said, list):
            said = "".join(part.get("text", "") for part in said)
        message = {"role": "assistant", "content": said}
        if last["role"] == "user" and said.startswith("tool "):
            _, name, params = said.split(" ", 2)
            call = {"index": 0, "id": "c1", "type": "function", "function": {"name": name, "arguments": params}}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        finish = "tool_calls" if "tool_calls" in message else "stop"
        answer = {"id": "1", "created": 1, "model": "m"}
        if body.get("stream"):
            parts = [{"delta": message, "finish_reason": None}, {"delta": {}, "finish_reason": finish}]
            frames = [answer | {"object": "chat.completion.chunk", "choices": [{"index": 0} | part]} for part in parts]
            out = "".join(f"data: {json.dumps(f)}\n\n" for f in frames) + "data: [DONE]\n\n"
            kind = "text/event-stream"
        else:
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            choice = {"index": 0, "message": message, "finish_reason": finish}
            out = json.dumps(answer | {"object": "chat.completion", "choices": [choice], "usage": usage})
            kind = "application/json"
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(out)))
        self.end_headers()
        self.wfile.write(out.encode())


class Bot:
    """LangBot, as its dashboard uses it."""

    def __init__(self, port):
        self.origin = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.origin, timeout=120)

    def data(self, method, path, **kw):
        r = self.http.request(method, path, **kw)
        body = r.json()
        check(r.status_code == 200 and body["code"] == 0, f"{method} {path}", body)
        return body["data"]

    def login(self):
        who = {"user": "operator@example.org", "password": "Correct-Horse-7"}
        wait("LangBot's API", lambda: self.http.get("/api/v1/user/init").status_code == 200)
        self.data("POST", "/api/v1/user/init", json=who)
        self.token = self.data("POST", "/api/v1/user/auth", json=who)["token"]
        self.http.headers["Authorization"] = "Bearer " + self.token
        self.workspace = self.data("GET", "/api/v1/workspaces")["workspaces"][0]["uuid"]

    def plugin(self, name):
        found = [p for p in self.data("GET", "/api/v1/plugins")["plugins"] if p["manifest"]["manifest"]["metadata"]["name"] == name]
        return found[0] if found else None

    def ready(self, name, version):
        def look():
            p = self.plugin(name)
            ok = p and p["status"] == "initialized" and p["manifest"]["manifest"]["metadata"]["version"] == version
            return p if ok else None

        return wait(f"{name} {version} to be initialized", look)

    def task(self, answer):
        def done():
            t = self.data("GET", f"/api/v1/system/tasks/{answer['task_id']}")
            return t if t["runtime"]["done"] else None

        t = wait("a task of LangBot", done)
        check(t["runtime"]["exception"] is None, t["label"], t["runtime"])
        return t

    def install(self, name, package):
        wait(
            "LangBot to be connected to the runtime",
            lambda: self.http.get("/api/v1/plugins").status_code == 200,
        )
        self.task(self.data("POST", "/api/v1/plugins/install/local", files={"file": (name + ".lbpkg", package)}))

    def pipeline(self):
        uid = self.data("POST", "/api/v1/pipelines", json={"name": "p", "description": "", "emoji": "x", "config": {}})["uuid"]
        config = self.data("GET", f"/api/v1/pipelines/{uid}")["pipeline"]["config"]
        if "runner_config" in config["ai"]:  # since 4.11 a runner is a plugin's
            runner = "plugin:stockade/runner/default"
            config["ai"]["runner"]["id"] = runner
            config["ai"]["runner_config"][runner] = {}
        else:
            config["ai"]["runner"]["runner"] = "local-agent"
            config["ai"]["local-agent"]["model"] = {"primary": self.model(), "fallbacks": []}
        self.data("PUT", f"/api/v1/pipelines/{uid}", json={"name": "p", "config": config})
        return uid

    def model(self):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        provider = {
            "requester": "openai-chat-completions",
            "base_url": f"http://127.0.0.1:{server.server_port}/v1",
            "api_keys": ["none"],
        }
        model = {"name": "m", "provider": provider, "abilities": ["func_call"], "extra_args": {}}
        return self.data("POST", "/api/v1/provider/models/llm", json=model)["uuid"]

    def chat(self, pipeline, text, answers=1):
        async def talk():
            uri = self.origin.replace("http", "ws") + f"/api/v1/pipelines/{pipeline}/ws/connect?session_type=person"
            async with websockets.connect(uri, origin=self.origin) as ws:
                await ws.send(json.dumps({"type": "authenticate", "token": self.token, "workspace_uuid": self.workspace}))
                first = json.loads(await ws.recv())
                check(first["type"] == "connected", "chat", first)
                await ws.send(json.dumps({"type": "message", "message": [{"type": "Plain", "text": text}]}))
                out = []
                while len(out) < answers:
                    m = json.loads(await asyncio.wait_for(ws.recv(), PATIENCE))
                    if m["type"] == "response" and m["data"]["is_final"]:
                        out.append(m["data"]["content"])
                return out

        return asyncio.run(talk())


def steps(bot, start_runtime, runtime, logs):
    yield "LangBot is set up and connected"
    bot.login()
    bot.install("kit", pack("kit"))
    bot.ready("kit", "1.0.0")
    yield "a package is installed from a file and its plugin is running"

    bot.install("runner", pack("runner"))
    bot.ready("runner", "1.0.0")
    names = [t["name"] for t in bot.data("GET", "/api/v1/tools")["tools"]]
    check("echo" in names and "probe" in names, "the plugin's tools are listed", names)
    engines = bot.data("GET", "/api/v1/knowledge/engines")["engines"]
    check([e["plugin_id"] for e in engines] == ["stockade/kit"], "its knowledge engine is listed", engines)
    parsers = bot.data("GET", "/api/v1/knowledge/parsers")["parsers"]
    check(parsers and parsers[0]["supported_mime_types"] == ["text/plain"], "its parser is listed", parsers)
    yield "tools, knowledge engine and parser are listed"

    base = "/api/v1/plugins/stockade/kit"
    readme = bot.data("GET", base + "/readme")["readme"]
    check("One of every component" in readme, "readme", readme)
    icon = bot.http.get(base + "/authenticated-icon")
    check(icon.status_code == 200 and b"<svg" in icon.content, "icon", icon.status_code)
    note = bot.http.get(base + "/authenticated-assets/note.txt")
    check(note.text == "one asset\n", "asset", note.text)
    page = bot.data("POST", base + "/page-api", json={"page_id": "board", "endpoint": "/x", "method": "POST", "body": {"a": 1}})
    check(page == {"endpoint": "/x", "method": "POST", "body": {"a": 1}}, "page", page)
    yield "readme, icon, asset and page are served"

    pipe = bot.pipeline()
    check(bot.chat(pipe, "hello there") == ["hello there"], "the runner answers")
    yield "a chat is answered, by the runner plugin where LangBot has such"
    said = bot.chat(pipe, 'tool echo {"a": 5}')[0]
    check('"greeting": "hello"' in said and '"a": 5' in said, "the tool's answer", said)
    yield "the plugin's tool is called"
    said = bot.chat(pipe, "!say words one two", answers=2)
    check([s.split()[-1] for s in said] == ["one", "two"], "the command's answers", said)
    yield "the plugin's command is run"

    bot.data("PUT", base + "/config", json={"greeting": "hi", "alter": "changed by the plugin"})
    bot.ready("kit", "1.0.0")
    wait("the event handler with new settings", lambda: bot.chat(pipe, "hello there") == ["changed by the plugin"])
    yield "new settings reach the plugin, and its event handler changes a message"
    bot.data("PUT", base + "/config", json={"greeting": "hi"})
    bot.ready("kit", "1.0.0")

    if logs:
        lines = wait("the plugin's log", lambda: bot.data("GET", base + "/logs")["logs"])
        check(any("kit starts" in x["text"] for x in lines), "its log", lines)
        yield "the plugin's log is read"

    runtime.stop(signal.SIGKILL)
    runtime = start_runtime()
    bot.ready("kit", "1.0.0")
    bot.ready("runner", "1.0.0")
    said = wait("the tool after the restart", lambda: bot.chat(pipe, 'tool echo {"a": 6}'))[0]
    check('"a": 6' in said, "the tool after the restart", said)
    yield "the runtime is killed and started again: LangBot reconnects, the plugins run"

    bot.install("kit", pack("kit", "version: 1.0.0", "version: 1.0.1"))
    bot.ready("kit", "1.0.1")
    yield "the plugin is upgraded"

    bot.task(bot.data("DELETE", base, params={"delete_data": "true"}))
    wait("the plugin to be gone", lambda: bot.plugin("kit") is None)
    names = [t["name"] for t in bot.data("GET", "/api/v1/tools")["tools"]]
    check("echo" not in names, "its tools are gone", names)
    yield "the plugin is removed"


def main():
    parser = argparse.ArgumentParser(description="The genuine LangBot against a Plugin Runtime.")
    parser.add_argument("--langbot", required=True, help="the langbot program")
    parser.add_argument("--no-logs", action="store_true", help="the runtime keeps no logs of workers (the Python one does not)")
    parser.add_argument("runtime", nargs="+", help="the runtime and its arguments")
    args = parser.parse_args()

    home = tempfile.mkdtemp(prefix="stockade-e2e-")
    control, debug, api = free_port(), free_port(), free_port()
    argv = [a.format(control=control, debug=debug) for a in args.runtime]
    os.mkdir(os.path.join(home, "runtime"))
    os.mkdir(os.path.join(home, "langbot"))
    children = []

    def start_runtime():
        children.append(Child("runtime", argv, os.path.join(home, "runtime")))
        return children[-1]

    ok = False
    try:
        runtime = start_runtime()
        env = {k: v for k, v in os.environ.items() if "__" not in k}
        env |= {
            "PLUGIN__RUNTIME_WS_URL": f"ws://127.0.0.1:{control}/control/ws",
            "API__PORT": str(api),
            "BOX__ENABLED": "false",
            "HOME": home,
        }
        children.append(Child("langbot", [args.langbot, "--standalone-runtime"], os.path.join(home, "langbot"), env))
        began = time.monotonic()
        for step in steps(Bot(api), start_runtime, runtime, not args.no_logs):
            print(f"ok  {time.monotonic() - began:6.1f} s  {step}", flush=True)
        ok = True
    except Failed as e:
        print(f"FAILED: {e}", file=sys.stderr)
        for child in children:
            if child.p.poll() is not None:
                print(f"{child.name} has ended with {child.p.returncode}", file=sys.stderr)
        for name in ("runtime", "langbot"):
            log = os.path.join(home, name, name + ".log")
            if os.path.exists(log):
                with open(log, errors="replace") as f:
                    print(f"--- the end of {name}'s output\n{''.join(f.readlines()[-40:])}", file=sys.stderr)
    finally:
        for child in reversed(children):
            child.stop()
        shutil.rmtree(home, ignore_errors=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
