"""A runner that does what the first word of its input says."""

import asyncio
import json

from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.entities.builtin.provider.message import Message, MessageChunk
from langbot_plugin.api.entities.builtin.runner import RunnerContext, RunnerResult


class DefaultRunner(Runner):
    async def run(self, ctx: RunnerContext):
        text = ctx.input.to_text()
        word, _, rest = text.partition(" ")
        if word == "fail":
            raise RuntimeError(rest)
        if word == "sleep":
            await asyncio.sleep(float(rest))
        if word == "stream":
            for n in range(int(rest)):
                yield RunnerResult.message_delta(ctx.run_id, MessageChunk(role="assistant", content=str(n)))
        if word == "resources":
            text = ctx.resources.model_dump_json()
        if word == "tool":
            name, _, params = rest.partition(" ")
            text = json.dumps(await self.get_run_api(ctx).call_tool(name, json.loads(params or "{}")))
        if word == "process":
            # A command in the run's box, over the runtime's process operations.
            from stockade_runner import open_process

            process = await open_process(ctx, argv=["sh", "-c", rest])
            out = b""
            async for chunk in process.output():
                out += chunk.data
            exit = await process.wait()
            text = f"{out.decode()}exit {exit.code}"
        yield RunnerResult.run_completed(
            run_id=ctx.run_id, message=Message(role="assistant", content=text), finish_reason="stop"
        )
