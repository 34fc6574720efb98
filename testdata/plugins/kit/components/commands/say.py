from langbot_plugin.api.definition.components.command.command import Command
from langbot_plugin.api.entities.builtin.command.context import CommandReturn


class Say(Command):
    async def initialize(self):
        await super().initialize()

        @self.subcommand(name="words", help="one answer a word", usage="say words WORD…", aliases=[])
        async def words(self, context):
            for word in context.crt_params:
                yield CommandReturn(text=word)

        @self.subcommand(name="many", help="as many answers as asked for", usage="say many N", aliases=[])
        async def many(self, context):
            for n in range(int(context.crt_params[0])):
                yield CommandReturn(text=str(n))

        @self.subcommand(name="broken", help="one answer, then an error", usage="say broken", aliases=[])
        async def broken(self, context):
            yield CommandReturn(text="before")
            raise RuntimeError("told to break")
