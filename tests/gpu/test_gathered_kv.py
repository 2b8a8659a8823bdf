"""Runners of the GPU that share steps against the torch runner: with a cache of the model's type
and of 8 bits, with draft trees, and with adapters' way of taking rows. Ranks are threads of which
one runs at a time, so this file runs on one device, or the first steps of one family in Triton's
interpreter, which takes seconds for each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hetero_llm.gpu.attention_context import AttentionContext
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.gathered_kv import CacheKV, StepSharer
from hetero_llm.gpu.kernels.rope_store import store
from hetero_llm.gpu.model_runner import GpuModelRunner
from hetero_llm.models.layers import CausalLM
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.runner.model_runner import TorchModelRunner
from hetero_llm.runner.sequence_parallel import NO_SEQUENCE_PARALLEL, SequenceParallel
from tests.helpers.shared_steps import (
    BLOCK_SIZE,
    BLOCKS,
    LEAST_TOKENS,
    MAX_LEN,
    MAX_TOKENS,
    SLOTS,
    TurnCollectives,
    check_same,
    check_same_cache,
    run_in_turns,
    run_shared,
    steps,
)
from tests.models.tiny import make_tiny_checkpoint

ON_DEVICE = torch.cuda.is_available()
FAMILIES = ("llama", "opt", "gpt_oss") if ON_DEVICE else ("llama",)
"""A rotary embedding; none; windows, sinks and experts."""
LAYERS, STEPS = (2, None) if ON_DEVICE else (1, 2)


class Made:
    """Makes runners of one checkpoint."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device
        self.config = load_model_config(folder)
        config = self.config
        self.shape = KVCacheShape(
            config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, torch.float32
        )

    def torch_runner(self) -> TorchModelRunner:
        cache = PagedKVCache(self.shape, BLOCKS, self.device)
        sizes = {"max_num_seqs": SLOTS, "max_model_len": MAX_LEN}
        return TorchModelRunner(self._model(), self.config, cache, device=self.device, **sizes)

    def runner(
        self,
        sequence: SequenceParallel | None = None,
        *,
        drafts: bool = False,
        fp8: bool = False,
        selects: bool = True,
    ) -> GpuModelRunner:
        shape, scales = self.shape, None
        if fp8:
            shape = replace(shape, dtype=torch.float8_e4m3fn)
            scales = torch.full((shape.num_layers, 2, shape.num_kv_heads), 0.0625)
        model = self._model()
        speed_up(model)
        model.selects_rows = selects
        return GpuModelRunner(
            model, self.config, PagedKVCache(shape, BLOCKS, self.device, scales),
            max_num_seqs=SLOTS, max_model_len=MAX_LEN, max_num_batched_tokens=MAX_TOKENS,
            graphs=False, most_drafted_tokens=MAX_TOKENS if drafts else 0,
            sequence=sequence or NO_SEQUENCE_PARALLEL,
        )  # fmt: skip

    def _model(self) -> CausalLM:
        return load_model(
            self.folder, self.config, dtype=torch.float32, device=self.device, show_progress=False
        )


@pytest.fixture(scope="module", params=FAMILIES)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> Made:
    family = request.param
    folder = make_tiny_checkpoint(
        tmp_path_factory.mktemp(family), family, "heads_of_16", layers=LAYERS
    )
    return Made(folder, device)


@pytest.mark.parametrize("drafts", [False, True] if ON_DEVICE else [True])
def test_runners_that_share_steps(made: Made, drafts: bool) -> None:
    work = steps(drafts=drafts)[:STEPS]
    alone = made.torch_runner()
    expected = [alone.finish(alone.launch(step)) for step in work]
    found, caches, gathers = run_shared(
        lambda sequence: made.runner(sequence, drafts=drafts), work, 2
    )
    check_same(found, expected)
    check_same_cache(caches, alone.cache.data)
    assert gathers == (3 if ON_DEVICE and not drafts else 2) * (LAYERS + 1)


