import asyncio
import os
import sys

from langbot_plugin.api.definition.plugin import BasePlugin


class Kit(BasePlugin):
    async def initialize(self) -> None:
        config = self.get_config()
        print("kit starts", file=sys.stderr, flush=True)
        if config.get("crash") == "start":
            os._exit(3)
        if config.get("fail") == "start":
            raise RuntimeError("kit was told to fail")
        if config.get("hang") == "start":
            await asyncio.sleep(3600)
