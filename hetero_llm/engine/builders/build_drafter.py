"""Builds the configured drafter and opens the store of the lookahead cache."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import psutil

from hetero_llm.config.engine_config import SpeculationConfig
from hetero_llm.config.lookahead_config import LookaheadConfig, lookahead_config
from hetero_llm.core.drafter import Drafter
from hetero_llm.core.errors import ConfigError, SnapshotError
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.kv_cache.prefix_cache import hash_root
from hetero_llm.models.config import ModelConfig

if TYPE_CHECKING:
    from hetero_llm.spec_decode.draft_model.proposer import DraftModelProposer
    from hetero_llm.spec_decode.lookahead.snapshot import SnapshotRequirements
    from hetero_llm.spec_decode.lookahead.store import Store

BYTES_PER_TOKEN = 110
"""Memory of the global cache: 4 bytes of token ids, about 70 of suffix trie and, measured on source
code, 10 to 32 of n-grams."""
MOST_TOKENS = 64 << 20
"""Maximum size of a cache sized by memory: a larger one is slower and hits no more often."""


def make_drafter(
    speculation: SpeculationConfig | None,
    model: ModelConfig,
    max_model_len: int,
    tokenizer: Tokenizer | None = None,
    proposer: DraftModelProposer | None = None,
) -> tuple[Drafter | None, Store | None]:
    """Builds the drafter and, with a lookahead cache, its store, whose warm-up begins.

    Args:
        proposer: the proposer of a running draft worker; None without one.

    Returns:
        The drafter, None without speculation; the store, None without a lookahead cache.

    Raises:
        ConfigError: a feature is not available yet, or the warm-up file belongs to another model.
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
    """The configuration with the values that it leaves to the model filled in."""
    return dataclasses.replace(
        config,
        voc_size=min(config.voc_size, model.vocab_size),
        max_seq_len=min(config.max_seq_len or max_model_len, max_model_len),
        eos_token_id=config.eos_token_id or tuple(model.eos_token_ids),
    )


def requirements_for(
    config: LookaheadConfig, memory_utilization: float, tokenizer: Tokenizer | None
) -> SnapshotRequirements:
    """Requirements of the global cache on snapshots: tokenizer, vocabulary, end-of-text tokens, and
    capacity in tokens.

    Args:
        config: result of `fit_to_model`.
        memory_utilization: share of the host's memory for a cache without a configured size.
    """
    from hetero_llm.spec_decode.lookahead.snapshot import SnapshotRequirements

    capacity = 0
    if config.global_cache_switch:
        share = memory_utilization * psutil.virtual_memory().total / BYTES_PER_TOKEN
        capacity = config.cache_size or min(int(share), MOST_TOKENS)
    assert config.eos_token_id is not None
    fingerprint = (lambda: "none") if tokenizer is None else tokenizer.fingerprint
    return SnapshotRequirements(fingerprint, config.voc_size, config.eos_token_id, capacity)


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
    """A drafter that uses the draft model and no lookahead cache."""
    from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter

    return HybridDrafter(
        fit_to_model(lookahead_config({}), model, max_model_len),
        width=max_model_len,
        capacity=0,
        uses_cache=False,
        model=proposer,
        most_sequences=speculation.most_sequences,
    )
