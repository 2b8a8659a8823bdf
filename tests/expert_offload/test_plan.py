"""How many experts the bank holds, by hand-computed bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.config.expert_config import ExpertConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.expert_offload.plan import (
    ExpertPlan,
    ExpertShape,
    GpuMemory,
    HostMemory,
    WeightForm,
    expert_bytes,
    plan_experts,
)

GIB = 1 << 30
BFLOAT16 = WeightForm(16)
SHAPE = ExpertShape(num_layers=4, num_experts=8, expert_bytes=GIB)  # 32 GiB
GPU = GpuMemory(usable=40 * GIB, weights=6 * GIB, step=2 * GIB, kv=4 * GIB)  # room for 28
HOST = HostMemory(usable=64 * GIB)
MANY = ExpertShape(num_layers=32, num_experts=8, expert_bytes=GIB)  # 256 GiB
LARGE = GpuMemory(usable=236 * GIB, weights=6 * GIB, step=2 * GIB, kv=4 * GIB)  # room for 224


def plan(
    *, shape: ExpertShape = SHAPE, gpu: GpuMemory = GPU, host: HostMemory = HOST, **config: object
) -> ExpertPlan:
    return plan_experts(shape, ExpertConfig(**config), gpu, host)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hidden", "inner", "form", "expected"),
    [
        # Qwen3-30B-A3B: 3 x 2048 x 768 numbers.
        (2048, 768, BFLOAT16, 9_437_184),
        # Qwen3-235B-A22B in blocks of 128 x 128: 18,874,368 bytes and 1,152 float32 scales.
        (4096, 1536, WeightForm(8, 128, 128, 4), 18_874_368 + 4 * 1152),
        # GLM-4.5-Air in int8 with a float32 scale a row: 2 x 1408 + 4096 rows.
        (4096, 1408, WeightForm(8, scale_bytes=4), 17_301_504 + 4 * 6912),
        # Mixtral in int4 by 128, a bfloat16 scale and a byte of zero point each.
        (4096, 14336, WeightForm(4, 128, 1, 3), 88_080_384 + 3 * 1_376_256),
        # gpt-oss: fp4 by 32 with bfloat16 scales, biases of 2 x 2880 + 2880 numbers in 16 bits.
        (2880, 2880, WeightForm(4, 32, 1, 2, 2), 12_441_600 + 2 * 777_600 + 2 * 8640),
        # A group that is cut off, and rows of an odd number of half bytes.
        (5, 3, WeightForm(4, 4, 1, 2), 6 * 3 + 2 * 12 + 5 * 2 + 2 * 5),
    ],
)  # fmt: skip
def test_bytes_of_an_expert(hidden: int, inner: int, form: WeightForm, expected: int) -> None:
    assert expert_bytes(hidden, inner, form) == expected


def test_all_are_resident_if_they_fit() -> None:
    gpu = GpuMemory(usable=44 * GIB, weights=6 * GIB, step=2 * GIB, kv=4 * GIB)
    found = plan(gpu=gpu, host=HostMemory(0))
    assert found == ExpertPlan("resident", 32, 32 * GIB, 0)
    assert str(found) == "all 32 experts on the GPU (32.00 GiB)"
    assert plan(gpu=gpu, host=HostMemory(0), cpu_experts="off") == found
    assert plan(gpu=gpu, bank_bytes=99 * GIB) == found


def test_the_largest_bank_and_all_in_host_memory() -> None:
    found = plan()
    assert found == ExpertPlan("inclusive", 28, 28 * GIB, 32 * GIB)
    assert str(found).endswith("all experts in host memory (32.00 GiB, inclusive)")


def test_a_bank_of_the_size_given() -> None:
    assert plan(bank_bytes=10 * GIB + 5) == ExpertPlan("inclusive", 10, 10 * GIB, 32 * GIB)


def test_no_bank() -> None:
    assert plan(cpu_experts="all") == ExpertPlan("inclusive", 0, 0, 32 * GIB)


def test_an_exchange_where_host_memory_is_shorter() -> None:
    # 32 experts outside, 16 free places for exchanges, and two layers while they are loaded.
    found = plan(shape=MANY, gpu=LARGE, host=HostMemory(90 * GIB, reserved=26 * GIB))
    assert found == ExpertPlan("exclusive", 224, 224 * GIB, 48 * GIB, 48)
    assert "the others in host memory (48.00 GiB, exclusive)" in str(found)
    with pytest.raises(ConfigError, match="of 64.00 GiB with what exchanges and loading take"):
        plan(shape=MANY, gpu=LARGE, host=HostMemory(64 * GIB - 1))


def test_ranks_hold_all_experts_on_the_host_or_refuse() -> None:
    """Sizes are those of each rank: with half of the memory it has half of the slots' bytes."""
    config = ExpertConfig()
    assert plan_experts(SHAPE, config, GPU, HOST, ranks=2) == plan()
    assert plan(shape=MANY, gpu=LARGE).mode == "exclusive"
    with pytest.raises(ConfigError) as caught:
        plan_experts(MANY, config, LARGE, HOST, ranks=2)
    assert str(caught.value) == (
        "tensor_parallel_size=2: all experts have 512.00 GiB, and host memory has room for 128.00 "
        "GiB: several ranks need all of them there; take a checkpoint of fewer bits, or one GPU, "
        "which exchanges experts with the host"
    )
    with pytest.raises(ConfigError, match="^moe_expert_memory='auto': of each of 2 ranks: the exp"):
        plan_experts(SHAPE, config, GPU, HostMemory(usable=GIB), ranks=2)


