import asyncio
import time

import pytest
from conftest import broken, context, lost_answer, refusal
from langbot_plugin.api.definition.components.runner.runner import Runner
from langbot_plugin.api.entities.builtin.runner.errors import AgentAPIException
from langbot_plugin.api.entities.builtin.runner.result import RunnerResult
from langbot_plugin.api.proxies.runner import RunnerAPIProxy

from stockade_runner import (
    Limits,
    OutputLost,
    Process,
    ProcessError,
    RunProcessAPI,
    Winsize,
    open_process,
    process_limits,
)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def actions(host):
    return [name for name, _, _ in host.calls]


def test_limits_tell_whether_there_are_processes():
    assert process_limits(context()) is None
    assert process_limits(context(metadata={"run_process": True})) is None
    limits = process_limits(context(metadata={"run_process": {"max_wait_ms": 5, "later": 1}}))
    assert limits.max_wait_ms == 5 and limits.max_read_bytes == 256 << 10


def test_open_says_what_it_was_told(host, api):
    async def main():
        process = await open_process(
            api,
            ["sh", "-c", "true"],
            request_id="r1",
            target_ref="box",
            cwd="sub",
            env={"A": "b"},
            stdin=True,
            pty=Winsize(rows=24, cols=80),
            limits=Limits(deadline_ms=1000, overflow="block"),
        )
        assert (process.handle, process.request_id) == ("h1", "r1")

    run(main())
    name, data, timeout = host.calls[0]
    assert name == "open_run_process" and timeout == 120
    assert data == {
        "run_id": "run-1",
        "request_id": "r1",
        "target_ref": "box",
        "argv": ["sh", "-c", "true"],
        "cwd": "sub",
        "env": {"A": "b"},
        "stdin": True,
        "pty": {"rows": 24, "cols": 80},
        "limits": {"deadline_ms": 1000, "overflow": "block"},
    }


def test_a_lost_answer_is_asked_for_again_with_the_same_ids(host, api):
    async def main():
        host.lost = [lost_answer, broken]
        host.faults = [refusal("unavailable")]
        await open_process(api, ["true"])

    run(main())
    assert actions(host) == ["open_run_process"] * 4
    assert len(host.opened) == 1 and len({str(data) for _, data, _ in host.calls}) == 1


@pytest.mark.parametrize("code", ["invalid", "denied", "not_found", "conflict", "fenced"])
def test_a_refusal_is_final(host, api, code):
    async def main():
        host.faults = [refusal(code, "because", details={"fact": "1"})]
        with pytest.raises(ProcessError) as caught:
            await open_process(api, ["true"])
        assert (caught.value.code, str(caught.value), caught.value.details) == (code, "because", {"fact": "1"})
        assert isinstance(caught.value, AgentAPIException) and not caught.value.retryable

    run(main())
    assert len(host.calls) == 1


def test_patience_and_deadline_end_the_repeating(host, api):
    async def main():
        host.faults = [lost_answer] * 1000
        with pytest.raises(ProcessError) as caught:
            await open_process(api, ["true"], patience=0)
        assert caught.value.code == "deadline_exceeded" and caught.value.retryable
        assert len(host.calls) == 1
        late = RunnerAPIProxy(ctx=context(deadline_at=time.time() + 0.3), plugin_runtime_handler=host)
        with pytest.raises(ProcessError) as caught:
            await open_process(late, ["true"])
        assert caught.value.code == "deadline_exceeded"
        assert all(0 < timeout <= 0.31 for _, _, timeout in host.calls[1:])

    run(main())


def test_an_answer_of_another_shape(host, api):
    async def main():
        async def strange(data):
            return {"records": [{"stream": "stdout", "offset": 0, "data_base64": "!"}], "next_cursor": "1"}

        host.read_run_process = strange
        with pytest.raises(ProcessError) as caught:
            await RunProcessAPI(api).read_run_process("h1")
        assert caught.value.code == "host.malformed_response"

    run(main())
    assert len(host.calls) == 1


def test_what_is_no_call(api):
    async def main():
        calls = RunProcessAPI(api)
        for wrong in ("true", b"true", []):
            with pytest.raises(TypeError):
                await calls.open_run_process(wrong)
        for names in ({}, {"handle": "h", "request_id": "r"}):
            with pytest.raises(TypeError):
                await calls.get_run_process(**names)
            with pytest.raises(TypeError):
                await calls.close_run_process(**names)

    run(main())


def test_output_comes_once_whatever_breaks(host, api):
    async def main():
        host.say("stdout", b"hello ")
        host.say("stderr", b"\xff\x00 warning")
        host.say("stdout", b"world")
        process = await open_process(api, ["x"])

        async def more():
            await host.waiting.wait()
            host.say("stdout", b"!")
            host.end()

        later = asyncio.create_task(more())
        out = {"stdout": b"", "stderr": b""}
        async for chunk in process:
            assert chunk.offset == len(out[chunk.stream])
            out[chunk.stream] += chunk.data
            if len(host.calls) % 2:
                host.lost = [broken]
        await later
        assert out == {"stdout": b"hello world!", "stderr": b"\xff\x00 warning"}

    run(main())
    reads = [data for name, data, _ in host.calls if name == "read_run_process"]
    assert all(data["max_bytes"] == 7 and data["wait_ms"] == 1000 for data in reads)


