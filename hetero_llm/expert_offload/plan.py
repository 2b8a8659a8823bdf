"""How many experts of a mixture the GPU's bank holds, and what host memory has to hold.

Plain arithmetic: the caller measures memory. Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetero_llm.config.expert_config import ExpertConfig
from hetero_llm.core.errors import ConfigError

Mode = Literal["inclusive", "exclusive", "resident"]

RANKS = "tensor_parallel_size"
MEMORY, CPU, UTILIZATION = "moe_expert_memory", "moe_cpu_experts", "gpu_memory_utilization"
_GIB = 1 << 30
MOST_SPARES = 16
"""Free places of host memory in exclusive mode, at most: exchanges at once. One takes some five
steps, and the budget of promotions has two to three of Qwen3-235B-A22B's experts a step."""


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How a weight matrix [N, K] of an expert is stored, as `bridge.host_experts.HostMatrices`.

    Attributes:
        bits: of one element: 32, 16, 8 or 4.
        group: columns that share a scale; 0: a scale for a whole row, or none (`scale_bytes` 0).
        scale_rows: rows that share a scale.
        scale_bytes: of one scale, with the zero point or offset that belongs to it.
        row_bytes: of what each row has besides: a scale of its own, a bias.
    """

    bits: int
    group: int = 0
    scale_rows: int = 1
    scale_bytes: int = 0
    row_bytes: int = 0

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of one matrix with its scales."""
        groups = -(-columns // self.group) if self.group else 1
        scales = -(-rows // self.scale_rows) * groups * self.scale_bytes
        return rows * -(-columns * self.bits // 8) + scales + rows * self.row_bytes


def expert_bytes(hidden: int, inner: int, form: WeightForm) -> int:
    """Bytes of one expert: gate and up [2 * inner, hidden] and down [hidden, inner]."""
    return form.matrix_bytes(2 * inner, hidden) + form.matrix_bytes(hidden, inner)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of a model, all of one size.

    Attributes:
        num_layers: layers that have experts.
        num_experts: of each of them.
        expert_bytes: of one: `bridge.host_experts.HostExperts.expert_bytes`, or before there is
            any, the function of this name.
        kept_bytes: of them, scales and biases, which host memory holds of all experts.
    """

    num_layers: int
    num_experts: int
    expert_bytes: int
    kept_bytes: int = 0

    @property
    def count(self) -> int:
        """Experts of all layers."""
        return self.num_layers * self.num_experts

    @property
    def total_bytes(self) -> int:
        """Of all experts."""
        return self.count * self.expert_bytes


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The GPU's memory, without experts.

    Attributes:
        usable: what the process may use in all.
        weights: everything else of the model, and what else is on the GPU.
        step: the largest step with the runner's buffers, those that stream experts included.
        kv: what the KV cache needs at least: the caller decides how many sequences that is.
    """

    usable: int
    weights: int
    step: int
    kv: int

    @property
    def room(self) -> int:
        """Bytes left for experts; negative if even the rest does not fit."""
        return self.usable - self.weights - self.step - self.kv

    def __str__(self) -> str:
        return (
            f"of {_gib(self.usable)} of the GPU, {_gib(self.weights)} hold other weights, "
            f"{_gib(self.step)} the largest step and {_gib(self.kv)} the KV cache"
        )


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory that can be page-locked.

    Attributes:
        usable: available within all limits, less what other programs keep.
        reserved: of that, what other parts of the engine are going to take, such as the pool of
            `enable_prefix_cache_offload`.
    """

    usable: int
    reserved: int = 0

    @property
    def room(self) -> int:
        """Bytes left for experts; negative if even the rest does not fit."""
        return self.usable - self.reserved

    def __str__(self) -> str:
        taken = f", of which {_gib(self.reserved)} are for other parts" if self.reserved else ""
        return f"host memory has {_gib(self.usable)}{taken}"


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Where the experts are.

    Attributes:
        mode: "resident": all are in the bank and host memory holds none. "inclusive": host memory
            holds all, the bank copies of some. "exclusive": each is in one place, and a promotion
            exchanges two.
        slots: of the bank, each for one expert of any layer.
        resident_bytes: of the bank.
        host_bytes: that host memory holds.
        places: of host memory in exclusive mode, those free for exchanges included; else 0.
    """

    mode: Mode
    slots: int
    resident_bytes: int
    host_bytes: int
    places: int = 0

    def __str__(self) -> str:
        where = f"{self.slots} experts on the GPU ({_gib(self.resident_bytes)})"
        if self.mode == "resident":
            return f"all {where}"
        held = "all experts" if self.mode == "inclusive" else "the others"
        return f"{where}, {held} in host memory ({_gib(self.host_bytes)}, {self.mode})"


def plan_experts(
    shape: ExpertShape, config: ExpertConfig, gpu: GpuMemory, host: HostMemory, *, ranks: int = 1
) -> ExpertPlan:
    """Fits the experts into the GPU's bank and host memory: of one rank, if several share layers.

    All of them are resident if the GPU has room beside the KV cache; else the bank is as large as
    possible, or as large as `config` says. Host memory holds all experts where it can, since a
    promotion then copies in one direction only.

    Args:
        shape, gpu, host: of each rank; slices of all experts, its GPU, its share of host memory.
        ranks: how many there are. Several do not exchange experts with the host, which holds all.

    Raises:
        ConfigError: the experts do not fit at all, or not as the arguments say; names the argument
            to change.
    """
    if ranks > 1:
        return _plan_of_rank(shape, config, gpu, host, ranks)
    room = gpu.room
    if room < 0:
        wanted = _gib(-room)
        reason = (
            f"{wanted} too little before the first expert: {gpu}; raise it, or lower max_num_seqs"
        )
        raise ConfigError(UTILIZATION, _gib(gpu.usable), f"{reason} or max_model_len")
    slots = _slots(shape, config, gpu)
    if slots == shape.count:
        return ExpertPlan("resident", slots, shape.total_bytes, 0)
    if shape.total_bytes <= host.room:
        return ExpertPlan("inclusive", slots, slots * shape.expert_bytes, shape.total_bytes)
    found = _exclusive(shape, slots)
    if found.slots and found.host_bytes + loading_bytes(shape) <= host.room:
        return found
    raise _no_host_room(shape, config, gpu, host, slots)


def _plan_of_rank(
    shape: ExpertShape, config: ExpertConfig, gpu: GpuMemory, host: HostMemory, ranks: int
) -> ExpertPlan:
    try:
        plan = plan_experts(shape, config, gpu, host)
    except ConfigError as error:
        reason = f"of each of {ranks} ranks: {error.reason}"
        raise ConfigError(error.field, error.value, reason) from error
    if plan.mode == "exclusive":
        reason = (
            f"all experts have {_gib(ranks * shape.total_bytes)}, and host memory has room for "
            f"{_gib(ranks * host.room)}: several ranks need all of them there; take a checkpoint "
            "of fewer bits, or one GPU, which exchanges experts with the host"
        )
        raise ConfigError(RANKS, ranks, reason)
    return plan


def loading_bytes(shape: ExpertShape) -> int:
    """Of host memory, while weights are loaded in exclusive mode: a layer is read as a whole, and
    files may begin the next one before its last tensor."""
    return 2 * shape.num_experts * shape.expert_bytes


def _exclusive(shape: ExpertShape, slots: int) -> ExpertPlan:
    """With a bank as large as `slots` experts as stored. Kernels may have scales in twice the
    bytes, and the content of the bank is chosen before that is known."""
    resident = slots * shape.expert_bytes
    slots = resident // (shape.expert_bytes + shape.kept_bytes)
    # An expert that leaves is copied to a free place before its slot is written.
    places = shape.count - slots + min(MOST_SPARES, slots)
    data = shape.expert_bytes - shape.kept_bytes
    held = places * data + shape.count * shape.kept_bytes
    return ExpertPlan("exclusive", slots, resident, held, places)


def _slots(shape: ExpertShape, config: ExpertConfig, gpu: GpuMemory) -> int:
    """Slots of the bank."""
    each, total, room = shape.expert_bytes, shape.total_bytes, gpu.room
    if config.cpu_experts == "all":
        return 0
    if config.cpu_experts == "off":
        if total > room:
            reason = (
                f"the experts have {_gib(total)} and the GPU has room for {_gib(room)}: {gpu}; "
                f"{CPU}='auto' keeps the others in host memory"
            )
            raise ConfigError(CPU, "off", reason)
        return shape.count
    if config.bank_bytes is None:
        return min(shape.count, room // each)
    if config.bank_bytes < each:
        reason = f"one expert has {_mib(each)}; {CPU}='all' keeps none on the GPU"
        raise ConfigError(MEMORY, config.bank_bytes / _GIB, reason)
    slots = min(shape.count, config.bank_bytes // each)
    if slots * each > room:
        reason = f"the GPU has room for {_gib(room)} of experts: {gpu}"
        raise ConfigError(MEMORY, config.bank_bytes / _GIB, reason)
    return slots


def _no_host_room(
    shape: ExpertShape, config: ExpertConfig, gpu: GpuMemory, host: HostMemory, slots: int
) -> ConfigError:
    """The error of too little host memory. Names the argument that frees most."""
    each = shape.expert_bytes
    most = min(shape.count, gpu.room // each)
    outside = shape.total_bytes - slots * each
    figures = (
        f"the experts have {_gib(shape.total_bytes)}, {_gib(outside)} of them would be in host "
        f"memory, and {host}"
    )
    least = 0
    if most < shape.count:
        least = _exclusive(shape, most).host_bytes + loading_bytes(shape)
    if least <= host.room:
        advice = f"{MEMORY}='auto' keeps up to {_gib(most * each)} on the GPU"
        if config.cpu_experts == "all":
            return ConfigError(CPU, "all", f"{figures}; {CPU}='auto' with {advice}")
        assert config.bank_bytes is not None
        return ConfigError(MEMORY, config.bank_bytes / _GIB, f"{figures}; {advice}")
    short = least - host.room
    advice = (
        f"neither holds them, {_gib(short)} are missing even with the largest bank ({gpu}), of "
        f"{_gib(least)} with what exchanges and loading take"
    )
    if host.reserved >= short:
        advice += "; a lower cpu_prefill_memory_utilization frees enough"
    else:
        advice += "; take a checkpoint of fewer bits, or quantization='int4'"
    value = "auto" if config.bank_bytes is None else config.bank_bytes / _GIB
    return ConfigError(MEMORY, value, f"{figures}; {advice}")


def _gib(count: int) -> str:
    return f"{count / _GIB:.2f} GiB"


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
