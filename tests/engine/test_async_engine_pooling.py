"""A pooling model behind `AsyncLLMEngine`: results, limits, aborts and the end of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_llm import (
    AsyncLLMEngine,
    DuplicateRequestError,
    EngineDeadError,
    HeteroLLMError,
    OverloadedError,
    PoolingError,
    PoolingParams,
    SamplingParams,
)
from hetero_llm.core.pooling import Finish, PoolingInput
from tests.pooling.tiny_pooling import make_pooling_checkpoint, reference, text_of

pytestmark = pytest.mark.usefixtures("forked_engines")

TEXTS = [text_of(length, length) for length in (1, 40, 7)]
MANY = [PoolingInput(np.arange(6, 90, dtype=np.int32))] * 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    return make_pooling_checkpoint(made, "Qwen3Model", pooling="lasttoken")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[AsyncLLMEngine]:
    arguments = {"model": str(folder), "device": "cpu", "dtype": "float32", "max_num_seqs": 2,
                 "max_num_batched_tokens": 64}  # fmt: skip
    made = AsyncLLMEngine(arguments, max_queued_requests=1)
    yield made
    made.process.kill()


async def encoded(engine: AsyncLLMEngine, text: str, request_id: str) -> np.ndarray:
    outputs = [one async for one in engine.encode(text, PoolingParams(), request_id)]
    (output,) = outputs
    assert output.finished and output.request_id == request_id
    found: np.ndarray = output.outputs.data.numpy()
    return found


async def all_cases(engine: AsyncLLMEngine, wanted: np.ndarray) -> None:
    found = await asyncio.gather(*(encoded(engine, t, f"r{i}") for i, t in enumerate(TEXTS)))
    np.testing.assert_allclose(found, wanted, atol=2e-6)

    # Two run, one waits: the fourth is refused; a running request's id cannot be used again.
    async def pool(name: str, inputs: Any = MANY) -> Any:
        return await engine.pool(name, inputs, Finish(normalize=True))

    running = [asyncio.ensure_future(pool(f"m{i}")) for i in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await pool("one too many")
    with pytest.raises(DuplicateRequestError):
        await pool("m0")
    assert engine.stats().queue == 3
    for task in running[:2]:  # as the server does when a client leaves
        task.cancel()
    await asyncio.gather(*running[:2], return_exceptions=True)
    await engine.abort("m2")
    with pytest.raises(HeteroLLMError, match="the request was aborted"):
        await running[2]
    assert engine.num_unfinished == 0
    while (await engine.metrics())["num_requests_running"]:
        await asyncio.sleep(0.01)
    metrics = await engine.metrics()
    assert metrics["num_inputs_waiting"] == 0 and metrics["num_requests_waiting"] == 0
    np.testing.assert_allclose(await encoded(engine, TEXTS[1], "again"), wanted[1], atol=2e-6)

    with pytest.raises(PoolingError, match="task='generate': Qwen3Model pools"):
        await engine.add_request("g", "w1", SamplingParams())
    with pytest.raises(PoolingError, match="dimensions=3: this model's embeddings"):
        async for _ in engine.encode("w1", PoolingParams(dimensions=3), "d"):
            pass
    await engine.reset_prefix_cache()
    engine.process.popen.kill()
    with pytest.raises(EngineDeadError):
        await pool("after the end", MANY[:1])
        await pool("after the end", MANY[:1])


def test_results_limits_aborts_and_the_end(engine: AsyncLLMEngine, folder: Path) -> None:
    info = engine.info.pooling
    assert info is not None and info.tasks == ("embed", "score") and info.size == 32
    asyncio.run(all_cases(engine, reference(folder, TEXTS, "lasttoken")))
