from langbot_plugin.api.definition.plugin import BasePlugin


class Pool(BasePlugin):
    async def initialize(self) -> None:
        pass
