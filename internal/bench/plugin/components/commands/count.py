from langbot_plugin.api.definition.components.command.command import Command
from langbot_plugin.api.entities.builtin.command.context import CommandReturn


class Count(Command):
    async def initialize(self):
        await super().initialize()

        @self.subcommand(name="to", help="counts", usage="count to N", aliases=[])
        async def to(self, context):
            for n in range(int(context.crt_params[0])):
                yield CommandReturn(text=str(n))
