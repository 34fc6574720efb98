"""A runner that does what the first word of its input says."""

import asyncio
import json
import random

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
        if word == "granted":
            text = json.dumps(ctx.runtime.metadata.get("run_process"))
        if word == "sort":
            # Input with an end, and an exit status that is not 0.
            from stockade_runner import open_process

            async with await open_process(ctx, ["sh", "-c", "sort; exit 3"], stdin=True) as process:
                for part in rest.split():
                    await process.write(part.encode() + b"\n")
                await process.close_stdin()
                out = b"".join([chunk.data async for chunk in process])
                exit = await process.wait()
                closed = await process.close()
            text = f"{out.decode()}exit {exit.code} quiescent {closed.quiescent}"
        if word == "bulk":
            # Megabytes in and out at the same time; every byte comes back once.
            from stockade_runner import open_process

            sent, got = random.randbytes(int(rest) << 20), bytearray()
            async with await open_process(ctx, ["cat"], stdin=True) as process:

                async def feed():
                    await process.write(sent)
                    await process.close_stdin()

                feeding = asyncio.create_task(feed())
                async for chunk in process:
                    got += chunk.data
                await feeding
            text = f"same {bytes(got) == sent}"
        if word == "calls":
            text = json.dumps(await calls(ctx, json.loads(rest)))
        if word == "hold":
            # A process that outlives everything it can; its handle is told at once.
            from stockade_runner import open_process

            process = await open_process(ctx, ["sh", "-c", rest])
            yield RunnerResult.message_delta(ctx.run_id, MessageChunk(role="assistant", content=process.handle))
            await asyncio.sleep(3600)
        yield RunnerResult.run_completed(
            run_id=ctx.run_id, message=Message(role="assistant", content=text), finish_reason="stop"
        )


async def calls(ctx: RunnerContext, wanted: list) -> list:
    """Makes calls as they are given, [action, payload], and returns their answers or errors.
    In payloads $handle is the handle of the last process that was opened."""
    from langbot_plugin.entities.io.errors import ActionCallError
    from stockade_runner.api import RunProcessAPI, RunProcessAction

    api, handle, answers = RunProcessAPI(ctx), "", []
    for action, payload in wanted:
        payload = {"run_id": ctx.run_id, **payload}
        if payload.get("handle") == "$handle":
            payload["handle"] = handle
        try:
            answer = await api._handler.call_action(RunProcessAction(action), payload, 60)
            handle = answer.get("handle", handle)
            answers.append(answer)
        except ActionCallError as error:
            answers.append({"text": str(error), "data": getattr(error, "data", None)})
        except Exception as error:
            known = getattr(error, "error", None)
            answers.append({"text": str(error), "data": {"error": known.model_dump()} if known else None})
    return answers