def test_scales_stay_on_the_host_and_may_be_larger_in_the_bank() -> None:
    shape = ExpertShape(32, 8, GIB, kept_bytes=GIB // 16)
    found = plan(shape=shape, gpu=LARGE, host=HostMemory(100 * GIB))
    assert (found.mode, found.slots, found.places) == ("exclusive", 210, 62)
    assert found.host_bytes == 62 * (GIB * 15 // 16) + 256 * GIB // 16


@pytest.mark.parametrize(
    ("given_", "field", "words"),
    [
        ({"gpu": GpuMemory(8 * GIB, 6 * GIB, 2 * GIB, 4 * GIB)}, "gpu_memory_utilization",
         ["4.00 GiB too little", "6.00 GiB hold other weights", "max_num_seqs"]),
        ({"cpu_experts": "off"}, "moe_cpu_experts",
         ["experts have 32.00 GiB", "room for 28.00 GiB", "moe_cpu_experts='auto'"]),
        ({"bank_bytes": 30 * GIB}, "moe_expert_memory", ["room for 28.00 GiB"]),
        ({"bank_bytes": GIB - 1}, "moe_expert_memory", ["1024.0 MiB", "moe_cpu_experts='all'"]),
        ({"host": HostMemory(5 * GIB - 1)}, "moe_expert_memory",
         ["4.00 GiB of them would be in host memory", "host memory has 5.00 GiB", "fewer bits"]),
        ({"shape": MANY, "gpu": LARGE, "host": HostMemory(70 * GIB, 8 * GIB)}, "moe_expert_memory",
         ["8.00 GiB are for other parts", "cpu_prefill_memory_utilization"]),
        ({"shape": MANY, "gpu": LARGE, "bank_bytes": 2 * GIB, "host": HostMemory(64 * GIB)},
         "moe_expert_memory", ["254.00 GiB of them", "='auto' keeps up to 224.00 GiB"]),
        ({"shape": MANY, "gpu": LARGE, "cpu_experts": "all", "host": HostMemory(64 * GIB)},
         "moe_cpu_experts", ["256.00 GiB of them", "moe_cpu_experts='auto'"]),
    ],
)  # fmt: skip
def test_refusals(given_: dict[str, object], field: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        plan(**given_)  # type: ignore[arg-type]
    assert error.value.field == field
    for word in words:
        assert word in str(error.value)


@given(
    st.integers(1, 6), st.integers(1, 40), st.integers(1, 5), st.integers(-5, 400),
    st.integers(0, 400), st.one_of(st.none(), st.integers(1, 400)),
)  # fmt: skip
def test_a_plan_fits(
    layers: int, experts: int, each: int, room: int, host: int, bank: int | None
) -> None:
    shape = ExpertShape(layers, experts, each, kept_bytes=each // 3)
    gpu = GpuMemory(usable=max(room, 0), weights=0, step=0, kv=max(-room, 0))
    try:
        found = plan(shape=shape, gpu=gpu, host=HostMemory(host), bank_bytes=bank)
    except ConfigError:
        return
    assert found.slots * each <= found.resident_bytes <= room
    assert found.host_bytes <= host and 0 <= found.slots <= shape.count
    assert (found.mode == "resident") == (found.slots == shape.count) == (found.host_bytes == 0)
    if found.mode == "exclusive":
        assert shape.total_bytes > host and found.places + found.slots > shape.count
        assert found.slots * (each + each // 3) <= found.resident_bytes
        assert found.host_bytes + found.resident_bytes >= shape.total_bytes
    if bank is None and found.mode != "exclusive":  # not one more fits
        assert found.slots == shape.count or found.resident_bytes + each > room
