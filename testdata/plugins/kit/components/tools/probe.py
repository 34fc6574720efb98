"""One tool with many operations: what a test wants to see a worker do."""

import asyncio
import base64
import os
import subprocess
import sys

from langbot_plugin.api.definition.components.tool.tool import Tool


class Probe(Tool):
    async def call(self, params, session, query_id):
        op = params["op"]
        return await getattr(self, "op_" + op)(params)

    async def op_pid(self, params):
        return {"pid": os.getpid()}

    async def op_env(self, params):
        return {"env": dict(os.environ), "cwd": os.getcwd(), "path": sys.path}

    async def op_bots(self, params):
        return {"bots": await self.plugin.get_bots()}

    async def op_store(self, params):
        await self.plugin.set_plugin_storage(params["key"], params["value"].encode())
        return {"value": (await self.plugin.get_plugin_storage(params["key"])).decode()}

    async def op_file(self, params):
        data = await self.plugin.get_knowledge_file_stream(params["path"])
        return {"base64": base64.b64encode(data).decode(), "size": len(data)}

    async def op_sleep(self, params):
        await asyncio.sleep(params["seconds"])
        return {"slept": params["seconds"]}

    async def op_big(self, params):
        return {"text": "x" * params["size"]}

    async def op_log(self, params):
        for line in params["lines"]:
            print(line, file=sys.stderr)
        sys.stderr.flush()
        return {}

    async def op_noise(self, params):
        """Writes to standard output, where the protocol also runs."""
        for line in params["lines"]:
            print(line, flush=True)
        return {}

    async def op_write(self, params):
        with open(params["path"], "a") as f:
            f.write(params.get("text", "x") * params.get("times", 1))
        return {"written": True}

    async def op_read(self, params):
        with open(params["path"]) as f:
            return {"text": f.read(65536)}

    async def op_list(self, params):
        return {"names": sorted(os.listdir(params["path"]))}

    async def op_memory(self, params):
        block = bytearray(params["bytes"])
        for i in range(0, len(block), 4096):
            block[i] = 1
        return {"touched": len(block)}

    async def op_fork(self, params):
        """Leaves processes behind that ignore everything, in a session of their own."""
        pids = []
        for _ in range(params.get("count", 1)):
            child = subprocess.Popen(
                [sys.executable, "-c", "import signal,time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(3600)"],
                start_new_session=True,
            )
            pids.append(child.pid)
        return {"pids": pids}

    async def op_exit(self, params):
        os._exit(params.get("code", 7))

    async def op_raise(self, params):
        raise ValueError(params.get("text", "told to raise"))

    async def op_tool(self, params):
        return {"answer": await self.plugin.call_tool(params["name"], params.get("parameters", {}), {}, 0)}
