"""What a model needs, and how fast it would be here: `hetero-llm doctor MODEL`.

From config.json alone. A step reads each weight that it uses once, so its time is bytes over
rates: on the GPU those of attention, dense layers, head and resident experts, on the CPU those of
the other experts, at the same time. No weights are needed: modules are made on torch's "meta"
device, which has shapes and no memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_llm.commands.machine_rates import Rates
from hetero_llm.config.expert_config import ExpertConfig
from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.expert_offload.plan import (
    RANKS,
    ExpertPlan,
    ExpertShape,
    GpuMemory,
    HostMemory,
    WeightForm,
    expert_bytes,
    plan_experts,
)

if TYPE_CHECKING:
    from hetero_llm.models.config import ModelConfig

_GIB = 1 << 30
_ELEMENT = 2  # bytes of a plain weight: 'auto' serves 32 bits as bfloat16, too
_PLAIN = WeightForm(8 * _ELEMENT)
_STEP_BYTES = 2 * _GIB
_UTILIZATION = 0.9
_HANDOVER_S, _LAYER_S = 16e-6, 15e-6
_SUMS_S = 4e-6
"""Of a layer that several GPUs share: two sums, each with the norm behind it 1.8 us longer than
that norm alone (`bench.kernels.collectives`, two H200)."""
_CONTEXT = 1024
BATCHES = (1, 8)

_LOCAL_HITS = ((0.0, 0.0), (0.125, 0.45), (0.25, 0.62), (0.5, 0.82), (0.75, 0.95), (1.0, 1.0))
"""Share of the experts that the bank holds -> share of the uses at batch 1, where use is local:
below what was reported of LRU caches (67% of an eighth, 81% of a quarter)."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes of a model in memory, biases and scales included; of the part of each GPU, if several
    share its layers.

    Attributes:
        experts: of the routed ones; None: the model has none.
        per_token: experts that a token uses.
        layers: all of them.
        read: what each step reads besides routed experts: attention, dense layers, head.
        unread: the embedding, of which a step reads a few rows, unless it is the head as well.
        kv_token: of the KV cache, for a token in all layers.
        note: how the weights are stored.
        ranks: GPUs that share the layers.
    """

    experts: ExpertShape | None
    per_token: int
    layers: int
    read: int
    unread: int
    kv_token: int
    note: str
    ranks: int = 1

    @property
    def weights(self) -> int:
        """All weights."""
        return self.read + self.unread + (self.experts.total_bytes if self.experts else 0)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of all sequences together. `uniform`: all experts are used alike."""

    batch: int
    local: float
    uniform: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What would happen to a model on a machine.

    Attributes:
        where: in words.
        plan: of the experts; None for dense models and without a GPU.
        speeds: empty if it does not fit.
        problem: why it does not fit, or empty.
    """

    where: str
    plan: ExpertPlan | None
    speeds: tuple[Speed, ...]
    problem: str = ""


def read_sizes(model: str, *, quantization: str | None = None, ranks: int = 1) -> ModelSizes:
    """Sizes of a model of a folder, a config.json or a hub id, of which that file alone is fetched.

    Args:
        ranks: GPUs that share its layers; the sizes are of the largest part.

    Raises:
        ModelLoadError: there is none, or the model is not supported.
        ConfigError: `quantization` does not go with it, or as many GPUs cannot share it.
    """
    from hetero_llm.models.folders import download_snapshot, is_hub_id

    path = Path(model).expanduser()
    if path.is_dir():
        return _sizes_of(path, quantization, ranks)
    if path.is_file():
        with tempfile.TemporaryDirectory() as folder:
            _copy_config(path, Path(folder) / "config.json")
            return _sizes_of(Path(folder), quantization, ranks)
    if not is_hub_id(model):
        raise ModelLoadError(f"model={model!r}: no such folder or file")
    try:
        return _sizes_of(download_snapshot(model, ("config.json",)), quantization, ranks)
    except ModelLoadError as error:
        raise ModelLoadError(f"model={model!r}: no such folder, and {error}") from error


def _copy_config(path: Path, to: Path) -> None:
    import json

    from hetero_llm.models.config_reader import read_json

    to.write_text(json.dumps(dict(read_json(path))), "utf-8")


def _sizes_of(folder: Path, quantization: str | None, ranks: int) -> ModelSizes:
    import torch

    from hetero_llm.models.collectives import Rank
    from hetero_llm.models.experts import Experts, Router
    from hetero_llm.models.layers import Embedding, Linear
    from hetero_llm.models.read_config import load_model_config
    from hetero_llm.models.registry import model_class
    from hetero_llm.models.sharding import check_ranks, sharded_config

    config = load_model_config(folder, quantization=quantization)
    check_ranks(config, ranks)
    config = sharded_config(config, Rank(0, ranks))
    form, linear, note = weight_forms(config)
    with torch.device("meta"):
        model: Any = model_class(config.architecture)(config)
    kept = {id(model.lm_head)}  # modules that stay plain
    for module in model.modules():
        if isinstance(module, Router):
            kept |= {id(part) for part in module.modules()}
    shapes, embedding, read = [], 0, 0
    for module in model.modules():
        if isinstance(module, Experts):
            shapes.append((module.gate_up.shape, any(x.dim() == 2 for x in module.parameters())))
        elif isinstance(module, Embedding):
            embedding += module.weight.numel() * _ELEMENT
        elif isinstance(module, Linear) and id(module) not in kept:
            rows, columns = module.weight.shape
            bias = 0 if module.bias is None else module.bias.numel() * _ELEMENT
            read += linear.matrix_bytes(rows, columns) + bias
        else:
            read += sum(one.numel() for one in module.parameters(recurse=False)) * _ELEMENT
    return ModelSizes(
        experts=_expert_shape(shapes, form),
        per_token=getattr(config, "experts_per_token", 0),
        layers=config.num_layers,
        read=read,
        unread=0 if config.tie_word_embeddings else embedding,  # the head is counted
        kv_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * _ELEMENT,
        note=note,
        ranks=ranks,
    )


def _expert_shape(shapes: list[tuple[Any, bool]], form: WeightForm) -> ExpertShape | None:
    if not shapes:
        return None
    (count, rows, hidden), biases = shapes[0]
    each = expert_bytes(hidden, rows // 2, form) + biases * (rows + hidden) * _ELEMENT
    numbers = 3 * hidden * (rows // 2) * form.bits // 8
    return ExpertShape(len(shapes), count, each, max(each - numbers, 0))


_BY_ROW = WeightForm(8, scale_bytes=4)
_BY_BLOCK = WeightForm(8, 128, 128, 4)
_ONLINE = {
    "fp8": _BY_ROW, "fp8_block": _BY_BLOCK, "ifq": _BY_ROW,
    "ifq_nf4": WeightForm(4, 64, 1, 2), "int4": WeightForm(4, 128, 1, 3),
}  # fmt: skip


def weight_forms(config: ModelConfig) -> tuple[WeightForm, WeightForm, str]:
    """How experts and other matrices are stored in memory, and that in words; the head, routers and
    embeddings are plain."""
    if config.online_quantization is not None:
        form = _ONLINE[config.online_quantization]
        return form, form, f"quantization={config.online_quantization}"
    stored = config.quantization
    if stored is None:
        return _PLAIN, _PLAIN, "16 bits"
    method = str(stored.get("quant_method"))
    if method == "mxfp4":
        return WeightForm(4, 32, 1, 2), _PLAIN, "experts in MXFP4, all else in 16 bits"
    form_or_none = _stored_form(method, stored)
    if form_or_none is None:
        return _PLAIN, _PLAIN, f"format {method!r} is not known here: taken for 16 bits"
    return form_or_none, form_or_none, f"{form_or_none.bits} bits ({method})"


def _stored_form(method: str, stored: Mapping[str, Any]) -> WeightForm | None:
    """The form of a checkpoint's matrices; None: unknown."""
    if method == "fp8":
        return _BY_BLOCK if stored.get("weight_block_size") else _BY_ROW
    if method == "fbgemm_fp8":
        return _BY_ROW
    if method == "bitsandbytes":
        return _ONLINE["ifq_nf4"] if stored.get("load_in_4bit") else _BY_ROW
    if method in ("gptq", "awq", "auto-round"):
        bits, group = stored.get("bits", 4), stored.get("group_size", 128)
        return _grouped(bits, group, 3)
    if method == "compressed-tensors":
        groups = stored.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
        weights = first.get("weights") if isinstance(first, Mapping) else None
        if not isinstance(weights, Mapping):
            return None
        if weights.get("block_structure"):
            return _BY_BLOCK
        return _grouped(weights.get("num_bits"), weights.get("group_size"), 2)
    if method.startswith("modelopt"):
        return WeightForm(4, 16, 1, 1) if "FP4" in str(stored).upper() else _BY_ROW
    return None


