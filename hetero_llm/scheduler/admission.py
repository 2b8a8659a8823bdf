"""What a request needs to run at all, slots and KV blocks, and what it begins with.

Part of the scheduler, which alone calls it.
"""

from __future__ import annotations

from array import array

from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.errors import PromptError, SamplingError
from hetero_llm.core.request import Request, Sequence
from hetero_llm.kv_cache.block_manager import BlockManager


def check_fits(request: Request, config: SchedulerConfig, blocks: BlockManager) -> None:
    """Raises a typed error if the request could never run here."""
    params = request.params
    if params.width > config.max_num_seqs:
        field = "n" if params.best_of is None else "best_of"
        raise SamplingError(field, params.width, f"exceeds max_num_seqs ({config.max_num_seqs})")
    needed = blocks.blocks_for(request.max_total_tokens)
    if params.use_beam_search:  # all beams are in memory at once, after preemption unshared
        needed *= params.width
    if needed > blocks.num_blocks:
        raise PromptError(
            "prompt",
            f"{len(request.prompt_token_ids)} tokens",
            f"needs {needed} KV blocks with its output, the cache has {blocks.num_blocks}; lower "
            "max_tokens or best_of",
        )


def first_sequence(request: Request) -> Sequence:
    """Makes a request's first sequence, and its own lists ready for results."""
    tokens = array("i")
    if request.packed_prompt:
        tokens.frombytes(request.packed_prompt)
    else:
        tokens.extend(request.prompt_token_ids)
    sequence = Sequence(request, 0, tokens, len(tokens))
    if request.params.logprobs is not None:
        sequence.logprobs = []
    request.sequences = [sequence]
    request.num_unfinished = 1
    if request.params.prompt_logprobs is not None:
        request.prompt_logprobs = [None]
    return sequence


def forks_to_come(request: Request) -> int:
    """Slots that admission reserves beside the sequence's own."""
    return 0 if len(request.sequences) > 1 else request.params.width - 1
