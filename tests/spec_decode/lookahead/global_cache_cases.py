"""Drafters for tests of the global cache: what they draft for sequences that nobody knows yet."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.outputs import RequestMetrics
from hetero_llm.core.request import Request, Sequence
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.kv_cache.prefix_cache import hash_root
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from hetero_llm.spec_decode.lookahead.global_cache import GlobalCache
from hetero_llm.spec_decode.lookahead.sequence_state import namespace_salt
from hetero_llm.spec_decode.lookahead.snapshot import SnapshotRequirements

CONFIG = LookaheadConfig(cache_mode=0, eos_token_id=(2,), max_seq_len=4096, voc_size=1000)
ROOT, OTHER_ROOT = hash_root(), hash_root(("salt", "other"))
SPACE, OTHER_SPACE = namespace_salt(ROOT), namespace_salt(OTHER_ROOT)
TOKENIZER = "f" * 64

_names = count()


def make_drafter(capacity: int = 4096, **changes: Any) -> HybridDrafter:
    return HybridDrafter(replace(CONFIG, **changes), width=64, capacity=capacity)


def make_history(capacity: int = 4096) -> GlobalCache:
    return GlobalCache(CONFIG, capacity, uses_ngrams=True, uses_trie=True)


def make_place(capacity: int = 4096, **changes: Any) -> SnapshotRequirements:
    return replace(SnapshotRequirements(lambda: TOKENIZER, 1000, (2,), capacity), **changes)


def as_tokens(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


def draft_of(
    drafter: HybridDrafter, context: list[int], root: bytes = ROOT
) -> tuple[list[int], list[int]]:
    """Tokens and parents of the draft for a new sequence; the drafter learns nothing from it."""
    request = Request(
        request_id=str(next(_names)),
        prompt=None,
        prompt_token_ids=context,
        params=SamplingParams(max_tokens=50),
        seed=0,
        end_ids=frozenset({2}),
        eos_ids=frozenset({2}),
        max_total_tokens=64,
        root_hash=root,
        metrics=RequestMetrics(arrival_time=0.0),
    )
    sequence = Sequence(request, 0, array("i", context), len(context))
    request.sequences.append(sequence)
    batch = drafter.propose([sequence], [20], 1)
    return batch.token_ids.tolist(), batch.parents.tolist()


def chain_of(drafter: HybridDrafter, context: list[int], root: bytes = ROOT) -> list[int]:
    return draft_of(drafter, context, root)[0]
