"""Parts "trace", "pool" and "spec" of `bench.offload.suite`."""

from __future__ import annotations

import mmap
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.generation import greedy
from bench.offload.engines import (
    BLOCK,
    GIB,
    GPU_BLOCKS,
    Engines,
    Served,
    Settings,
    WrongTier,
    share_for,
    summary,
    token_seconds,
)
from bench.shapes import Prompts
from hetero_llm import LLM
from hetero_llm.core.request import Request
from hetero_llm.demo_models import heldout_prompts

FIRST, MORE, TURNS, ANSWER = 4096, 1008, 5, 16
"""Tokens of a conversation's first message and of the others; turns; tokens of an answer."""
OVER = 3  # working set over the GPU's cache
AT_ONCE = 8
POOL_GIB, POOL_ROW = 30, 2 << 20
_TOUCHERS = 16
SPEC_PROMPT, SPEC_TOKENS, SPEC_BATCHES = 1024, 256, (1, 8)
_SPEC_RUNS = {1: 6, 8: 2}  # batches of each size that are measured


# -- trace --------------------------------------------------------------------------------------


@dataclass
class Conversation:
    """`text` grows by an answer and a message a turn."""

    text: list[int]
    messages: deque[list[int]]


def conversation_tokens() -> int:
    """Tokens of one conversation at its end."""
    return FIRST + (TURNS - 1) * (ANSWER + MORE)


def plan_trace(gpu_tokens: int, ids: Prompts) -> list[Conversation]:
    """As many conversations as are three times the GPU's cache in all."""
    count = round(OVER * gpu_tokens / conversation_tokens())
    return [
        Conversation(ids.one(FIRST), deque(ids.one(MORE) for _ in range(TURNS - 1)))
        for _ in range(count)
    ]


