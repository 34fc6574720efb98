from langbot_plugin.api.definition.components.common.event_listener import EventListener
from langbot_plugin.api.entities import events


class Listener(EventListener):
    async def initialize(self):
        await super().initialize()

        @self.handler(events.PersonMessageReceived)
        async def received(context):
            config = self.plugin.get_config()
            if config.get("prevent") == "default":
                context.prevent_default()
            if config.get("prevent") == "postorder":
                context.prevent_postorder()

        @self.handler(events.PersonNormalMessageReceived)
        async def normal(context):
            alter = self.plugin.get_config().get("alter")
            if alter:
                context.event.user_message_alter = alter