def test_lost_output_is_said(host, api):
    async def main():
        host.say("stdout", b"0123456789")
        host.kept_from = 4
        host.end()
        process = await open_process(api, ["x"])
        with pytest.raises(OutputLost) as caught:
            async for _ in process:
                raise AssertionError("output before the gap was told")
        assert caught.value.gap.bytes == 4 and caught.value.details == {"from": "0", "to": "4", "bytes": 4}
        gaps = []
        out = b"".join([chunk.data async for chunk in process.output(on_gap=gaps.append)])
        assert out == b"456789" and [(g.start, g.end) for g in gaps] == [("0", "4")]
        assert b"".join([chunk.data async for chunk in process.output("8")]) == b"89"

    run(main())


def test_writes_come_whole_and_once(host, api):
    async def main():
        process = await open_process(api, ["cat"], stdin=True)
        host.window = 25
        host.lost = [lost_answer]
        writing = asyncio.create_task(process.write(bytes(range(64))))
        while len(host.input) < 25:
            await asyncio.sleep(0.001)
        host.lost = [broken]
        host.window = 1000  # the child reads on
        await writing
        await process.write(b"")
        await asyncio.gather(process.write(b"one"), process.write(b"two"))
        assert not host.input_eof
        await process.close_stdin()
        await process.close_stdin()
        assert host.input == bytes(range(64)) + b"onetwo" and host.input_eof

    run(main())
    writes = [data for name, data, _ in host.calls if name == "write_run_process"]
    assert all(len(data["data_base64"]) <= 16 for data in writes)


def test_a_cancelled_write_leaves_the_next_one_right(host, api):
    async def main():
        process = await open_process(api, ["cat"], stdin=True)
        accepted = asyncio.Event()
        answer = host.write_run_process

        async def slow(data):
            state = await answer(data)
            accepted.set()
            await asyncio.Event().wait()
            return state

        host.write_run_process = slow
        writing = asyncio.create_task(process.write(b"half"))
        await accepted.wait()
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        host.write_run_process = answer
        await process.write(b" done")
        assert host.input == b"half done"

    run(main())


def test_a_host_that_accepts_what_was_not_sent(host, api):
    async def main():
        async def strange(data):
            return {"accepted": 99, "eof": False}

        process = await open_process(api, ["cat"], stdin=True)
        host.write_run_process = strange
        with pytest.raises(ProcessError) as caught:
            await process.write(b"x")
        assert caught.value.code == "host.malformed_response"

    run(main())


def test_wait(host, api):
    async def main():
        process = await open_process(api, ["x"])

        async def end():
            await host.waiting.wait()
            host.end(3)

        ending = asyncio.create_task(end())
        exit = await process.wait()
        await ending
        assert (exit.kind, exit.code, exit.ok) == ("exited", 3, False)
        host.exit = None
        host.state = "fenced"
        assert (await process.wait()).kind == "unknown"
        host.state = "never_started"
        with pytest.raises(ProcessError):
            await process.wait()
        host.state, host.exit = "exited", {"kind": "exited", "code": 0}
        assert (await process.wait()).ok

    run(main())


def test_find(host, api):
    async def main():
        await open_process(api, ["x"], request_id="r1", stdin=True)
        host.input = b"before"
        again = await Process.find(api, "r1")
        await again.write(b" after")
        assert host.input == b"before after"
        with pytest.raises(ProcessError) as caught:
            await Process.find(api, "other")
        assert caught.value.code == "not_found"

    run(main())


def test_closed_at_the_end_of_the_block(host, api):
    async def main():
        async with await open_process(api, ["x"]) as process:
            pass
        with pytest.raises(ZeroDivisionError):
            async with process:
                1 / 0
        inside = asyncio.Event()

        async def block():
            async with process:
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(block())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        result = await RunProcessAPI(api).close_run_process(request_id="r1", reason="gone", grace_ms=0)
        assert result.quiescent and result.receipt == {"id": "r"}

    run(main())
    assert [data["reason"] for data in host.closes] == ["", "ZeroDivisionError", "CancelledError", "gone"]
    assert host.closes[-1] == {"run_id": "run-1", "request_id": "r1", "reason": "gone", "grace_ms": 0}


def test_inside_a_runner_the_context_is_enough(host):
    class Echo(Runner):
        async def run(self, ctx):
            process = await open_process(ctx, argv=["echo"])
            out = b"".join([chunk.data async for chunk in process.output()])
            exit = await process.wait()
            yield RunnerResult.run_completed(ctx.run_id, finish_reason=f"{out.decode()}:{exit.code}")

    async def main():
        runner = Echo()
        runner.bind_runtime(plugin_runtime_handler=host)
        host.say("stdout", b"hi")
        host.end()
        results = [result async for result in runner.invoke(context())]
        assert results[-1].type == "run.completed" and results[-1].data["finish_reason"] == "hi:0"

    run(main())
    assert all(data["run_id"] == "run-1" for _, data, _ in host.calls)
