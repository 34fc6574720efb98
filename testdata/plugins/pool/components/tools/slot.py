import asyncio
import os

from langbot_plugin.api.definition.components.tool.tool import Tool


class Slot(Tool):
    async def call(self, params, session, query_id):
        op = params.get("op", "who")
        if op == "sleep":
            await asyncio.sleep(params["seconds"])
        if op == "exit":
            os._exit(9)
        if op == "bots":
            return {"bots": await self.plugin.get_bots()}
        if op == "write":
            with open(params["path"], "w") as f:
                f.write("x")
            return {"written": True}
        if op == "read":
            with open(params["path"]) as f:
                return {"text": f.read(65536)}
        return {"pid": os.getpid(), "config": self.plugin.get_config(), "params": params}
