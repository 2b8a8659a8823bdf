"""Verification of draft trees whose draws depend on the tokens before them by more than the model.

Penalties, bad words, users' processors and their like need the path to a node before they can say
anything about its row, and log-probabilities are wanted of the emitted tokens alone. So the trees
of all sequences are walked side by side, one depth at a time: the visited rows are drawn, by one
call of the sampler, and those whose token equals a child's go on to that child, whose path the
sampler is told. Processors run once for each emitted token, in order, as in plain decoding, and as
noise depends on position and sample alone, the tokens are those of plain decoding.

Unless `TypicalAcceptance` is asked for: then a child that is likely enough is taken in the place of
a drawn token that no child carries. Which tokens come depends on the drafts then; a greedy sequence
has no other token than the drawn one that is likely enough.
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
from hetero_llm.spec_decode.verify import TreeRows, next_row

LogitsAfter = Callable[[np.ndarray], torch.Tensor]
"""Rows of a step, [R] int64, to the logits after them, [R, vocab]."""


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A step with drafts that the model has run, or will have run; its draws are still to come.

    Attributes:
        cache_rows: [T] KV slot (block * block size + offset) of each row.
    """

    step: SchedulerOutput
    trees: TreeRows
    cache_rows: np.ndarray
    logits_after: LogitsAfter
    prompt_logprobs: list[tuple[int, LogprobTensors]]


@dataclass(frozen=True, slots=True)
class _Walked:
    """Of each scheduled sequence: the tokens drawn, their log-probabilities or None, the rows
    visited within its tree; and of slots whose first draw failed the message."""

    token_ids: list[list[int]]
    logprobs: list[list[SampleLogprobs | None]]
    paths: list[list[int]]
    errors: dict[int, str]


def verify(
    drafted: DraftedStep,
    sampler: Sampler,
    cache: PagedKVCache,
    last_tokens: torch.Tensor | None = None,
    typical: TypicalAcceptance | None = None,
) -> ModelRunnerOutput:
    """Draws along every tree and after every other row that asks for it; closes the gaps in the KV.

    Args:
        sampler: knows the sequences up to their root rows.
        last_tokens: [slots] int64, written.
        typical: which nodes are accepted without being drawn; None: none.
    """
    walked = _walk(drafted, sampler, typical)
    _move_accepted(drafted, walked.paths, cache)
    if last_tokens is not None:
        slots = drafted.step.request_slots.tolist()
        last = [(s, t[-1]) for s, t in zip(slots, walked.token_ids, strict=True) if t]
        places, tokens = torch.tensor(last, device=last_tokens.device).T
        last_tokens[places] = tokens
    entries = [entry for own in walked.logprobs for entry in own]
    return ModelRunnerOutput(
        token_ids=[token for own in walked.token_ids for token in own],
        logprobs=None if all(entry is None for entry in entries) else entries,
        prompt_logprobs={slot: rows.to_host() for slot, rows in drafted.prompt_logprobs},
        errors=walked.errors,
        num_tokens=[len(own) for own in walked.token_ids],
    )


