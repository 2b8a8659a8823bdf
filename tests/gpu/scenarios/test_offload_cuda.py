"""The host tier on a real device: tokens are those without it, whatever is aborted, preempted or
fails; its books are empty in the end; and steps that do not wait for their loads do go wrong.

SOAK_SECONDS: how long `test_soak` goes on, 8 unless given.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm import LLM, SamplingParams
from hetero_llm.engine.engine import Engine
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.kv_cache import KVCacheShape
from tests.gpu.scenarios.serving import generate, regrets, runner_of
from tests.helpers import offload_traffic as traffic
from tests.models.tiny import VOCAB_SIZE

SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "8"))
GPU_BLOCKS, HOST_BLOCKS = 40, 150
"""For prompts of up to 20 blocks: less than what three of them need, and host memory for half of
the heads."""
TIES = 1e-4
_MOST_TRIES = 6
_MIXED: dict[str, dict[str, Any]] = {
    "victims": {},
    "all leave": {"apc_offload_gpu_evictor_limit": 0},
    "not lazy": {"apc_offload_gpu_evictor_limit": 8, "apc_offload_not_lazy": True},
    "written through": {"apc_offload_write_policy": "write_through"},
    "one group": {"apc_offload_gpu_evictor_limit": 0, "apc_offload_lookahead": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traffic.tiny_folder(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traffic.heavy_folder(tmp_path_factory.mktemp("heavy") / "llama")


class Plain:
    """An engine without a host tier that has room for everything: what random traffic has to
    bring, each kept."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._known: dict[tuple[int, int], dict[str, list[int]]] = {}

    def tokens(self, seed: int, count: int) -> dict[str, list[int]]:
        if (seed, count) not in self._known:
            jobs = traffic.traffic(seed, count)
            self._known[seed, count] = traffic.serve(engine_of(self._llm), jobs, aborts=False)
        return self._known[seed, count]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Plain]:
    with start(folder, num_gpu_blocks_override=640) as llm:
        yield Plain(llm)


def start(folder: Path, **engine_args: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "float32", "device": "cuda", "block_size": 16, "max_num_seqs": 8,
        "max_model_len": 400, "max_num_batched_tokens": 128, "batch_invariant": True,
        "skip_tokenizer_init": True, "disable_log_stats": True,
    }  # fmt: skip
    return LLM(str(folder), **{**defaults, **engine_args})


def start_with_host(folder: Path, host_blocks: int = HOST_BLOCKS, **engine_args: Any) -> LLM:
    config = load_model_config(folder)
    shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.float32)
    defaults = {
        "num_gpu_blocks_override": GPU_BLOCKS, "enable_prefix_cache_offload": True,
        "cpu_prefill_memory_utilization": traffic.share_for(host_blocks * shape.block_bytes),
        "apc_offload_background_pin": False,
    }  # fmt: skip
    return start(folder, **{**defaults, **engine_args})


def engine_of(llm: LLM) -> Engine:
    return llm.engine


def compare(engine: Engine, plain: Plain, seed: int, count: int = 24) -> int:
    """Random traffic on an engine and, undisturbed, without host memory; tokens compared."""
    jobs = traffic.traffic(seed, count)
    return traffic.check_same(jobs, traffic.serve(engine, jobs), plain.tokens(seed, count))


def grown(engine: Engine, before: dict[str, float], *names: str) -> list[float]:
    after = engine.metrics()
    return [after[name] - before[name] for name in names]


# -- equality -----------------------------------------------------------------------------------


