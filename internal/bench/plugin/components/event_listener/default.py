from langbot_plugin.api.definition.components.common.event_listener import EventListener
from langbot_plugin.api.entities import events


class Listener(EventListener):
    async def initialize(self):
        await super().initialize()

        @self.handler(events.PersonMessageReceived)
        async def received(context):
            pass
