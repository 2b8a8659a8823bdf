"""Rows 6, 7, 10, 11, 12, 19 and 20 of the fault matrix, at the engine and its process.

Two engines for the whole file, since a start loads torch: the tests of the first one run in order,
and the last of them kills it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hetero_llm import (
    LLM,
    AsyncLLMEngine,
    ConfigError,
    EngineDeadError,
    EngineHungError,
    ModelLoadError,
    PromptError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.engine.processes.engine_launcher import launch
from tests.helpers.async_tools import PATIENCE, idle_metrics, read, until
from tests.models.tiny import make_tiny_checkpoint

STEP_TIMEOUT = 3.0
LONG = SamplingParams(
    temperature=0,
    max_tokens=40,
    ignore_eos=True,
    detokenize=False,
    output_kind=RequestOutputKind.DELTA,
)
IDS = Prompt(token_ids=[5, 6, 7, 8, 9, 10, 11, 12])


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    make_tiny_checkpoint(folder, "llama", with_tokenizer=True)
    return {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "block_size": 8,
        "cpu_threads": 1,
        "num_gpu_blocks_override": 32,
        "max_num_batched_tokens": 256,
        "skip_tokenizer_init": True,
    }


@pytest.fixture(scope="module")
def engine(args: dict[str, object]) -> Iterator[AsyncLLMEngine]:
    engine = AsyncLLMEngine(args, step_timeout=STEP_TIMEOUT)
    yield engine
    asyncio.run(engine.shutdown(0))


def running(pid: int) -> bool:
    """Whether a process is there and not just waiting to be reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.outputs[0].token_ids]


def test_row_10_too_few_blocks_for_all(engine: AsyncLLMEngine, args: dict[str, object]) -> None:
    """64 requests of 6 blocks on 32: all finish with the tokens that they have alone, and no 50
    steps pass without progress."""
    prompts = [[3 + i, *range(20, 27)] for i in range(64)]

    async def run() -> list[list[RequestOutput]]:
        before = await engine.metrics()
        tasks = [read(engine, str(i), Prompt(token_ids=ids), LONG) for i, ids in enumerate(prompts)]
        streams = await asyncio.gather(*tasks)
        after = await idle_metrics(engine)
        assert after["num_preemptions"] > 0
        steps = after["num_steps"] - before["num_steps"]
        assert steps < 50 * len(prompts), "a request ends in less than 50 steps"
        assert len(tokens(await read(engine, "probe", IDS, LONG))) == LONG.max_tokens
        return streams

    streams = asyncio.run(run())
    with LLM(**{**args, "num_gpu_blocks_override": 64 * 6}) as llm:
        expected = llm.generate(prompt_token_ids=prompts, sampling_params=LONG, use_tqdm=False)
        assert llm.metrics()["num_preemptions"] == 0
    assert [tokens(stream) for stream in streams] == [one.outputs[0].token_ids for one in expected]


def test_row_11_a_request_that_never_fits(engine: AsyncLLMEngine) -> None:
    beams = replace(LONG, use_beam_search=True, best_of=8)
    for prompt, params in ((Prompt(token_ids=[5] * 64), LONG), (IDS, beams)):
        with pytest.raises(PromptError, match="max_model_len|32; lower"):
            asyncio.run(read(engine, "large", prompt, params))
    asyncio.run(idle_metrics(engine))


def test_row_12_clients_that_leave(engine: AsyncLLMEngine) -> None:
    """While running, while waiting for blocks, and before the engine has heard of the request."""

    async def run() -> None:
        leaving = replace(LONG, max_tokens=50)
        first = engine.generate(IDS, leaving, "first")
        tasks = [asyncio.create_task(read(engine, f"client {i}", IDS, leaving)) for i in range(40)]
        await anext(first)
        late = asyncio.create_task(read(engine, "late", IDS, LONG))
        await asyncio.sleep(0)
        for task in (*tasks, late):
            task.cancel()
        await first.aclose()
        ends = await asyncio.gather(*tasks, late, return_exceptions=True)
        assert sum(isinstance(end, asyncio.CancelledError) for end in ends) > 1
        await idle_metrics(engine)
        assert len(tokens(await read(engine, "after", IDS, LONG))) == LONG.max_tokens

    asyncio.run(run())