def run_trace(served: Served, conversations: list[Conversation]) -> dict[str, Any]:
    """All turns, `AT_ONCE` conversations at a time in turn: after its answer a conversation waits
    until all others have had theirs. An engine without host tier counts tokens found, not blocks:
    then blocks are counted here."""
    waiting = deque(conversations)
    talking: dict[str, tuple[Request, Conversation, float]] = {}
    firsts: list[float] = []
    needed = 0
    before, begin = served.counters(), time.perf_counter()
    while waiting or talking:
        while waiting and len(talking) < AT_ONCE:
            talk = waiting.popleft()
            request = served.request(talk.text, ANSWER)
            talking[request.request_id] = request, talk, time.monotonic()
            served.engine.add_request(request)
        for output in served.engine.step():
            if not output.finished:
                continue
            request, talk, added = talking.pop(output.request_id)
            firsts.append(token_seconds(request, added))
            needed += -(-(len(talk.text) + ANSWER - 1) // BLOCK)
            if talk.messages:
                talk.text = [*talk.text, *output.outputs[0].token_ids, *talk.messages.popleft()]
                waiting.append(talk)
    elapsed = time.perf_counter() - begin
    found = served.since(before)
    total, gpu = found.total, found.gpu
    if not total:
        total, gpu = needed, found.cached_tokens // BLOCK
    return {
        "requests": len(firsts),
        "requests_per_s": len(firsts) / elapsed,
        **summary([s * 1e3 for s in firsts], "first_token_ms"),
        "gpu": gpu / total,
        "cpu": found.cpu / total,
        "hits": hits_text(total, gpu, found.cpu),
        "h2d_gib": found.h2d / GIB,
        "d2h_gib": found.d2h / GIB,
    }


def hits_text(total: int, gpu: int, cpu: int) -> str:
    """Blocks by tier, as the engine's log has them."""
    from hetero_llm.kv_cache.hit_log import HitCounter, hit_line

    return hit_line(HitCounter(gpu, cpu, total - gpu - cpu))


def trace(engines: Engines, settings: Settings) -> dict[str, Any]:
    """Conversations of several turns whose blocks are three times the GPU's cache."""
    rows = []
    for name in ("off", "victims"):
        served = engines.get(name)
        served.wait_idle()
        conversations = plan_trace(GPU_BLOCKS * BLOCK, settings.ids("trace"))
        row = {
            "tier": "GPU only" if name == "off" else "GPU and host",
            "gpu_blocks": GPU_BLOCKS,
            "host_blocks": int(served.counters().get("kv_offload_host_slots", 0)),
        }
        rows.append({**row, **run_trace(served, conversations)})
        print(rows[-1]["hits"], flush=True)
    off, on = rows
    if not on["h2d_gib"] or on["cpu"] <= 0 or off["cpu"] or off["h2d_gib"]:
        raise WrongTier(f"the host tier served {on['cpu']:.1%} of the blocks with it")
    for row in rows:
        row["over GPU only"] = row["requests_per_s"] / off["requests_per_s"]
    return {"rows": rows, "goal": 2.0}


# -- pool ---------------------------------------------------------------------------------------


def touch(num_bytes: int) -> float:
    """Seconds to write every page of `num_bytes` of new memory once; it is freed again."""
    begin = time.perf_counter()
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    parts = np.array_split(np.frombuffer(memory, np.uint8), _TOUCHERS)
    with ThreadPoolExecutor(_TOUCHERS) as threads:
        list(threads.map(lambda part: part.fill(1), parts))
    return time.perf_counter() - begin


def pool(engines: Engines, settings: Settings) -> dict[str, Any]:
    """Seconds until 30 GiB of host memory are pinned, all before serving or in the background.
    The memory was touched once before, as on a machine that has run for a while."""
    torch.empty(1, device="cuda")
    touched = touch(POOL_GIB * GIB)
    rows = []
    for background in (False, True):
        served, all_ready = _pin(POOL_GIB * GIB // POOL_ROW, background)
        rows.append(
            {
                "pool": f"{POOL_GIB} GiB",
                "mode": "background" if background else "blocking",
                "serving_after_s": served,
                "all_after_s": all_ready,
                "goal_s": 1.0 if background else 4.0,
            }
        )
    return {"first_touch_s": touched, "rows": rows}


def _pin(num_rows: int, background: bool) -> tuple[float, float]:
    """Seconds until a row can be used, and until all can.

    Raises:
        WrongTier: memory was refused.
    """
    from hetero_llm.bridge.kv_offload.pinned_pool import PinnedPool

    begin = time.perf_counter()
    made = PinnedPool(POOL_ROW, num_rows, threads=_TOUCHERS, background=background)
    try:
        times = []
        for wanted in (1, num_rows):
            while made.ready_rows < wanted:
                if made.failure:
                    raise WrongTier(f"only {made.ready_rows} rows were pinned: {made.failure}")
                time.sleep(1e-3)
            times.append(time.perf_counter() - begin)
        return times[0], times[1]
    finally:
        made.close()


# -- drafts beside it ---------------------------------------------------------------------------


def spec(engines: Engines, settings: Settings) -> dict[str, Any]:
    """Lookahead cache, draft worker and host tier in one engine, against the same without the
    tier. Every prompt is new; with the tier, blocks of those before are stored meanwhile and each
    batch's prompts are sent again, so that drafting continues beside loads, too."""
    engines.close()
    prompts = heldout_prompts().prompts[:, -SPEC_PROMPT:].tolist()
    figures = [_spec_run(settings, prompts, offload=offload) for offload in (False, True)]
    off, on = figures
    rows = []
    for case in off:
        loss = 1.0 - on[case]["tok/s"] / off[case]["tok/s"]
        rows.append(
            {
                "case": case,
                "off_tok_s": off[case]["tok/s"],
                "on_tok_s": on[case]["tok/s"],
                "loss": loss,
                "goal": 0.05,
                "off_tokens_per_step": off[case]["tokens/step"],
                "on_tokens_per_step": on[case]["tokens/step"],
            }
        )
    return {"target": settings.target and settings.target.rsplit("/", 1)[-1], "rows": rows}


def _spec_run(
    settings: Settings, prompts: list[list[int]], *, offload: bool
) -> dict[str, dict[str, float]]:
    """Case to tokens a second behind the first ones, and tokens a step of a sequence."""
    assert settings.target is not None and settings.draft is not None
    args: dict[str, Any] = {
        "speculative_model": settings.draft, "num_speculative_tokens": 6,
        "cpu_draft_worker": True, "use_lookahead": True, "dtype": "bfloat16",
        "device": settings.device, "max_num_seqs": max(SPEC_BATCHES), "block_size": BLOCK,
        "max_model_len": SPEC_PROMPT + SPEC_TOKENS + BLOCK, "num_gpu_blocks_override": 2048,
        "enable_prefix_caching": True,
    }  # fmt: skip
    if offload:
        args |= {
            "enable_prefix_cache_offload": True, "apc_offload_gpu_evictor_limit": 0,
            "apc_offload_background_pin": False, "cpu_prefill_memory_utilization": share_for(16),
        }  # fmt: skip
    rows = iter(prompts)
    seen: dict[str, dict[str, float]] = {}
    with LLM(settings.target, **args) as llm:
        for size in SPEC_BATCHES:  # learns times of steps
            _spec_batch(llm, [next(rows) for _ in range(size)])
        before = llm.metrics()
        for size in SPEC_BATCHES:
            batches = [[next(rows) for _ in range(size)] for _ in range(_SPEC_RUNS[size])]
            for name in ("new", "again"):
                seen[f"batch {size}, {name}"] = _spec_case(llm, batches)
        after = llm.metrics()
    if after["spec_decode_num_accepted_tokens"] <= before["spec_decode_num_accepted_tokens"]:
        raise WrongTier("no draft token was accepted")
    for name in ("kv_offload_bytes_h2d", "kv_offload_bytes_d2h") if offload else ():
        if after[name] <= before[name]:
            raise WrongTier(f"{name} did not grow: nothing was copied beside the drafts")
    return seen


def _spec_case(llm: LLM, batches: list[list[list[int]]]) -> dict[str, float]:
    before = llm.metrics()
    spent = sum(_spec_batch(llm, batch) for batch in batches)
    after = llm.metrics()
    tokens = sum(len(batch) for batch in batches) * SPEC_TOKENS
    name = "spec_decode_num_accepted_tokens"
    accepted = after[name] - before[name]
    return {"tok/s": tokens / spent, "tokens/step": tokens / max(tokens - accepted, 1)}


def _spec_batch(llm: LLM, prompts: list[list[int]]) -> float:
    """Seconds from the last first token to the last token."""
    params = greedy(SPEC_TOKENS + 1)
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    begins, ends = [], []
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None
        assert metrics.first_token_time is not None and metrics.last_token_time is not None
        begins.append(metrics.first_token_time)
        ends.append(metrics.last_token_time)
    return max(ends) - max(begins)
