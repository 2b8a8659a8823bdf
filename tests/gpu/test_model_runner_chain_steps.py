"""A draft model on the GPU runner beside its target: in Triton's interpreter or on a GPU, without
graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_llm import SamplingParams
from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.acceptance import TypicalAcceptance
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.model_runner import GpuModelRunner
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.spec_decode.draft_model.on_device import ChainDrafter
from tests.gpu.test_model_runner_engine_steps import BUDGET, MAX_LEN, SEQS, Work, run, start
from tests.models.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    layers = 2 if torch.cuda.is_available() else 1  # the interpreter takes seconds for each
    return make_tiny_checkpoint(folder, "llama", "heads_of_16", layers=layers)


def chains(folder: Path, device: torch.device, num_tokens: int) -> ChainDrafter:
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.float32, device=device, show_progress=False)
    speed_up(model)
    shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.float32)
    runner = GpuModelRunner(
        model, config, PagedKVCache(shape, 12, device),
        max_num_seqs=SEQS, max_model_len=MAX_LEN, max_num_batched_tokens=BUDGET, graphs=False,
    )  # fmt: skip
    limits = SchedulerConfig(SEQS, BUDGET, MAX_LEN, True, 16)
    return ChainDrafter(runner, limits, 12, num_tokens=num_tokens)


def test_the_draft_model_draws_as_the_target(checkpoint: Path, device: torch.device) -> None:
    """It is the target itself, so every draft is accepted: greedy, by chance, of both samples."""
    greedy = SamplingParams(temperature=0.0, max_tokens=7, detokenize=False, ignore_eos=True)
    hot = SamplingParams(seed=3, max_tokens=6, detokenize=False, ignore_eos=True, n=2)
    work: Work = [(list(range(3, 33)), greedy), ([5, 6, 7], hot)]
    expected = run(start(checkpoint, device, ours=False)[0], work)
    drafter = chains(checkpoint, device, 3)
    engine, scheduler = start(checkpoint, device, ours=True, drafter=drafter)
    assert run(engine, work) == expected
    scheduler.check_integrity()
    drafter.check_integrity()
    stats = scheduler.stats
    assert stats.num_draft_tokens >= 8 and stats.num_accepted_tokens == stats.num_draft_tokens


def test_typical_tokens_are_walked_by_depth(checkpoint: Path, device: torch.device) -> None:
    """With a rule that every token passes, a chain is accepted whatever the target draws; greedy
    requests take their own tokens all the same."""
    greedy = SamplingParams(temperature=0.0, max_tokens=4, detokenize=False, ignore_eos=True)
    hot = SamplingParams(seed=3, max_tokens=6, detokenize=False, ignore_eos=True, temperature=1.5)
    work: Work = [([5, 6, 7], hot), (list(range(40, 50)), greedy)]
    expected = run(start(checkpoint, device, ours=False)[0], work)
    drafter = chains(checkpoint, device, 3)
    engine, scheduler = start(checkpoint, device, ours=True, drafter=drafter)
    runner = engine.runner
    assert isinstance(runner, GpuModelRunner)
    runner.typical = TypicalAcceptance(1e-30, 1e-30)
    original = drafter.propose

    def shifted(*args: object) -> object:  # drafts that no model would sample
        batch = original(*args)  # type: ignore[arg-type]
        batch.token_ids[:] = (batch.token_ids + 1) % 90
        return batch

    drafter.propose = shifted  # type: ignore[method-assign, assignment]
    outputs = run(engine, work)
    assert outputs["1"] == expected["1"] and outputs["0"] != expected["0"]
    assert scheduler.stats.num_accepted_tokens >= 3