def _grouped(bits: object, group: object, scale_bytes: int) -> WeightForm | None:
    if bits not in (4, 8):
        return None
    columns = group if isinstance(group, int) and group > 0 else 0
    return WeightForm(4 if bits == 4 else 8, columns, 1, scale_bytes)


def predict(sizes: ModelSizes, rates: Rates, config: ExpertConfig | None = None) -> Prediction:
    """Places a model on a machine and predicts its decode speed.

    Args:
        rates: of the whole machine, and of one of its GPUs.

    Raises:
        ConfigError: several GPUs are to share it, and there is none.
    """
    kv = max(BATCHES) * 4 * _CONTEXT * sizes.kv_token
    if sizes.ranks > 1 and not rates.gpu_bytes:
        raise ConfigError(RANKS, sizes.ranks, "predictions of several ranks need GPUs")
    if not rates.gpu_bytes:
        short = sizes.weights + kv - rates.host_bytes
        if short > 0:
            need = f"{gib(sizes.weights)} of weights and {gib(kv)} of KV cache"
            return Prediction("no GPU", None, (), f"{need}: {gib(short)} more than host memory has")
        return Prediction("on the CPU alone", None, _speeds(sizes, rates, 0.0))
    gpu = GpuMemory(int(rates.gpu_bytes * _UTILIZATION), sizes.read + sizes.unread, _STEP_BYTES, kv)
    if sizes.experts is None:
        if gpu.room < 0:
            reason = f"{gib(-gpu.room)} too much: {gpu}; quantization='int4' or 'fp8' makes it less"
            return Prediction("on the GPU", None, (), reason)
        return Prediction("all on the GPU", None, _speeds(sizes, rates, 1.0))
    ranks, host = sizes.ranks, HostMemory(rates.host_bytes // sizes.ranks)
    try:
        plan = plan_experts(sizes.experts, config or ExpertConfig(), gpu, host, ranks=ranks)
    except ConfigError as error:
        return Prediction("neither GPU nor host memory", None, (), str(error))
    share = plan.slots / sizes.experts.count
    where = "all on the GPU" if plan.mode == "resident" else "experts on the CPU beside the GPU"
    return Prediction(where, plan, _speeds(sizes, rates, share))


def _speeds(sizes: ModelSizes, rates: Rates, share: float) -> tuple[Speed, ...]:
    return tuple(
        Speed(
            batch,
            batch / step_seconds(sizes, rates, batch, _local_hit(share, batch)),
            batch / step_seconds(sizes, rates, batch, share),
        )
        for batch in BATCHES
    )


def _local_hit(share: float, batch: int) -> float:
    """Uses that the bank holds. More sequences have less in common."""
    low = max(i for i, (x, _) in enumerate(_LOCAL_HITS) if x <= share)
    high = min(low + 1, len(_LOCAL_HITS) - 1)
    (x, hit), (end, next_hit) = _LOCAL_HITS[low], _LOCAL_HITS[high]
    if end > x:
        hit += (next_hit - hit) * (share - x) / (end - x)
    return hit if batch == 1 else (hit + share) / 2


def step_seconds(sizes: ModelSizes, rates: Rates, batch: int, hit: float) -> float:
    """A decode step of `batch` sequences behind 1,024 tokens each.

    Args:
        hit: share of the experts in use that are resident.
    """
    read = sizes.read + batch * _CONTEXT * sizes.kv_token
    if not rates.gpu_bytes:
        return (read + _experts_read(sizes, batch)) / rates.dram
    used = _experts_read(sizes, batch)
    seconds = read / rates.gpu + sizes.layers * _LAYER_S
    if sizes.ranks > 1:
        seconds += sizes.layers * _SUMS_S
    missed = used * (1.0 - hit)
    if sizes.experts is None or not missed:
        return seconds + used / rates.gpu
    # Each rank's threads read their slices with a share of the cores.
    on_gpu, on_cpu = (used - missed) / rates.gpu, sizes.ranks * missed / rates.dram
    return seconds + max(on_gpu, on_cpu) + sizes.experts.num_layers * _HANDOVER_S


def _experts_read(sizes: ModelSizes, batch: int) -> float:
    """Bytes of the different experts of a step, if each token chooses on its own."""
    shape = sizes.experts
    if shape is None:
        return 0.0
    used = shape.num_experts * (1.0 - (1.0 - sizes.per_token / shape.num_experts) ** batch)
    return shape.num_layers * used * shape.expert_bytes


def assumptions() -> list[str]:
    """What a prediction takes for granted."""
    return [
        f"gpu_memory_utilization {_UTILIZATION}, {_STEP_BYTES // _GIB} GiB for the largest step, "
        f"KV cache of {max(BATCHES)} sequences of {4 * _CONTEXT} tokens in 16 bits",
        f"decoding behind {_CONTEXT} tokens, each weight in use read once a step at the rates "
        "above; no drafts",
        f"{_LAYER_S * 1e6:.0f} us a layer for launches, {_HANDOVER_S * 1e6:.0f} us for the "
        "hand-over of a layer with experts on the CPU",
        "tokens choose experts independently; 'local': the bank holds 62% of the uses with a "
        "quarter of the experts, 82% with half, and half of that advantage with more sequences; "
        "'uniform': no more than its share, the worst case",
        "a host with enough cores: bytes, not arithmetic, are the limit; GPUs that share layers "
        f"divide its cores and memory, and take {_SUMS_S * 1e6:.0f} us a layer for sums",
    ]


def gib(count: float) -> str:
    """For people."""
    return f"{count / _GIB:.2f} GiB"
