"""Verification of draft trees by the torch sampler, one depth at a time.

Penalties, bad words, users' processors and their like need the path to a node before they can
process its logits, and log-probabilities are wanted of the emitted tokens alone. So the sampler
takes part in the walk (`spec_decode.verify.verify_trees`): at each depth one call samples after the
visited nodes of all sequences, and before the next one it observes the tokens of the accepted
children. Processors run once for each emitted token, in order, as in plain decoding, and as noise
depends on position and sample alone, the tokens are those of plain decoding.

Unless `TypicalAcceptance` is asked for: then a child that is likely enough is accepted in place of
a sampled token that no child carries. The tokens depend on the drafts then; a greedy sequence
accepts nothing but the sampled token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hetero_llm.core.acceptance import TypicalAcceptance
from hetero_llm.core.step import ModelRunnerOutput, SampleLogprobs, SchedulerOutput
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.sampling.sampler import LogprobTensors, Sampler
from hetero_llm.spec_decode.verify import (
    TreeTokens,
    compact_kv,
    verify_trees,
)

LogitsAfter = Callable[[np.ndarray], torch.Tensor]
"""Indices of tokens in the step, [R] int64, to the logits after them, [R, vocab]."""


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A step with drafts whose model has been launched; its sampling is still to come.

    Attributes:
        slot_mapping: [T] KV slot (block * block size + offset) of each token.
        prompt_logprobs: request slot and log-probabilities of its wanted prompt tokens.
    """

    step: SchedulerOutput
    trees: TreeTokens
    slot_mapping: np.ndarray
    logits_after: LogitsAfter
    prompt_logprobs: list[tuple[int, LogprobTensors]]


def verify(
    drafted: DraftedStep,
    sampler: Sampler,
    cache: PagedKVCache,
    last_tokens: torch.Tensor | None = None,
    typical: TypicalAcceptance | None = None,
) -> ModelRunnerOutput:
    """Samples along every tree, and after every other sequence that asks for it; compacts the KV.

    Args:
        sampler: has observed the sequences up to the tokens before their roots.
        last_tokens: [request slots] int64, written: the last token of each sampled sequence.
        typical: which nodes are accepted without being sampled; None: none.
    """
    step = drafted.step
    nodes = _NodeSampler(drafted, sampler, typical)
    paths = verify_trees(step, drafted.trees, nodes)
    compact_kv(step, paths, drafted.slot_mapping, cache.move_tokens)
    if cache.data.is_cuda:  # a store of these blocks waits for the step's launch, not for the moves
        torch.cuda.current_stream(cache.data.device).synchronize()
    if last_tokens is not None:
        slots = step.request_slots.tolist()
        last = [(s, t[-1]) for s, t in zip(slots, nodes.token_ids, strict=True) if t]
        owners, tokens = torch.tensor(last, device=last_tokens.device).T
        last_tokens[owners] = tokens
    entries = [entry for own in nodes.logprobs for entry in own]
    return ModelRunnerOutput(
        token_ids=[token for own in nodes.token_ids for token in own],
        logprobs=None if all(entry is None for entry in entries) else entries,
        prompt_logprobs={slot: tensors.to_host() for slot, tensors in drafted.prompt_logprobs},
        errors=nodes.errors,
        num_tokens=[len(own) for own in nodes.token_ids],
    )


