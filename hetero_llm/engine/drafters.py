"""Makes the drafter that the configuration asks for."""

from __future__ import annotations

import dataclasses

import psutil

from hetero_llm.core.config import SpeculationConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.core.lookahead_config import LookaheadConfig
from hetero_llm.engine.drafting import Drafter
from hetero_llm.models.config import ModelConfig

BYTES_PER_TOKEN = 110
"""Of the global cache: 4 of text, about 70 of trie and 10 to 32 of n-grams on source code."""
MOST_TOKENS = 64 << 20
"""Of a cache sized by memory: more would be hash walks through slow memory for no more hits."""


def make_drafter(
    speculation: SpeculationConfig | None, model: ModelConfig, max_model_len: int
) -> Drafter | None:
    """None without speculation.

    Raises:
        ConfigError: something that is not available yet.
    """
    if speculation is None:
        return None
    if speculation.method == "ngram":
        from hetero_llm.cpu.lookahead.prompt_lookup_drafter import PromptLookupDrafter

        assert speculation.num_speculative_tokens is not None
        return PromptLookupDrafter(
            width=max_model_len,
            smallest=speculation.prompt_lookup_min,
            largest=speculation.prompt_lookup_max,
            num_tokens=speculation.num_speculative_tokens,
        )
    assert speculation.lookahead is not None
    return _lookahead(speculation.lookahead, speculation.memory_utilization, model, max_model_len)


def _lookahead(
    config: LookaheadConfig, memory_utilization: float, model: ModelConfig, max_model_len: int
) -> Drafter:
    from hetero_llm.cpu.lookahead.drafter import LookaheadDrafter

    if config.cache_mode == 3:
        raise ConfigError("cache_mode", 3, "merged trees are not available yet; use 0, 1 or 2")
    if config.warmup_file is not None:
        raise ConfigError("warmup_file", config.warmup_file, "is not available yet")
    config = dataclasses.replace(
        config,
        voc_size=min(config.voc_size, model.vocab_size),
        max_seq_len=min(config.max_seq_len or max_model_len, max_model_len),
        eos_token_id=config.eos_token_id or tuple(model.eos_token_ids),
    )
    capacity = 0
    if config.global_cache_switch:
        share = memory_utilization * psutil.virtual_memory().total / BYTES_PER_TOKEN
        capacity = config.cache_size or min(int(share), MOST_TOKENS)
    return LookaheadDrafter(config, width=max_model_len, capacity=capacity)
