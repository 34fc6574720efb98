from langbot_plugin.api.definition.plugin import BasePlugin


class Bench(BasePlugin):
    async def initialize(self) -> None:
        pass