class _NodeSampler:
    """`spec_decode.verify.SampleNodes` by the torch sampler; keeps what is sampled.

    Attributes:
        token_ids, logprobs: by sequence, the tokens emitted and their log-probabilities or None.
        errors: request slot to the message of a sequence's first sampling, if that failed.
    """

    def __init__(
        self, drafted: DraftedStep, sampler: Sampler, typical: TypicalAcceptance | None
    ) -> None:
        step, trees = drafted.step, drafted.trees
        ends = np.cumsum(step.num_scheduled_tokens)
        self.token_ids: list[list[int]] = [[] for _ in ends]
        self.logprobs: list[list[SampleLogprobs | None]] = [[] for _ in ends]
        self.errors: dict[int, str] = {}
        self._drafted = drafted
        self._sampler = sampler
        self._typical = typical
        self._roots = np.where(trees.is_tree > 0, ends - step.num_scheduled_tokens, ends - 1)

    def __call__(self, reached: dict[int, int]) -> list[int | None]:
        step, trees = self._drafted.step, self._drafted.trees
        walks = [(s, node) for s, node in reached.items() if not node or self._accept(s, node)]
        if not walks:
            return [None] * len(reached)
        sequences, nodes = np.array(walks).T
        at = self._roots[sequences] + nodes
        slots, samples = step.request_slots[sequences], step.num_samples[sequences]
        revise = None
        if self._typical is not None:
            offered = [self._children(*walks[i]) for i in np.repeat(np.arange(len(walks)), samples)]
            revise = _TypicalChildren(
                self._sampler, self._typical, np.repeat(slots, samples), offered
            )
        logits = self._drafted.logits_after(at)
        result = self._sampler.sample(logits, slots, trees.positions[at] + 1, samples, revise)
        tokens, entries = result.token_ids.tolist(), result.logprob_entries()
        sampled: dict[int, int] = {}
        begin = 0
        for (sequence, _), slot, count in zip(walks, slots.tolist(), samples.tolist(), strict=True):
            part = slice(begin, begin + count)
            begin += count
            if slot in result.errors:
                if self.token_ids[sequence]:
                    continue  # the tokens before may end it; if not, the next step fails again
                self.errors[slot] = result.errors[slot]
            self.token_ids[sequence] += tokens[part]
            self.logprobs[sequence] += entries[part]
            sampled[sequence] = tokens[part.start]
        return [sampled.get(sequence) for sequence in reached]

    def _accept(self, sequence: int, node: int) -> bool:
        """Shows the sampler the token of an accepted node; False: nothing is sampled after it."""
        slot = int(self._drafted.step.request_slots[sequence])
        token = self._drafted.trees.node_ids[sequence][node]
        if slot in self.errors or self._sampler.ends_at(slot, token):
            return False
        position = int(self._drafted.trees.positions[self._roots[sequence] + node])
        self._sampler.observe(slot, position, token)
        return True

    def _children(self, sequence: int, node: int) -> list[int]:
        """The tokens of a node's children, in order."""
        trees = self._drafted.trees
        own = zip(trees.node_ids[sequence], trees.parents[sequence], strict=True)
        return [token for token, parent in own if parent == node]


@dataclass(frozen=True, slots=True)
class _TypicalChildren:
    """`sampling.sampler.ReviseTokens`: a child's typical token replaces the sampled one where no
    child carries that.

    Attributes:
        slots: [N] request slot of each sample.
        offered: for each sample the tokens of the node's children; of several typical ones the
            first is taken.
    """

    sampler: Sampler
    rule: TypicalAcceptance
    slots: np.ndarray
    offered: list[list[int]]

    def __call__(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        sampled = tokens.tolist()
        random = self.sampler.is_random(self.slots).tolist()
        asking = [
            sample
            for sample, (token, offered) in enumerate(zip(sampled, self.offered, strict=True))
            if random[sample] and offered and token not in offered
        ]
        if not asking:
            return tokens
        rows = torch.tensor(asking, device=logits.device)
        probabilities = self.sampler.probabilities(logits[rows], self.slots[asking])
        bounds = typical_bounds(probabilities, self.rule)
        pairs = [(at, token) for at, sample in enumerate(asking) for token in self.offered[sample]]
        owners, candidates = torch.tensor(pairs, device=logits.device).T
        passing = (probabilities[owners, candidates] > bounds[owners]).tolist()
        for (at, token), passes in reversed(list(zip(pairs, passing, strict=True))):
            if passes:
                sampled[asking[at]] = token
        return torch.tensor(sampled, device=tokens.device)


def typical_bounds(probabilities: torch.Tensor, rule: TypicalAcceptance) -> torch.Tensor:
    """[R] bounds that a token's probability has to exceed, under distributions [R, vocab]."""
    entropy = torch.special.entr(probabilities).sum(dim=-1)
    return (rule.alpha * torch.exp(-entropy)).clamp(max=rule.threshold)