async def stopped_in_mid_stream(engine: AsyncLLMEngine) -> AsyncGenerator[RequestOutput, None]:
    """A request that has had some outputs and lacks others, of an engine that is stopped."""
    pid = engine.process.popen.pid
    for attempt in range(100):
        stream = engine.generate(IDS, LONG, f"held up {attempt}")
        await anext(stream)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        engine.stats()  # takes what has arrived
        if engine.num_unfinished:
            return stream
        os.kill(pid, signal.SIGCONT)
        await stream.aclose()
    raise AssertionError("the engine is always faster")


def test_row_07_a_hung_engine_shows_and_may_recover(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        stream = await stopped_in_mid_stream(engine)
        begun = time.monotonic()
        try:
            while True:
                try:
                    engine.check_health()
                except EngineHungError as error:
                    assert f"step_timeout={STEP_TIMEOUT:g}" in str(error)
                    break
                assert time.monotonic() < begun + STEP_TIMEOUT + 2.0
                await asyncio.sleep(0.05)
            assert engine.stats().last_step_age > STEP_TIMEOUT
            with pytest.raises(EngineHungError):
                await read(engine, "refused", IDS, LONG)
        finally:
            os.kill(engine.process.popen.pid, signal.SIGCONT)
        rest = [output async for output in stream]
        assert rest[-1].finished
        engine.check_health()
        await idle_metrics(engine)

    asyncio.run(run())


def test_row_06_a_killed_engine_ends_all_streams(engine: AsyncLLMEngine) -> None:
    """The last test of this engine."""
    popen = engine.process.popen

    async def run() -> None:
        streams = [await stopped_in_mid_stream(engine)]
        streams += [engine.generate(IDS, LONG, f"waiting {i}") for i in range(20)]
        nexts = [asyncio.ensure_future(anext(stream)) for stream in streams[1:]]
        call = asyncio.ensure_future(engine.metrics())
        await until(lambda: engine.stats().queue == len(streams))
        os.kill(popen.pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(EngineDeadError, match="signal 9"):
            async for _ in streams[0]:
                pass
        for waiting in (*nexts, call):
            with pytest.raises(EngineDeadError, match="signal 9"):
                await waiting
        assert time.monotonic() - begun < 1.0
        with pytest.raises(EngineDeadError):
            engine.check_health()
        for later in (read(engine, "later", IDS, LONG), engine.reset_prefix_cache()):
            with pytest.raises(EngineDeadError, match="signal 9"):
                await later
        assert popen.returncode == -signal.SIGKILL
        assert engine.stats().queue == 0
        await engine.shutdown(10.0)
        await engine.shutdown(0.0)

    asyncio.run(run())


PARENT = """
import sys, threading, time
from hetero_llm.engine.processes.engine_launcher import launch
from hetero_llm.engine.processes import messages
from hetero_llm.kv_cache.prefix_cache import hash_root, token_bytes

def start():
    global process
    process = launch({args!r})

if {in_thread}:
    # a thread that ends must not take the engine with it
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
    process.wait_until_ready()
params = {{"max_tokens": None, "ignore_eos": True, "detokenize": False, "output_kind": 1}}
for i in range(200):
    request = messages.AddRequest(str(i), token_bytes([5]), params, 0, 64, hash_root(()))
    process.socket.send(messages.encode(request))
time.sleep(0.5)
assert process.popen.poll() is None
print(process.popen.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("in_thread", [False, True])
def test_row_19_an_engine_ends_with_its_parent(args: dict[str, object], in_thread: bool) -> None:
    """In mid-step by the signal that a dead parent means; and while it loads the model, started
    by a thread, by the end of the pipe."""
    script = PARENT.format(args={**args, "load_format": "dummy"}, in_thread=in_thread)
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if not in_thread:
            os.kill(pid, signal.SIGTERM)  # left to the parent, which drains
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGSTOP)  # it cannot look whether the parent is there
        parent.kill()
    deadline = time.monotonic() + 2.0
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = running(pid)
    if left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "the engine outlived its parent"


def test_row_20_a_start_that_fails_in_the_engine(args: dict[str, object]) -> None:
    """The same error as in this process, and no process left."""
    wrong = {**args, "num_gpu_blocks_override": 7}
    with pytest.raises(ConfigError) as theirs:
        LLM(**wrong)
    process = launch(wrong)
    with pytest.raises(ConfigError) as ours:
        process.wait_until_ready()
    assert str(ours.value) == str(theirs.value)
    assert process.popen.wait(PATIENCE) == 2
    process.kill()


def test_row_20_a_start_that_fails_here(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(ModelLoadError, match="no such folder"):
        AsyncLLMEngine({"model": str(tmp_path / "nowhere")})
    assert {child.pid for child in psutil.Process().children()} <= before