def _walk(drafted: DraftedStep, sampler: Sampler, typical: TypicalAcceptance | None) -> _Walked:
    step, trees = drafted.step, drafted.trees
    ends = np.cumsum(step.num_scheduled_tokens)
    firsts = ends - step.num_scheduled_tokens
    rows = np.where(trees.is_tree > 0, firsts, ends - 1)  # where each sequence is drawn from next
    own = [trees.token_ids[a:b].tolist() for a, b in zip(firsts, ends, strict=True)]
    walked = _Walked([[] for _ in own], [[] for _ in own], [[] for _ in own], {})
    visiting = np.flatnonzero(step.num_samples)
    samples = step.num_samples[visiting]
    while len(visiting):
        slots, visited = step.request_slots[visiting], rows[visiting]
        positions = trees.positions[visited] + 1
        settle = None
        if typical is not None:
            offered = [
                _children(int(rows[i] - firsts[i]), own[i], trees.parents[i])
                if trees.is_tree[i]
                else []
                for i in np.repeat(visiting, samples).tolist()
            ]
            settle = _Settled(sampler, typical, np.repeat(slots, samples), offered)
        result = sampler.sample(drafted.logits_after(visited), slots, positions, samples, settle)
        drawn, entries = result.token_ids.tolist(), result.logprob_entries()
        going_on: list[int] = []
        begin = 0
        for sequence, slot, position, count in zip(
            visiting.tolist(), slots.tolist(), positions.tolist(), samples.tolist(), strict=True
        ):
            place = slice(begin, begin + count)
            begin += count
            if slot in result.errors:
                if walked.token_ids[sequence]:
                    continue  # the tokens before may end it; if not, the next step says it again
                walked.errors[slot] = result.errors[slot]
            walked.token_ids[sequence] += drawn[place]
            walked.logprobs[sequence] += entries[place]
            if not trees.is_tree[sequence]:
                continue
            first, token = int(firsts[sequence]), drawn[place.start]
            row = int(rows[sequence]) - first
            walked.paths[sequence].append(row)
            child = next_row(row, token, own[sequence], trees.parents[sequence])
            if child is None or slot in walked.errors or sampler.ends_at(slot, token):
                continue
            sampler.observe(slot, position, token)
            rows[sequence] = first + child
            going_on.append(sequence)
        visiting = np.array(going_on, np.int64)
        samples = np.ones(len(going_on), np.int32)
    return walked


def _children(row: int, token_ids: list[int], parents: list[int]) -> list[int]:
    """The tokens of a row's children, in order."""
    return [token_ids[i] for i in range(row + 1, len(parents)) if parents[i] == row]


@dataclass(frozen=True, slots=True)
class _Settled:
    """Takes an offered token that is typical where the drawn one is not offered.

    Attributes:
        slots: [N] of each draw. offered: tokens for each draw; of several the first is taken.
    """

    sampler: Sampler
    rule: TypicalAcceptance
    slots: np.ndarray
    offered: list[list[int]]

    def __call__(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        drawn = tokens.tolist()
        random = self.sampler.is_random(self.slots).tolist()
        asking = [
            draw
            for draw, (token, offered) in enumerate(zip(drawn, self.offered, strict=True))
            if random[draw] and offered and token not in offered
        ]
        if not asking:
            return tokens
        rows = torch.tensor(asking, device=logits.device)
        probabilities = self.sampler.probabilities(logits[rows], self.slots[asking])
        bounds = typical_bounds(probabilities, self.rule)
        pairs = [(at, token) for at, draw in enumerate(asking) for token in self.offered[draw]]
        places, candidates = torch.tensor(pairs, device=logits.device).T
        passing = (probabilities[places, candidates] > bounds[places]).tolist()
        for (at, token), passes in reversed(list(zip(pairs, passing, strict=True))):
            if passes:
                drawn[asking[at]] = token
        return torch.tensor(drawn, device=tokens.device)


def typical_bounds(probabilities: torch.Tensor, rule: TypicalAcceptance) -> torch.Tensor:
    """[R] what a token's probability has to exceed, under distributions [R, vocab]."""
    entropy = torch.special.entr(probabilities).sum(dim=-1)
    return (rule.alpha * torch.exp(-entropy)).clamp(max=rule.threshold)


def _move_accepted(drafted: DraftedStep, paths: list[list[int]], cache: PagedKVCache) -> None:
    """Moves the KV of visited rows behind each other; those of most paths lie in place."""
    firsts = np.cumsum(drafted.step.num_scheduled_tokens) - drafted.step.num_scheduled_tokens
    slots = drafted.cache_rows
    moved = [(f, path) for f, path in zip(firsts.tolist(), paths, strict=True) if gaps(path)]
    if moved:
        cache.move_tokens(
            np.concatenate([slots[first + np.array(path)] for first, path in moved]),
            np.concatenate([slots[first : first + len(path)] for first, path in moved]),
        )


def gaps(path: list[int]) -> bool:
    """Whether the rows of a path, ascending from 0, leave any out."""
    return bool(path) and path[-1] >= len(path)
