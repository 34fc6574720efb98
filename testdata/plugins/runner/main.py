from langbot_plugin.api.definition.plugin import BasePlugin


class RunnerPlugin(BasePlugin):
    async def initialize(self) -> None:
        pass