@pytest.mark.skipif(not ON_DEVICE, reason="no CUDA device")
@pytest.mark.parametrize("made", ["llama"], indirect=True)
def test_models_that_return_all_rows(made: Made) -> None:
    """As steps with adapters do."""
    work = steps()[:2]
    alone = made.torch_runner()
    expected = [alone.finish(alone.launch(step)) for step in work]
    found, _, _ = run_shared(lambda sequence: made.runner(sequence, selects=False), work, 2)
    check_same(found, expected)


@pytest.mark.skipif(not ON_DEVICE, reason="no CUDA device")
@pytest.mark.parametrize("made", ["llama"], indirect=True)
def test_a_cache_of_8_bits_has_the_codes_of_one_runner(made: Made) -> None:
    """Of the first layer, whose inputs are the same bits."""
    (work, *_) = steps()
    alone = made.runner(fp8=True)
    alone.finish(alone.launch(work))
    _, caches, _ = run_shared(lambda sequence: made.runner(sequence, fp8=True), [work], 2)
    expected = alone.cache.data.view(torch.uint8)
    for data in caches:
        assert torch.equal(data.view(torch.uint8)[:, 0], expected[:, 0])
    assert expected[:, 0].any()


@pytest.mark.parametrize("made", ["llama"], indirect=True)
def test_what_ranks_store_in_a_cache_of_8_bits(made: Made) -> None:
    """Keys and values of a step through the buffers of two ranks, and straight into a cache."""
    config, device = made.config, made.device
    shape = replace(made.shape, dtype=torch.float8_e4m3fn)
    layers, heads, dim = shape.num_layers, shape.num_kv_heads, shape.head_dim
    (step, *_) = steps()
    tables = torch.zeros(SLOTS, 4, dtype=torch.int32, device=device)
    table, column, block = torch.from_numpy(step.block_table_writes).long()
    tables[table, column] = block.int().to(device)
    count = int(step.num_scheduled_tokens.sum())
    drawn = torch.Generator().manual_seed(5)
    k, v = (100 * torch.randn(count, heads, dim, generator=drawn).to(device) for _ in range(2))
    scales = torch.rand(layers, 2, heads, generator=drawn) + 0.5

    def context() -> AttentionContext:
        cache = PagedKVCache(shape, BLOCKS, device, scales)
        return AttentionContext(config, cache, tables, torch.float32)

    def act(own: TurnCollectives) -> torch.Tensor:
        shared = context()
        sequence = SequenceParallel(own, LEAST_TOKENS)
        sharer = StepSharer(shared, sequence, max_tokens=MAX_TOKENS)
        part = sharer.split(step)
        assert part is not None
        rows = sharer.send(step, part, tables.cpu().numpy(), samples=True)
        mine = part.tokens.places // part.tokens.group % 2 == own.rank.index
        mine = torch.from_numpy(np.flatnonzero(mine)).to(device)
        for layer in range(layers):
            to = rows.kv.target(layer)
            store(k[mine] + layer, v[mine], to.slot_mapping, to.keys, to.values)
            assert to.inverses is None
            rows.kv.stored(layer)
        return shared.cache.data.view(torch.uint8)

    found = run_in_turns(act, 2)
    alone = context()
    lengths = zip(step.request_slots.tolist(), step.num_scheduled_tokens.tolist(), strict=True)
    inside = torch.arange(BLOCK_SIZE, dtype=torch.int32, device=device)
    slots = [(tables[slot, :, None] * BLOCK_SIZE + inside).flatten()[:n] for slot, n in lengths]
    kv = CacheKV(alone, torch.cat(slots))
    for layer in range(layers):
        to = kv.target(layer)
        store(k + layer, v, to.slot_mapping, to.keys, to.values, inverses=to.inverses)
        kv.stored(layer)
    expected = alone.cache.data.view(torch.uint8)
    assert expected.any() and all(torch.equal(data, expected) for data in found)
