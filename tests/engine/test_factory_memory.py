"""Sharing out the GPU's memory, as far as that can be seen without one: what stays on the host, the
profile step, the arithmetic, and every message. On a real GPU: tests/gpu/test_memory_cuda.py."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetero_llm import LLM
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig, SchedulerConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.engine import factory
from hetero_llm.gpu import memory, weight_offload
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.memory import PoolRoom
from hetero_llm.gpu.weight_offload import (
    GIB,
    OffloadPlan,
    plan_offload,
    stage_products,
    staged,
    weights_on_host,
)
from hetero_llm.models.collectives import Collectives
from hetero_llm.models.layers import CausalLM, Linear
from hetero_llm.models.loader import load_model, quantized_sizes
from hetero_llm.models.quantized_writer import write_quantized
from hetero_llm.models.rank_config import sharded_config
from hetero_llm.models.read_config import load_model_config
from hetero_llm.quantization.names import ONLINE_NAMES, OnlineName
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.runner.model_runner import TorchModelRunner
from tests.helpers.rank_models import Ranks, load_rank
from tests.models.test_loader_online import WIDE
from tests.models.tiny import DenseAttend, make_tiny_checkpoint

CPU = torch.device("cpu")
FP32 = torch.float32
CONFIG = SchedulerConfig(
    max_num_seqs=8,
    max_num_batched_tokens=128,
    max_model_len=64,
    enable_chunked_prefill=True,
    block_size=8,
)
SHAPE = KVCacheShape(3, 2, 8, 8, FP32)


def load(folder: Path) -> CausalLM:
    config = load_model_config(folder)
    return load_model(folder, config, dtype=FP32, device="cpu", show_progress=False)


def sizes_of(model: CausalLM) -> dict[str, int]:
    """Bytes of the weights of the layers' matrices, in order of creation."""
    return {
        name: module.weight.nbytes
        for name, module in model.named_modules()
        if isinstance(module, Linear) and name.startswith("layers.")
    }


# -- what stays on the host -----------------------------------------------------------------


def test_the_last_layers_largest_matrices_move_first(tiny_folder: Path) -> None:
    sizes = sizes_of(load(tiny_folder))
    names = list(sizes)
    last = ["mlp.gate_up_proj", "mlp.down_proj", "attention.qkv_proj", "attention.out_proj"]
    wanted = [f"layers.2.{name}" for name in last] + ["layers.1.mlp.gate_up_proj"]
    budget = sum(sizes[name] for name in wanted)
    # What is left is too small for the next in turn, but just right for the smallest.
    plan = plan_offload(
        load_model_config(tiny_folder), FP32, (budget + sizes["layers.1.attention.out_proj"]) / GIB
    )
    chosen = [*wanted, "layers.1.attention.out_proj"]
    assert sizes["layers.1.mlp.down_proj"] > sizes["layers.1.attention.out_proj"]
    assert plan.chosen == {names.index(name) for name in chosen}
    assert plan.moved_bytes == sum(sizes[name] for name in chosen)
    assert plan.staging_bytes == sizes["layers.2.mlp.gate_up_proj"]
    assert plan.freed_bytes == plan.moved_bytes - plan.staging_bytes
    assert plan.movable_bytes == sum(sizes.values())


