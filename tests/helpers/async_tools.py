"""Reading streams in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hetero_llm import AsyncLLMEngine, RequestOutput, SamplingParams

PATIENCE = 120.0  # seconds until a condition that must come counts as missed


async def read(
    engine: AsyncLLMEngine, request_id: str, prompt: Any, params: SamplingParams
) -> list[RequestOutput]:
    """All outputs of one request."""
    return [output async for output in engine.generate(prompt, params, request_id)]


async def until(condition: Callable[[], bool]) -> None:
    """Lets the event loop run until the condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def idle_metrics(engine: AsyncLLMEngine) -> dict[str, float]:
    """The engine's metrics once nothing runs any more; that nothing leaked is checked here."""
    async with asyncio.timeout(PATIENCE):
        while True:
            metrics = await engine.metrics()
            if metrics["num_requests_running"] + metrics["num_requests_waiting"] == 0:
                break
            await asyncio.sleep(0.005)
    assert metrics["kv_cache_usage_perc"] == 0
    assert engine.stats().queue == 0
    return metrics
