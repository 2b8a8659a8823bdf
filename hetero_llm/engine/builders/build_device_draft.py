"""A draft model on the target's device: its limits, its KV blocks and its drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetero_llm.config.draft_model_config import DraftModelConfig
from hetero_llm.config.engine_config import EngineConfig, SchedulerConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.core.model_runner import ModelRunner
from hetero_llm.models.config import ModelConfig
from hetero_llm.spec_decode.draft_model.on_device import ChainDrafter

if TYPE_CHECKING:
    from hetero_llm.runner.kv_cache import KVCacheShape

_MOST_ROWS = 2048
"""Maximum tokens of a step of the draft model: running sequences wait for their drafts while a
prompt chunk is computed."""


@dataclass(frozen=True, slots=True)
class DeviceDraft:
    """A loaded draft model. See `ChainDrafter` for the attributes."""

    runner: ModelRunner[Any]
    limits: SchedulerConfig
    num_blocks: int
    num_tokens: int
    most_sequences: int | None

    def drafter(self) -> ChainDrafter:
        """A new drafter. Only one at a time may use the runner."""
        return ChainDrafter(
            self.runner,
            self.limits,
            self.num_blocks,
            num_tokens=self.num_tokens,
            most_sequences=self.most_sequences,
        )


def draft_limits(
    wanted: DraftModelConfig, model: ModelConfig, target: SchedulerConfig
) -> SchedulerConfig:
    """Limits of the draft model's steps and sequences.

    Args:
        model: configuration of the draft model.
        target: limits of the target.
    """
    longest = wanted.max_model_len or target.max_model_len
    return SchedulerConfig(
        max_num_seqs=target.max_num_seqs,
        max_num_batched_tokens=max(
            2 * target.max_num_seqs, min(target.max_num_batched_tokens, _MOST_ROWS)
        ),
        max_model_len=min(model.max_model_len, target.max_model_len, longest),
        enable_chunked_prefill=True,
        block_size=target.block_size,
    )


def count_blocks(
    config: EngineConfig,
    name: str,
    limits: SchedulerConfig,
    room: int,
    draft: KVCacheShape,
    target: KVCacheShape,
) -> int:
    """Number of KV blocks of the draft model: as many tokens as the target's cache will hold if
    both share `room` bytes, but no more than all sequences at full length.

    Args:
        name: name of the draft model, for the error.
        limits: limits of the draft model.
        room: bytes for both KV caches.
        draft, target: shapes of their blocks.

    Raises:
        ConfigError: there is no room for one sequence of full length.
    """
    needed = -(-limits.max_model_len // limits.block_size)
    most = needed * limits.max_num_seqs
    if config.cache.num_blocks is not None:
        return min(most, max(config.cache.num_blocks, needed))
    blocks = min(most, max(room, 0) // (draft.block_bytes + target.block_bytes))
    if blocks < needed:
        raise ConfigError(
            "gpu_memory_utilization",
            config.cache.memory_utilization,
            f"leaves {blocks} KV blocks for the draft model {name!r} beside the target, one "
            f"sequence of {limits.max_model_len} tokens needs {needed}; lower "
            "speculative_max_model_len or max_model_len, or raise gpu_memory_utilization",
        )
    return blocks