@pytest.mark.parametrize(
    ("family", "variant"),
    [("llama", "gqa"), ("llama", "tied"), ("qwen2", ""), ("opt", "projections"), ("gpt2", "")],
)
def test_staged_weights_give_the_same_hidden_states(
    family: str, variant: str, tmp_path: Path
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model", family, variant)
    config = load_model_config(folder)
    plain = load(folder)
    plan = plan_offload(config, FP32, 1.0)
    with weights_on_host(plan, pin=False) as moved:
        model = load(folder)
    assert len(moved) == len(plan.chosen) == len(sizes_of(plain))
    assert plan.weight_bytes == sum(p.nbytes for p in plain.parameters())
    stage_products(moved, CPU, plan)
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    outside = {"lm_head", "project_in", "project_out"}
    replaced = [m for m in linears if m.product is not torch.nn.functional.linear]
    assert {id(m) for m in replaced} == {id(m) for m in moved}
    assert len(linears) - len(moved) <= len(outside)
    ids, positions = torch.tensor([5, 9, 3, 7]), torch.arange(4)
    with torch.inference_mode():
        results = [m(ids, positions, DenseAttend(config, [4])) for m in (plain, model)]
        assert torch.equal(*results)
        assert torch.equal(plain.logits(results[0]), model.logits(results[1]))


def test_the_next_model_is_built_as_usual(tiny_folder: Path) -> None:
    with weights_on_host(plan_offload(load_model_config(tiny_folder), FP32, 1.0), pin=False):
        pass
    model = load(tiny_folder)
    assert all(
        m.product is torch.nn.functional.linear for m in model.modules() if isinstance(m, Linear)
    )


def test_a_product_reads_the_weight_through_the_buffer() -> None:
    buffer = torch.full((12,), 7.0)
    seen: list[Tensor] = []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(weight)
        return torch.nn.functional.linear(x, weight, bias)

    weight, x, bias = torch.randn(2, 4), torch.randn(3, 4), torch.randn(2)
    result = staged(product, buffer)(x, weight, bias)
    assert torch.equal(result, torch.nn.functional.linear(x, weight, bias))
    assert seen[0].data_ptr() == buffer.data_ptr()
    assert buffer[8:].tolist() == [7.0] * 4


@pytest.mark.parametrize("matrices", [0, 1])
def test_a_budget_that_saves_nothing(matrices: int, tiny_folder: Path) -> None:
    largest = max(sizes_of(load(tiny_folder)).values()) if matrices else 2
    with pytest.raises(ConfigError, match=r"^cpu_offload_gb=.*: saves no GPU memory: .*staging"):
        plan_offload(load_model_config(tiny_folder), FP32, largest / GIB)


def test_no_budget_moves_nothing(tiny_folder: Path) -> None:
    plan = plan_offload(load_model_config(tiny_folder), FP32, 0)
    assert plan.chosen == frozenset() and plan.moved_bytes == plan.freed_bytes == 0


def test_a_host_without_pinned_memory(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_offload(load_model_config(tiny_folder), FP32, 0.5)
    real = torch.empty

    def empty(*args: object, **options: object) -> Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory\nand more")
        return real(*args, **options)

    monkeypatch.setattr(torch, "empty", empty)
    expected = r"^cpu_offload_gb=0.5: the host gave no pinned memory for .*lower it \(CUDA error: "
    with pytest.raises(ConfigError, match=expected) as caught, weights_on_host(plan):
        load(tiny_folder)
    assert "and more" not in str(caught.value)


# -- arguments ------------------------------------------------------------------------------


def start(folder: Path, **engine_args: object) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", block_size=8, **engine_args)


def test_offload_needs_a_gpu(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="^cpu_offload_gb=1.5: needs a GPU"):
        start(tiny_folder, cpu_offload_gb=1.5)
    with pytest.raises(ConfigError, match="^cpu_offload_gb=-1.0: must be at least 0"):
        start(tiny_folder, cpu_offload_gb=-1)
    start(tiny_folder, cpu_offload_gb=0).close()


def test_offload_excludes_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(factory, "free_unreachable", lambda device: None)
    given = {"model": "demo", "cpu_offload_gb": 1, "batch_invariant": True}
    config = EngineConfig.from_args(resolve_engine_args(given))
    with pytest.raises(ConfigError, match="^cpu_offload_gb=1.0?: cannot be combined with batch_in"):
        factory.build_engine(config)


def test_a_conservative_dry_run_means_nothing_on_a_cpu(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hetero_llm"):
        start(tiny_folder, conservative_dry_run=True).close()
    assert "conservative_dry_run has no effect on a CPU" in caplog.text


def test_no_cuda_device(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="^device='cuda': no CUDA device .*use device='cpu'$"):
        LLM(str(tiny_folder), device="cuda")


def test_too_little_host_memory(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="^gpu_memory_utilization=.*host memory.*max_model_len"):
        start(tiny_folder, gpu_memory_utilization=1e-9)


# -- the profile step -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, max_num_seqs=1),
        replace(CONFIG, max_num_seqs=2, max_model_len=33),
        replace(CONFIG, max_num_batched_tokens=8),
        replace(CONFIG, max_model_len=500),
        replace(CONFIG, max_model_len=1),
    ],
)
def test_the_largest_step_fills_what_a_step_may_hold(config: SchedulerConfig) -> None:
    step = memory.largest_step(config)
    longest = max(1, config.max_model_len - 1)
    counts = step.num_scheduled_tokens.tolist()
    assert len(counts) == config.max_num_seqs == len(step.admitted) == int(step.num_samples.sum())
    assert sum(counts) == min(config.max_num_batched_tokens, config.max_num_seqs * longest)
    assert len(step.token_ids) == sum(counts)
    assert min(counts) >= 1 and max(counts) <= longest
    assert counts[0] == min(longest, config.max_num_batched_tokens - config.max_num_seqs + 1)
    slots, columns, blocks = step.block_table_writes.tolist()
    assert len(set(blocks)) == len(blocks) == max(blocks) + 1
    for slot, count in enumerate(counts):
        own = [c for s, c in zip(slots, columns) if s == slot]
        assert own == list(range(-(-count // config.block_size)))


# -- the arithmetic, with a GPU made of numbers ----------------------------------------------


class FakeCuda:
    """torch.cuda's counters; a runner moves them as a real one would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, total: int, used: int) -> None:
        self.total, self.used, self.allocated, self.peak = total, used, used, used
        for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total - self.used, total))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.allocated)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)


class FakeRunner(nn.Module):
    """Holds a cache, and for the length of a module call `hidden` bytes that torch does not see."""

    def __init__(self, cuda: FakeCuda, cache: int, *, tensors: int, hidden: int) -> None:
        super().__init__()
        self.cuda, self.cache, self.tensors, self.hidden = cuda, cache, tensors, hidden
        cuda.used += cache
        cuda.allocated += cache

    def launch(self, step: object) -> None:
        self.cuda.peak = self.cuda.allocated + self.tensors
        self.cuda.used += self.tensors + self.hidden
        nn.Identity()(torch.zeros(1))  # the profile looks after every module
        self.cuda.used -= self.tensors + self.hidden

    def finish(self, pending: None) -> None:
        self.cuda.used -= self.cache  # as if the runner were gone
        self.cuda.allocated -= self.cache


def profiled(cuda: FakeCuda, *, conservative: bool, hidden: int = 70) -> PoolRoom:
    blocks = int(memory.largest_step(CONFIG).block_table_writes[2].max()) + 1

    def runner_with(count: int) -> FakeRunner:
        assert count == blocks
        return FakeRunner(cuda, count * SHAPE.block_bytes, tensors=300, hidden=hidden)

    return memory.measure_room(
        runner_with, CONFIG, SHAPE, utilization=0.5, conservative=conservative
    )


def test_room_counts_tensors_or_all_that_the_driver_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, total=1_000_000, used=100_000)
    plain = profiled(cuda, conservative=False)
    assert plain == PoolRoom(1_000_000, 0.5, 100_000, 300)
    assert plain.pool_bytes == 500_000 - 100_000 - 300
    assert profiled(cuda, conservative=True).pool_bytes == plain.pool_bytes - 70
    assert profiled(cuda, conservative=True, hidden=0).pool_bytes == plain.pool_bytes


def out_of_memory(_: int = 0) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


def test_a_profile_step_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, total=8 * GIB, used=6 * GIB)
    with pytest.raises(
        ConfigError,
        match="^max_num_batched_tokens=128: the largest step .*of 8.00 GiB, 2.00 GiB were free .*"
        r"6.00 GiB of weights.*lower max_num_batched_tokens, or max_num_seqs \(8\), or raise cpu",
    ):
        memory.measure_room(out_of_memory, CONFIG, SHAPE, utilization=0.9, conservative=False)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_all_ways_to_run_out_of_memory(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, total=8 * GIB, used=6 * GIB)

    def fail(_: int) -> None:
        raise error

    with pytest.raises(ConfigError, match="^num_gpu_blocks_override=500: 500 KV blocks take"):
        memory.build_runner(fail, 500, SHAPE, None)


def test_another_error_stays_what_it_is() -> None:
    def fail(_: int) -> None:
        raise RuntimeError("device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        memory.build_runner(fail, 5, SHAPE, None)


def test_a_fixed_number_of_blocks_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, total=8 * GIB, used=6 * GIB)
    shape = replace(SHAPE, num_kv_heads=1024, head_dim=1024)  # 192 MiB a block
    with pytest.raises(
        ConfigError,
        match="^num_gpu_blocks_override=100: 100 KV blocks take 18.75 GiB and 2.00 GiB of 8.00 "
        r"GiB are free; lower it \(at most 10 fit\), or leave it out",
    ):
        memory.build_runner(out_of_memory, 100, shape, None)


def test_a_pool_that_leaves_no_room_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, total=8 * GIB, used=6 * GIB)
    with pytest.raises(
        ConfigError,
        match="^gpu_memory_utilization=0.99: 100 KV blocks .*lower gpu_memory_utilization or "
        "max_num_seqs, or set conservative_dry_run or enforce_eager",
    ):
        memory.build_runner(out_of_memory, 100, SHAPE, PoolRoom(8 * GIB, 0.99, 5 * GIB, GIB))


def test_a_pool_that_is_too_small() -> None:
    room = PoolRoom(8 * GIB, 0.75, 5 * GIB, GIB // 2)
    error = memory.too_small_error(5, CONFIG, SHAPE, room)
    assert str(error) == (
        "gpu_memory_utilization=0.75: leaves 0.50 GiB or 5 KV blocks (6.00 GiB of 8.00 GiB may be "
        "used, 5.00 GiB hold weights and what else is on the GPU, 0.50 GiB the largest step); one "
        "sequence of max_model_len (64) needs 8 blocks or 0.00 GiB; lower max_model_len to at most "
        "40, raise gpu_memory_utilization or cpu_offload_gb, or lower max_num_batched_tokens (128)"
    )
    nothing = str(memory.too_small_error(-3, CONFIG, SHAPE, replace(room, used=7 * GIB)))
    assert "leaves 0.00 GiB or 0 KV blocks" in nothing
    assert "lower max_model_len" not in nothing


def test_weights_that_do_not_fit(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, total=8 * GIB, used=6 * GIB)
    config = load_model_config(tiny_folder)
    with pytest.raises(
        ConfigError,
        match="^cpu_offload_gb=0: .* of weights do not fit into the GPU, which has 2.00 GiB of "
        r"8.00 GiB free; raise it \(up to .* GiB can stay in host memory\)",
    ):
        memory.load_weights(out_of_memory, CPU, plan_offload(config, FP32, 0))
    full = replace(plan_offload(config, FP32, 2), chosen=frozenset())
    with pytest.raises(ConfigError, match="^cpu_offload_gb=2: .*no more can be moved"):
        memory.load_weights(out_of_memory, CPU, full)


def test_a_budget_beyond_the_layers_is_said(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeCuda(monkeypatch, total=8 * GIB, used=0)
    pinned: list[bool] = []
    real: Callable[..., Tensor] = torch.empty

    def empty(*args: object, **options: object) -> Tensor:
        if "pin_memory" in options:
            pinned.append(bool(options.pop("pin_memory")))
        return real(*args, **options)

    monkeypatch.setattr(torch, "empty", empty)
    plan = plan_offload(load_model_config(tiny_folder), FP32, 3)
    with caplog.at_level(logging.INFO, logger="hetero_llm.gpu.memory"):
        memory.load_weights(lambda: load(tiny_folder), CPU, plan)
    assert pinned.count(True) == len(plan.chosen)
    assert "cpu_offload_gb=3: only" in caplog.text
    assert "stay in host memory, which saves" in caplog.text


def test_the_profile_step_runs(tiny_folder: Path) -> None:
    model_config = load_model_config(tiny_folder)
    step = memory.largest_step(CONFIG)
    runner = TorchModelRunner(
        load(tiny_folder),
        model_config,
        PagedKVCache(SHAPE, int(step.block_table_writes[2].max()) + 1, CPU),
        max_num_seqs=CONFIG.max_num_seqs,
        max_model_len=CONFIG.max_model_len,
        device=CPU,
    )
    output = runner.finish(runner.launch(step))
    assert len(output.token_ids) == CONFIG.max_num_seqs


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that every way to quantize divides."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("wide"), "llama", layers=2, changes=WIDE)


def quantized(folder: Path, name: OnlineName, *, on_host: bool) -> tuple[CausalLM, OffloadPlan]:
    """A model with weights that are quantized while they are loaded, and what stays on the host."""
    config = load_model_config(folder, quantization=name)
    plan = plan_offload(config, FP32, on_host * 1.0, quantized_sizes(folder, config, dtype=FP32))
    with weights_on_host(plan, pin=False) as moved:
        model = load_model(folder, config, dtype=FP32, device="cpu", show_progress=False)
    assert len(moved) == len(plan.chosen)
    stage_products(moved, CPU, plan)
    return model, plan


@pytest.mark.parametrize(("name", "by_kernels"), [("fp8", True), ("int4", True), ("int4", False)])
def test_quantized_weights_on_the_host_give_the_same_hidden_states(
    name: OnlineName, by_kernels: bool, wide_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the form of the kernels, and as matrices that they do not serve."""
    if not by_kernels:
        monkeypatch.setattr(weight_offload, "prepares", lambda matrix: False)
    plain, _ = quantized(wide_folder, name, on_host=False)
    model, plan = quantized(wide_folder, name, on_host=True)
    matrices = {n: m.quantized for n, m in plain.named_modules() if isinstance(m, Linear)}
    held = [m for m in matrices.values() if m is not None]
    assert len(held) == len(plan.chosen) and None in matrices.values()  # the head
    assert plan.moved_bytes == pytest.approx(sum(m.nbytes for m in held), rel=0.2)
    assert plan.staging_bytes == pytest.approx(max(m.nbytes for m in held), rel=0.2)
    assert plan.weight_bytes < sum(p.nbytes for p in load(wide_folder).parameters())
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.quantized is not None:
            assert layer.quantized.device.type == "meta"  # what is left is on the host, in order
    before = {n: m.product for n, m in model.named_modules() if isinstance(m, Linear)}
    speed_up(model)
    assert all(
        m.product is before[n]
        for n, m in model.named_modules()
        if isinstance(m, Linear) and m.quantized is not None
    )
    ids, positions = torch.tensor([5, 9]), torch.arange(2)
    with torch.inference_mode():
        results = [m(ids, positions, DenseAttend(m.config, [2])) for m in (plain, model)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_some_quantized_weights_stay_on_the_device(wide_folder: Path) -> None:
    """A budget for the last layer alone, of sizes that are those of the quantized weights."""
    config = load_model_config(wide_folder, quantization="fp8")
    sizes = quantized_sizes(wide_folder, config, dtype=FP32)
    last = list(sizes)[-4:]
    plan = plan_offload(config, FP32, sum(sizes[place] for place in last) / GIB, sizes)
    assert plan.chosen == frozenset(last)
    with weights_on_host(plan, pin=False) as moved:
        model = load_model(wide_folder, config, dtype=FP32, device="cpu", show_progress=False)
    on_host = {n for n, m in model.named_modules() if isinstance(m, Linear) and m.on_host}
    assert len(moved) == 4 and all(name.startswith("layers.1.") for name in on_host)


@pytest.mark.parametrize("name", [None, "fp8", "int4"])
def test_each_rank_keeps_its_part_of_weights_on_the_host(
    name: OnlineName | None, wide_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ranks are threads here, and Triton's interpreter runs in one.
    monkeypatch.setattr(weight_offload, "prepares", lambda matrix: False)
    plain = Ranks(wide_folder, 2, quantization=name)
    expected, tokens = plain.greedy(3)
    config = load_model_config(wide_folder, quantization=name)
    plans: list[OffloadPlan] = []

    def staged_rank(folder: Path, collectives: Collectives, **options: Any) -> CausalLM:
        rank = collectives.rank
        sizes = quantized_sizes(folder, config, dtype=FP32, rank=rank)
        plans.append(plan_offload(sharded_config(config, rank), FP32, 1.0, sizes))
        with weights_on_host(plans[-1], pin=False) as moved:
            model = load_rank(folder, collectives, **options)
        assert len(moved) == len(plans[-1].chosen) > 0
        stage_products(moved, CPU, plans[-1])
        return model

    ranks = Ranks(wide_folder, 2, load=staged_rank, quantization=name)
    assert len({plan.chosen for plan in plans}) == 1 and plans[0].freed_bytes > 0
    whole = plan_offload(config, FP32, 1.0, quantized_sizes(wide_folder, config, dtype=FP32))
    assert plans[0].moved_bytes == pytest.approx(whole.moved_bytes / 2, rel=0.01)
    logits, found = ranks.greedy(3)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert found == tokens


@pytest.mark.parametrize("name", ONLINE_NAMES)
def test_sizes_of_weights_to_be_quantized(name: OnlineName, wide_folder: Path) -> None:
    config = load_model_config(wide_folder, quantization=name)
    stored = quantized_sizes(wide_folder, config, dtype=FP32)
    assert stored and set(stored).isdisjoint({-1})
    dummy = quantized_sizes(wide_folder, config, dtype=FP32, load_format="dummy")
    assert stored.items() <= dummy.items()  # the head's size is among them, too
    assert quantized_sizes(wide_folder, load_model_config(wide_folder), dtype=FP32) == {}


def test_sizes_of_stored_quantized_weights(wide_folder: Path, tmp_path: Path) -> None:
    write_quantized(wide_folder, tmp_path / "int8", "ifq", device="cpu")
    config = load_model_config(tmp_path / "int8")
    online = load_model_config(wide_folder, quantization="ifq")
    ours = quantized_sizes(tmp_path / "int8", config, dtype=FP32)
    expected = quantized_sizes(wide_folder, online, dtype=FP32)
    assert ours.keys() == expected.keys()
    for place, size in ours.items():
        assert size == pytest.approx(expected[place], rel=0.2)
