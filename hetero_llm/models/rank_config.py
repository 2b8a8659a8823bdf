"""The configuration of one rank's part of a model, for tensor and pipeline parallelism. No torch.

Layers go to stages in whole ranges. Within a stage queries are cut by heads, keys and values by KV
heads, which are repeated where there are fewer of them than ranks, MLPs and experts by their inner
size, the head by the vocabulary ("Megatron-LM", Shoeybi et al. 2019). `sharding.py` says what that
means for the parameters of a model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetero_llm.core.errors import ConfigError
from hetero_llm.models.collectives import Rank
from hetero_llm.models.config import ModelConfig

FIELD = "tensor_parallel_size"
STAGES_FIELD = "pipeline_parallel_size"
"""The arguments that errors name."""

_PER_LAYER = ("sliding_windows", "sparse_layers")
"""Fields of a configuration that have an entry for each layer."""


def head_rows(vocab_size: int, rank: Rank) -> tuple[int, int]:
    """The first row of the head that a rank has, and how many: all ranks have as many, but for the
    last ones where the vocabulary leaves a rest."""
    each = -(-vocab_size // rank.size)
    first = min(rank.index * each, vocab_size)
    return first, min(each, vocab_size - first)


def first_kv_head(config: ModelConfig, rank: Rank) -> int:
    """The first KV head of a rank. `config`: Of the whole model."""
    return rank.index * config.num_kv_heads // rank.size


def sharded_config(config: ModelConfig, rank: Rank) -> ModelConfig:
    """The configuration of one rank's part of a model: its heads and its inner sizes. Modules, the
    KV cache and attention are made with it.

    Args:
        config: Of the whole model.

    Raises:
        ConfigError: The model cannot be cut for as many ranks; see `sharding.check_ranks`.
    """
    config = stage_config(config, rank)
    if rank.size == 1:
        return config
    check_sizes(config, rank.size)
    heads = config.num_heads // rank.size
    first = rank.index * heads
    slopes = config.alibi_slopes
    changes: dict[str, Any] = {
        "rank": rank,
        "num_heads": heads,
        "num_kv_heads": max(1, config.num_kv_heads // rank.size),
        "alibi_slopes": None if slopes is None else slopes[first : first + heads],
    }
    changes |= {name: size // rank.size for name, size in inner_sizes(config).items()}
    return replace(config, **changes)


def stage_config(config: ModelConfig, rank: Rank) -> ModelConfig:
    """The configuration of one stage of a model, of which a single rank has all.

    Args:
        config: Of the whole model.

    Raises:
        ConfigError: There are fewer layers than stages.
    """
    assert config.rank.is_whole, "already a rank's"
    if rank.stages == 1:
        return config
    check_stages(config, rank.stages)
    first, count = stage_layers(config.num_layers, rank)
    changes: dict[str, Any] = {
        "rank": replace(rank, index=0, size=1),
        "first_layer": first,
        "num_layers": count,
    }
    for name in _PER_LAYER:
        values: tuple[Any, ...] | None = getattr(config, name, None)
        if values is not None:
            changes[name] = values[first : first + count]
    return replace(config, **changes)


def stage_layers(num_layers: int, rank: Rank) -> tuple[int, int]:
    """The first layer of a stage, and how many it has: where the stages leave a rest, the first
    ones have one more, since the last one has the head besides."""
    each, more = divmod(num_layers, rank.stages)
    return rank.stage * each + min(rank.stage, more), each + (rank.stage < more)


def check_stages(config: ModelConfig, stages: int) -> None:
    """Raises ConfigError: a stage would have no layer."""
    if stages > config.num_layers:
        reason = f"the model has {config.num_layers} layers, and each stage needs one"
        raise ConfigError(STAGES_FIELD, stages, reason)


def inner_sizes(config: ModelConfig) -> dict[str, int]:
    """The inner sizes that layers of a model have, by the field of its configuration."""
    sizes: dict[str, int] = {}
    expert_size: int | None = getattr(config, "expert_size", None)
    if expert_size is None or not all(getattr(config, "sparse_layers", (True,))):
        sizes["intermediate_size"] = config.intermediate_size
    if expert_size is not None:
        sizes["expert_size"] = expert_size
    shared: int | None = getattr(config, "shared_expert_size", None)
    if shared is not None:
        sizes["shared_expert_size"] = shared
    return sizes


def check_sizes(config: ModelConfig, size: int) -> None:
    """Raises ConfigError: of heads, KV heads, an inner size or the vocabulary each rank would not
    have a part, or another number than the others."""
    if config.num_heads % size:
        reason = f"does not divide the {config.num_heads} attention heads"
        raise ConfigError(FIELD, size, reason)
    kv_heads = config.num_kv_heads
    if kv_heads % size and size % kv_heads:
        reason = f"neither divides the {kv_heads} KV heads nor is a multiple of them"
        raise ConfigError(FIELD, size, reason)
    for name, inner in inner_sizes(config).items():
        if inner % size:
            raise ConfigError(FIELD, size, f"does not divide {name}={inner}")
    if head_rows(config.vocab_size, Rank(size - 1, size))[1] == 0:
        reason = f"leaves a rank without a token of the {config.vocab_size} of the vocabulary"
        raise ConfigError(FIELD, size, reason)