def test_the_manuals_example(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hetero_llm")
    with start_with_host(
        folder, 1024, num_gpu_blocks_override=100, max_model_len=176, max_num_batched_tokens=176,
        apc_offload_enable_hit_cnt=True,
    ) as llm:  # fmt: skip
        outputs = [generate(llm, [p], traffic.GREEDY)[0] for p in traffic.golden_prompts()]
        assert outputs[0].outputs[0].token_ids == outputs[-1].outputs[0].token_ids
        assert outputs[-1].num_cached_tokens == 160
        metrics = llm.metrics()
        assert metrics["prefix_blocks_cpu"] == 10 and metrics["prefix_blocks_total"] == 132
        traffic.check_over(engine_of(llm))
    lines = [r.getMessage() for r in caplog.records if "[HIT CNT]" in r.getMessage()]
    assert len(lines) == 2 and lines[0].startswith("[HIT CNT] total: 110, ")
    assert lines[-1] == traffic.GOLDEN


@pytest.mark.parametrize("case", _MIXED)
def test_random_traffic_has_the_same_tokens(folder: Path, plain: Plain, case: str) -> None:
    with start_with_host(folder, **_MIXED[case]) as llm:
        engine = engine_of(llm)
        assert sum(compare(engine, plain, seed) for seed in range(3)) > 300
        traffic.check_over(engine)
        metrics = engine.metrics()
        for name in ("kv_offload_loads", "kv_offload_stores", "kv_offload_bytes_h2d"):
            assert metrics[name] > 0, name
        assert metrics["num_preemptions"] > 0
        assert not metrics["kv_offload_failed_loads"] and not metrics["kv_offload_broken"]


def test_failing_copies_change_no_token(folder: Path, plain: Plain) -> None:
    with start_with_host(folder, apc_offload_gpu_evictor_limit=0) as llm:
        engine = engine_of(llm)
        traffic.join_at_once(engine)
        copier = traffic.spoil(engine, 1, 0.3)
        for seed in range(10, 18):
            compare(engine, plain, seed)
        traffic.check_over(engine)
        metrics = engine.metrics()
        assert copier.spoiled["loads"] > 3 and copier.spoiled["stores"] > 3
        assert metrics["kv_offload_failed_loads"] > 0 and metrics["kv_offload_loads"] > 0
        assert not metrics["kv_offload_broken"]


def test_copies_that_always_fail_switch_the_tier_off(folder: Path, plain: Plain) -> None:
    with start_with_host(folder, apc_offload_gpu_evictor_limit=0) as llm:
        engine = engine_of(llm)
        compare(engine, plain, 20)
        traffic.spoil(engine, 2, 1.0)
        for seed in (20, 21):
            compare(engine, plain, seed)
        assert engine.metrics()["kv_offload_broken"]
        before = engine.metrics()
        compare(engine, plain, 22)
        names = ("kv_offload_loads", "kv_offload_failed_loads", "kv_offload_stores")
        assert grown(engine, before, *names) == [0, 0, 0]
        traffic.check_over(engine)


def test_a_full_cache_is_forgotten_while_copies_are_under_way(folder: Path, plain: Plain) -> None:
    with start_with_host(folder, apc_offload_gpu_evictor_limit=0) as llm:
        engine = engine_of(llm)
        for seed in (30, 31):
            compare(engine, plain, seed, 8)
            engine.reset_prefix_cache()
            before = engine.metrics()
            compare(engine, plain, seed + 100, 1)  # a prompt that was not sent before
            assert grown(engine, before, "prefix_blocks_cpu", "prefix_blocks_gpu") == [0, 0]
        traffic.check_over(engine)


@pytest.mark.parametrize("eager", [False, True])
def test_captured_and_uncaptured_steps_draw_what_the_reference_draws(
    folder: Path, eager: bool
) -> None:
    """Their sums depend on the batch, so float32 logits of transformers judge every token."""
    with start_with_host(
        folder, batch_invariant=False, enforce_eager=eager, apc_offload_gpu_evictor_limit=0
    ) as llm:
        engine = engine_of(llm)
        traffic.join_at_once(engine)
        rng = np.random.default_rng(40)
        heads = [rng.integers(3, VOCAB_SIZE, 240).tolist() for _ in range(4)]
        for turn in range(4):
            prompts = [head + rng.integers(3, VOCAB_SIZE, 3 + 9 * turn).tolist() for head in heads]
            params = [
                SamplingParams(
                    temperature=float(i % 2), seed=i, max_tokens=12, ignore_eos=True,
                    detokenize=False,
                )
                for i in range(len(prompts))
            ]  # fmt: skip
            outputs = generate(llm, prompts, params)
            assert float(regrets(outputs, params, folder).max()) < TIES
        assert engine.metrics()["kv_offload_loads"] > 4
        traffic.check_over(engine)


# -- steps that wait ----------------------------------------------------------------------------


LONG = {"max_model_len": 2100, "max_num_batched_tokens": 2100, "batch_invariant": False,
        "num_gpu_blocks_override": 260}  # fmt: skip
PREFIX, PROMPT = 2000, 2005


@contextmanager
def heavy_engine(heavy: Path, **engine_args: Any) -> Iterator[LLM]:
    """Loads take milliseconds and layers a fraction of one. Sequences join as soon as their loads
    have begun, and free blocks hold what earlier prompts left there."""
    with start_with_host(
        heavy, 400, apc_offload_gpu_evictor_limit=0, apc_offload_host_policy="lru", **LONG,
        **engine_args,
    ) as llm:  # fmt: skip
        traffic.join_at_once(engine_of(llm))
        traffic.load_always(engine_of(llm))
        yield llm


def tokens_of(llm: LLM, prompt: list[int]) -> list[int]:
    params = replace(traffic.GREEDY, max_tokens=6)
    tokens = list(generate(llm, [prompt], params)[0].outputs[0].token_ids)
    traffic.rest(engine_of(llm))
    return tokens


def long_prompts(seed: int) -> list[list[int]]:
    return np.random.default_rng(50 + seed).integers(3, VOCAB_SIZE, (2, PROMPT)).tolist()


@functools.cache
def found_on_device(heavy: Path, *, eager: bool) -> list[list[int]]:
    """Tokens of each try with the prefix in the device's cache: the very sums of a loaded one."""
    found = []
    with start(heavy, **LONG, enforce_eager=eager) as llm:
        for seed in range(_MOST_TRIES):
            prompt, _ = long_prompts(seed)
            tokens_of(llm, prompt)
            before = llm.metrics()
            found.append(tokens_of(llm, prompt))
            assert grown(engine_of(llm), before, "prefix_cache_hits") == [PREFIX]
    return found


def found_in_host(llm: LLM) -> list[list[int]]:
    """The same with the prefix coming from host memory, into blocks that held another prompt."""
    found = []
    for seed in range(_MOST_TRIES):
        prompt, other = long_prompts(seed)
        tokens_of(llm, prompt)
        tokens_of(llm, other)
        # The load may go to the very blocks that held the prompt: who reads too early shall see it.
        runner_of(llm).cache.data.zero_()
        torch.cuda.synchronize()
        before = llm.metrics()
        found.append(tokens_of(llm, prompt))
        assert grown(engine_of(llm), before, "prefix_blocks_cpu") == [PREFIX // 16]
    return found


@pytest.mark.parametrize("not_lazy", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_steps_wait_for_their_loads(heavy: Path, eager: bool, not_lazy: bool) -> None:
    expected = found_on_device(heavy, eager=eager)
    with heavy_engine(heavy, enforce_eager=eager, apc_offload_not_lazy=not_lazy) as llm:
        assert found_in_host(llm) == expected
        traffic.check_over(engine_of(llm))


def test_steps_that_do_not_wait_go_wrong(heavy: Path) -> None:
    """The negative control: the same with layer-ready flags that never make a step wait."""
    expected = found_on_device(heavy, eager=True)
    with heavy_engine(heavy, enforce_eager=True) as llm:
        runner, tier = runner_of(llm), traffic.tier_of(engine_of(llm))
        tier.copier = late = traffic.LateCopier(tier.copier)
        runner.layer_ready = traffic.OpenGates(runner.layer_ready, late.start_loads)
        assert found_in_host(llm) != expected, "no step was early: the test above shows nothing"
        traffic.check_over(engine_of(llm))


# -- for long -----------------------------------------------------------------------------------


def test_soak(folder: Path, plain: Plain) -> None:
    """Random traffic with aborts, preemptions and failing copies, one way after the other."""
    deadline = time.monotonic() + SOAK_SECONDS
    rounds, tokens, seed = 0, 0, 1000
    totals = dict.fromkeys(("kv_offload_loads", "kv_offload_failed_loads", "num_preemptions"), 0.0)
    while rounds == 0 or time.monotonic() < deadline:
        share = deadline - time.monotonic()
        with start_with_host(folder, **_MIXED[list(_MIXED)[rounds % len(_MIXED)]]) as llm:
            engine = engine_of(llm)
            if rounds % 2:
                traffic.join_at_once(engine)
            traffic.spoil(engine, seed, 0.1)
            end = time.monotonic() + max(4.0, min(20.0, share))
            while time.monotonic() < end:
                tokens += compare(engine, plain, seed)
                seed += 1
            traffic.check_over(engine)
            metrics = engine.metrics()
            totals = {name: total + metrics[name] for name, total in totals.items()}
        rounds += 1
    print(f"soak: {seed - 1000} rounds of traffic on {rounds} engines, {tokens} tokens, {totals}")
    assert all(totals.values()) or SOAK_SECONDS < 20, totals
