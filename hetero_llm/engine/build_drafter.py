"""Makes the drafter that the configuration asks for, and opens the lookahead cache's store."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import psutil

from hetero_llm.config.engine_config import SpeculationConfig
from hetero_llm.config.lookahead_config import LookaheadConfig, lookahead_config
from hetero_llm.core.drafter import Drafter
from hetero_llm.core.errors import ConfigError, SnapshotError
from hetero_llm.engine.tokenizer import Tokenizer
from hetero_llm.kv_cache.prefix_cache import hash_root
from hetero_llm.models.config import ModelConfig

if TYPE_CHECKING:
    from hetero_llm.spec_decode.draft_model.proposer import DraftModelProposer
    from hetero_llm.spec_decode.lookahead.snapshot import SnapshotRequirements
    from hetero_llm.spec_decode.lookahead.store import Store

BYTES_PER_TOKEN = 110
"""Of the global cache: 4 of text, about 70 of trie and 10 to 32 of n-grams on source code."""
MOST_TOKENS = 64 << 20
"""Of a cache sized by memory: more would be hash walks through slow memory for no more hits."""


def make_drafter(
    speculation: SpeculationConfig | None,
    model: ModelConfig,
    max_model_len: int,
    tokenizer: Tokenizer | None = None,
    proposer: DraftModelProposer | None = None,
) -> tuple[Drafter | None, Store | None]:
    """None without speculation; a store with the lookahead cache only, whose warm-up has begun.

    Args:
        proposer: of a draft model whose worker is up.

    Raises:
        ConfigError: something that is not available yet, or a warm-up file that does not belong
            to this model.
    """
    if speculation is None:
        return None, None
    if speculation.method == "ngram":
        from hetero_llm.spec_decode.ngram.drafter import PromptLookupDrafter

        assert speculation.num_speculative_tokens is not None
        drafter = PromptLookupDrafter(
            width=max_model_len,
            smallest=speculation.prompt_lookup_min,
            largest=speculation.prompt_lookup_max,
            num_tokens=speculation.num_speculative_tokens,
            most_sequences=speculation.most_sequences,
        )
        return drafter, None
    if speculation.lookahead is not None:
        return _lookahead(speculation, model, max_model_len, tokenizer, proposer)
    if proposer is None:
        return None, None
    return _model_alone(speculation, model, max_model_len, proposer), None


def fit_to_model(
    config: LookaheadConfig, model: ModelConfig, max_model_len: int
) -> LookaheadConfig:
    """With what the configuration leaves to the model filled in."""
    return dataclasses.replace(
        config,
        voc_size=min(config.voc_size, model.vocab_size),
        max_seq_len=min(config.max_seq_len or max_model_len, max_model_len),
        eos_token_id=config.eos_token_id or tuple(model.eos_token_ids),
    )


def requirements_for(
    config: LookaheadConfig, memory_utilization: float, tokenizer: Tokenizer | None
) -> SnapshotRequirements:
    """What the global cache of a configuration from `fit_to_model` may learn, and how much."""
    from hetero_llm.spec_decode.lookahead.snapshot import SnapshotRequirements

    capacity = 0
    if config.global_cache_switch:
        share = memory_utilization * psutil.virtual_memory().total / BYTES_PER_TOKEN
        capacity = config.cache_size or min(int(share), MOST_TOKENS)
    assert config.eos_token_id is not None
    fingerprint = _no_tokenizer if tokenizer is None else tokenizer.fingerprint
    return SnapshotRequirements(fingerprint, config.voc_size, config.eos_token_id, capacity)


def _no_tokenizer() -> str:
    return "none"


def _lookahead(
    speculation: SpeculationConfig,
    model: ModelConfig,
    max_model_len: int,
    tokenizer: Tokenizer | None,
    proposer: DraftModelProposer | None,
) -> tuple[Drafter, Store]:
    from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
    from hetero_llm.spec_decode.lookahead.sequence_state import namespace_salt
    from hetero_llm.spec_decode.lookahead.store import Store

    assert speculation.lookahead is not None
    config = fit_to_model(speculation.lookahead, model, max_model_len)
    requirements = requirements_for(config, speculation.memory_utilization, tokenizer)
    drafter = HybridDrafter(
        config, width=max_model_len, capacity=requirements.capacity, model=proposer,
        most_sequences=speculation.most_sequences,
    )  # fmt: skip
    store = Store(drafter.global_cache, requirements)
    if config.warmup_file is not None:
        try:
            store.warm_up(
                config.warmup_file,
                namespace=namespace_salt(hash_root()),
                ignore_prompt=config.ignore_prompt,
            )
        except (SnapshotError, ValueError) as error:
            reason = getattr(error, "reason", str(error))
            raise ConfigError("warmup_file", config.warmup_file, reason) from None
    return drafter, store


def _model_alone(
    speculation: SpeculationConfig,
    model: ModelConfig,
    max_model_len: int,
    proposer: DraftModelProposer,
) -> Drafter:
    """Drafts of the model without any cache."""
    from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter

    return HybridDrafter(
        fit_to_model(lookahead_config({}), model, max_model_len),
        width=max_model_len,
        capacity=0,
        uses_cache=False,
        model=proposer,
        most_sequences=speculation.most_sequences,
    )
