"""Mistakes that a verifier could make, each a function that patches one in.

A verifier must keep the tokens themselves: one that keeps only their distribution, as rejection
sampling does, counts as a mistake. Left out are mutants that change nothing, such as following the
last of two equal children. The native library cannot be patched: the arrays passed to it are
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.request import Sequence
from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput
from hetero_llm.cpu import model_runner as native_runner
from hetero_llm.cpu.executor import GREEDY, Executor, StepInput, StepSamples
from hetero_llm.cpu.step_buffers import StepBuffers
from hetero_llm.runner import model_runner as torch_runner
from hetero_llm.runner import verify as verify_module
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.sampling import processors
from hetero_llm.sampling import sampler as sampler_module
from hetero_llm.sampling.noise import gumbel_noise
from hetero_llm.scheduler.scheduler import Scheduler
from hetero_llm.spec_decode import verify as trees_module
from hetero_llm.spec_decode.verify import (
    SampleNodes,
    TreeTokens,
    compact_kv,
    next_node,
    tree_tokens,
    verify_trees,
)
from tests.helpers.draft_traffic import EVERYTHING, FAST
from tests.helpers.drafters import Oracle, Siblings

Patch = pytest.MonkeyPatch

_SOME = [name for name in EVERYTHING if name not in FAST and name not in ("ranked", "beams")]
_DEEP = {name: EVERYTHING[name] for name in ("stop string", "stop token", *_SOME)}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fast": (FAST, {}),  # the library samples after all tokens, then trees are verified
    "deep": (_DEEP, {}),  # the sampler samples depth after depth, from the library's logits
    "torch": (_DEEP, {"batch_invariant": True}),  # the same, and torch attends
}
DEEP = ("deep", "torch")


@dataclass(frozen=True)
class Mutant:
    patch: Callable[[Patch], None]
    ways: tuple[str, ...]
    drafter: type[Siblings] | type[Oracle]


MUTANTS: dict[str, Mutant] = {}


def mutant(
    *ways: str, drafter: type[Siblings] | type[Oracle] = Siblings
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Registers a function that patches a mistake in."""

    def enter(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS[patch.__name__] = Mutant(patch, ways or tuple(WAYS), drafter)
        return patch

    return enter


# -- the tokens of a tree --------------------------------------------------------------------------


def change_trees(patch: Patch, change: Callable[[TreeTokens, SchedulerOutput], TreeTokens]) -> None:
    for module in (native_runner, torch_runner):
        patch.setattr(module, "tree_tokens", lambda s, drafts: change(tree_tokens(s, drafts), s))

    def changed(buffers: StepBuffers, step: SchedulerOutput, num_samples: int) -> None:
        trees = change(tree_tokens(step, step.drafts), step)
        count = len(trees.positions)
        buffers.inputs.ancestors[:count] = trees.ancestors
        buffers.inputs.positions[:count] = trees.positions
        after = buffers.samples.token_indices[:num_samples]
        buffers.samples.positions[:num_samples] = trees.positions[after] + 1

    change_filled(patch, changed)


def change_filled(
    patch: Patch, change: Callable[[StepBuffers, SchedulerOutput, int], None]
) -> None:
    """`change` takes buffers that compiled code has filled with a step with drafts, the step, and
    its number of samples."""
    fill = StepBuffers.fill

    def changed(buffers: StepBuffers, step: SchedulerOutput, *others: Any) -> int | None:
        num_samples = fill(buffers, step, *others)
        if step.drafts is not None and num_samples is not None:
            change(buffers, step, num_samples)
        return num_samples

    patch.setattr(StepBuffers, "fill", changed)


def walk_in_python(patch: Patch) -> None:
    """Compiled code cannot be patched: the walk of the native runner's other path, which gives the
    same, takes its place."""

    def verify(
        buffers: StepBuffers, step: SchedulerOutput, drafts: DraftBatch, num_samples: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        trees = tree_tokens(step, drafts)
        counts = np.where(trees.is_tree > 0, step.num_scheduled_tokens, step.num_samples)
        begins = (np.cumsum(counts) - counts).tolist()
        sampled = buffers.tokens[:num_samples].tolist()

        def sample(reached: dict[int, int]) -> list[int | None]:
            return [sampled[begins[sequence] + node] for sequence, node in reached.items()]

        paths = native_runner.verify_trees(step, trees, sample)
        moves: list[np.ndarray] = [np.zeros((2, 0), np.int32)]
        slots = buffers.inputs.slot_mapping
        native_runner.compact_kv(step, paths, slots, lambda *pair: moves.append(np.stack(pair)))
        kept: list[list[int]] = [
            [sampled[begin + node] for node in path] if parents else sampled[begin : begin + count]
            for path, parents, begin, count in zip(
                paths, trees.parents, begins, counts.tolist(), strict=True
            )
        ]
        tokens = [token for own in kept for token in own]
        return np.array(tokens, np.int64), np.array(list(map(len, kept)), np.int64), moves[-1]

    patch.setattr(StepBuffers, "verify", verify)


def within_trees(trees: TreeTokens, step: SchedulerOutput) -> np.ndarray:
    """[T] uint64 index of each token within its sequence's of the step."""
    firsts = np.cumsum(step.num_scheduled_tokens) - step.num_scheduled_tokens
    return (np.arange(len(trees.kv_indices)) - np.repeat(firsts, step.num_scheduled_tokens)).astype(
        np.uint64
    )


def change_masks(patch: Patch, change: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    """`change` takes the nodes' bits and their indices."""

    def changed(trees: TreeTokens, step: SchedulerOutput) -> TreeTokens:
        bits, within = trees.ancestors, within_trees(trees, step)
        return replace(trees, ancestors=np.where(bits > 1, change(bits, within), bits))

    change_trees(patch, changed)


@mutant()
def nodes_see_all_tokens_before(patch: Patch) -> None:
    one = np.uint64(1)
    change_masks(patch, lambda bits, within: (one << within) - one | one << within)


@mutant()
def nodes_see_the_first_node(patch: Patch) -> None:
    change_masks(patch, lambda bits, within: bits | np.uint64(2))


@mutant()
def nodes_miss_the_root(patch: Patch) -> None:
    change_masks(patch, lambda bits, within: bits & ~np.uint64(1))


@mutant()
def nodes_miss_their_parents(patch: Patch) -> None:
    def changed(trees: TreeTokens, step: SchedulerOutput) -> TreeTokens:
        above = np.array(
            [p for own in map(_all_parents, trees.parents, step.num_scheduled_tokens) for p in own]
        )
        bits = trees.ancestors & ~(np.uint64(1) << np.maximum(above, 0).astype(np.uint64))
        return replace(trees, ancestors=np.where(above >= 0, bits, trees.ancestors))

    change_trees(patch, changed)


def _all_parents(parents: list[int], count: int) -> list[int]:
    return parents or [-1] * count


@mutant()
def positions_by_index(patch: Patch) -> None:
    change_trees(patch, lambda trees, step: replace(trees, positions=trees.kv_indices))


@mutant()
def positions_one_too_deep(patch: Patch) -> None:
    change_trees(
        patch,
        lambda trees, step: replace(
            trees, positions=trees.positions + (trees.ancestors > 1).astype(np.int32)
        ),
    )


# -- the walk --------------------------------------------------------------------------------------

NextNode = Callable[[int, int, list[int], list[int]], int | None]


def change_next_node(patch: Patch, find_child: NextNode) -> None:
    walk_in_python(patch)
    patch.setattr(trees_module, "next_node", find_child)


@mutant("fast", "deep")
def a_sibling_is_taken(patch: Patch) -> None:
    def wrong(node: int, token: int, token_ids: list[int], parents: list[int]) -> int | None:
        child = next_node(node, token, token_ids, parents)
        if child is None:
            return None
        return next(n for n in range(node + 1, len(parents)) if parents[n] == node)

    change_next_node(patch, wrong)


@mutant("fast", "deep")
def any_node_with_the_token_is_taken(patch: Patch) -> None:
    def wrong(node: int, token: int, token_ids: list[int], parents: list[int]) -> int | None:
        later = range(node + 1, len(parents))
        return next((child for child in later if token_ids[child] == token), None)

    change_next_node(patch, wrong)


@mutant("fast", "deep")
def one_node_too_many_is_taken(patch: Patch) -> None:
    def wrong(node: int, token: int, token_ids: list[int], parents: list[int]) -> int | None:
        child = next_node(node, token, token_ids, parents)
        if child is None and node == 0:
            child = next((n for n in range(1, len(parents)) if parents[n] == 0), None)
        return child

    change_next_node(patch, wrong)


def change_last_token(patch: Patch, node_of: Callable[[list[int], list[int]], int]) -> None:
    """`node_of` takes a tree's path and parents: the node after which its last token is sampled."""

    def verify(step: SchedulerOutput, trees: TreeTokens, sample: SampleNodes) -> list[list[int]]:
        paths = verify_trees(step, trees, sample)
        right.append(paths)
        return [
            [*path[:-1], node_of(path, parents)] if parents else path
            for path, parents in zip(paths, trees.parents, strict=True)
        ]

    def compact(step: SchedulerOutput, paths: list[list[int]], *others: Any) -> None:
        compact_kv(step, right.pop(), *others)

    right: list[list[list[int]]] = []  # KV moves as it should
    walk_in_python(patch)
    patch.setattr(native_runner, "verify_trees", verify)
    patch.setattr(native_runner, "compact_kv", compact)


@mutant("fast")
def the_last_token_is_sampled_after_the_last_node(patch: Patch) -> None:
    change_last_token(patch, lambda path, parents: len(parents) - 1)


@mutant("fast")
def the_last_token_is_sampled_after_the_node_before(patch: Patch) -> None:
    change_last_token(patch, lambda path, parents: max(path[-1] - 1, 0))


# -- KV --------------------------------------------------------------------------------------------

move_tokens = PagedKVCache.move_tokens


@mutant()
def accepted_kv_stays_where_it_is(patch: Patch) -> None:
    patch.setattr(PagedKVCache, "move_tokens", lambda *_: None)


@mutant("fast", "deep")
def the_last_accepted_kv_stays(patch: Patch) -> None:
    patch.setattr(PagedKVCache, "move_tokens", lambda c, s, t: move_tokens(c, s[:-1], t[:-1]))


@mutant("fast", "deep")
def keys_move_without_values(patch: Patch) -> None:
    def move(cache: PagedKVCache, sources: np.ndarray, targets: np.ndarray) -> None:
        values = cache.data[:, :, 1].clone()
        move_tokens(cache, sources, targets)
        cache.data[:, :, 1] = values

    patch.setattr(PagedKVCache, "move_tokens", move)


@mutant("fast", "deep")
def the_first_layer_alone_moves(patch: Patch) -> None:
    def move(cache: PagedKVCache, sources: np.ndarray, targets: np.ndarray) -> None:
        others = cache.data[:, 1:].clone()
        move_tokens(cache, sources, targets)
        cache.data[:, 1:] = others

    patch.setattr(PagedKVCache, "move_tokens", move)


@mutant("fast", "deep")
def kv_moves_over_what_is_still_to_move(patch: Patch) -> None:
    def move(cache: PagedKVCache, sources: np.ndarray, targets: np.ndarray) -> None:
        for i in reversed(range(len(sources))):
            move_tokens(cache, sources[i : i + 1], targets[i : i + 1])

    patch.setattr(PagedKVCache, "move_tokens", move)


@mutant("fast", "deep")
def a_gap_of_one_node_is_overlooked(patch: Patch) -> None:
    walk_in_python(patch)
    patch.setattr(trees_module, "has_gaps", lambda path: bool(path) and path[-1] > len(path))


# -- sampling where the logits are -----------------------------------------------------------------


def change_samples(
    patch: Patch, change: Callable[[StepSamples, np.ndarray, np.ndarray], StepSamples]
) -> None:
    """`change` takes the samples, and for each the index of its token within the sequence's of the
    step and whether the token is a draft node."""
    step = Executor.step

    def changed(self: Executor, inputs: StepInput, samples: StepSamples) -> np.ndarray:
        counts, after = inputs.num_scheduled_tokens, samples.token_indices
        firsts = np.repeat(np.cumsum(counts) - counts, counts)[after]
        is_node = inputs.ancestors[after] > 1
        return step(self, inputs, change(samples, after - firsts, is_node))

    patch.setattr(Executor, "step", changed)

    def changed_buffers(buffers: StepBuffers, step: SchedulerOutput, count: int) -> None:
        names = [field.name for field in fields(StepSamples) if field.name != "masks"]
        samples = StepSamples(**{name: getattr(buffers.samples, name)[:count] for name in names})
        scheduled, after = step.num_scheduled_tokens, samples.token_indices
        firsts = np.repeat(np.cumsum(scheduled) - scheduled, scheduled)[after]
        is_node = tree_tokens(step, step.drafts).ancestors[after] > 1
        wrong = change(samples, after - firsts, is_node)
        for name in names:
            getattr(buffers.samples, name)[:count] = getattr(wrong, name)

    change_filled(patch, changed_buffers)


def roots_of(is_node: np.ndarray) -> np.ndarray:
    """[N] for each sample the one after its tree's root, or itself."""
    return np.maximum.accumulate(np.where(is_node, 0, np.arange(len(is_node))))


@mutant("fast")
def noise_by_index_on_the_device(patch: Patch) -> None:
    def changed(samples: StepSamples, within: np.ndarray, is_node: np.ndarray) -> StepSamples:
        positions = samples.positions[roots_of(is_node)] + within
        return replace(
            samples, positions=np.where(is_node, positions, samples.positions).astype(np.int32)
        )

    change_samples(patch, changed)


@mutant("fast")
def noise_of_the_root_on_the_device(patch: Patch) -> None:
    def changed(samples: StepSamples, within: np.ndarray, is_node: np.ndarray) -> StepSamples:
        return replace(samples, positions=samples.positions[roots_of(is_node)])

    change_samples(patch, changed)


@mutant("fast")
def nodes_are_greedy_on_the_device(patch: Patch) -> None:
    def changed(samples: StepSamples, within: np.ndarray, is_node: np.ndarray) -> StepSamples:
        return replace(samples, modes=np.where(is_node, GREEDY, samples.modes).astype(np.uint8))

    change_samples(patch, changed)


@mutant("fast")
def nodes_are_sampled_for_index_0_on_the_device(patch: Patch) -> None:
    def changed(samples: StepSamples, within: np.ndarray, is_node: np.ndarray) -> StepSamples:
        indices = np.where(is_node, 0, samples.sample_indices)
        return replace(samples, sample_indices=indices.astype(np.int32))

    change_samples(patch, changed)


@mutant("fast")
def nodes_are_sampled_after_the_token_before_on_the_device(patch: Patch) -> None:
    def changed(samples: StepSamples, within: np.ndarray, is_node: np.ndarray) -> StepSamples:
        return replace(samples, token_indices=(samples.token_indices - is_node).astype(np.int32))

    change_samples(patch, changed)


# -- sampling depth after depth --------------------------------------------------------------------


class Around:
    """A sampler with a mistake for one step. Call 0 of `sample` samples after the roots."""

    def __init__(self, sampler: Any, drafted: verify_module.DraftedStep) -> None:
        self.sampler = sampler
        self.drafted = drafted
        self.num_calls = 0
        self.rows = np.zeros(0, np.int64)  # that the logits are of

    def logits_after(self, rows: np.ndarray) -> torch.Tensor:
        self.rows = rows
        return self.drafted.logits_after(rows)

    def sample(
        self, logits: Any, slots: Any, positions: Any, samples: Any, revise: None = None
    ) -> Any:
        result = self.sample_from(logits, slots, positions, samples)
        self.num_calls += 1
        return result

    def sample_from(self, logits: Any, slots: Any, positions: Any, samples: Any) -> Any:
        return self.sampler.sample(logits, slots, positions, samples)

    def observe(self, slot: int, position: int, token: int) -> None:
        self.sampler.observe(slot, position, token)

    def ends_at(self, slot: int, token: int) -> bool:
        return bool(self.sampler.ends_at(slot, token))

    def sample_with(self, module: Any, name: str, value: Any, *args: Any) -> Any:
        """Samples with a function of a module replaced, except after the roots."""
        with pytest.MonkeyPatch.context() as patch:
            if self.num_calls:
                patch.setattr(module, name, value)
            return self.sampler.sample(*args)


def change_sampler(patch: Patch, kind: type[Around]) -> None:
    def verify(
        drafted: verify_module.DraftedStep, sampler: Any, *others: Any, typical: None = None
    ) -> Any:
        around: Any = kind(sampler, drafted)
        drafted = replace(drafted, logits_after=around.logits_after)
        return verify_module.verify(drafted, around, *others)

    for module in (native_runner, torch_runner):
        patch.setattr(module, "verify", verify)


@mutant(*DEEP)
def noise_by_index(patch: Patch) -> None:
    class Wrong(Around):
        def sample_from(self, logits: Any, slots: Any, positions: Any, samples: Any) -> Any:
            is_node = self.drafted.trees.ancestors[self.rows] > 1
            positions = np.where(is_node, self.drafted.trees.kv_indices[self.rows] + 1, positions)
            return super().sample_from(logits, slots, positions, samples)

    change_sampler(patch, Wrong)


@mutant("deep")
def noise_of_the_root(patch: Patch) -> None:
    class Wrong(Around):
        def sample_from(self, logits: Any, slots: Any, positions: Any, samples: Any) -> Any:
            return super().sample_from(logits, slots, positions - self.num_calls, samples)

    change_sampler(patch, Wrong)


def no_noise(seeds: Any, positions: Any, indices: Any, vocab_size: int) -> torch.Tensor:
    return torch.zeros(len(seeds), vocab_size)


def noise_of_index_0(seeds: Any, positions: Any, indices: Any, vocab_size: int) -> torch.Tensor:
    return gumbel_noise(seeds, positions, torch.zeros_like(indices), vocab_size)


@mutant("deep")
def nodes_are_greedy(patch: Patch) -> None:
    class Wrong(Around):
        def sample_from(self, *args: Any) -> Any:
            return self.sample_with(sampler_module, "gumbel_noise", no_noise, *args)

    change_sampler(patch, Wrong)


@mutant("deep", drafter=Oracle)
def nodes_are_sampled_without_thresholds(patch: Patch) -> None:
    class Wrong(Around):
        def sample_from(self, *args: Any) -> Any:
            everything = lambda logits, *thresholds: logits  # noqa: E731
            return self.sample_with(processors, "restrict_support", everything, *args)

    change_sampler(patch, Wrong)


@mutant("deep")
def nodes_are_sampled_for_index_0(patch: Patch) -> None:
    class Wrong(Around):
        def sample_from(self, *args: Any) -> Any:
            return self.sample_with(sampler_module, "gumbel_noise", noise_of_index_0, *args)

    change_sampler(patch, Wrong)


@mutant("deep")
def nodes_are_sampled_after_the_token_before(patch: Patch) -> None:
    class Wrong(Around):
        def logits_after(self, rows: np.ndarray) -> torch.Tensor:
            return super().logits_after(rows - (self.drafted.trees.ancestors[rows] > 1))

    change_sampler(patch, Wrong)


@mutant("deep")
def a_draft_is_accepted_as_in_rejection_sampling(patch: Patch) -> None:
    """u < p of the first child, else a sample without it: the right distribution, other tokens."""

    class Wrong(Around):
        def sample_from(
            self, logits: torch.Tensor, slots: Any, positions: Any, samples: Any
        ) -> Any:
            parents, firsts = (
                self.drafted.trees.parents,
                np.cumsum(self.drafted.step.num_scheduled_tokens),
            )
            logits = logits.clone()
            for index, row in enumerate(self.rows.tolist()):
                sequence = int(np.searchsorted(firsts, row, "right"))
                first = int(firsts[sequence] - self.drafted.step.num_scheduled_tokens[sequence])
                if row - first in parents[sequence]:
                    child = first + parents[sequence].index(row - first)
                    token = int(self.drafted.trees.token_ids[child])
                    u = np.random.default_rng(row).random()
                    accepts = u < float(logits[index].softmax(0)[token])
                    logits[index, token] = 1e4 if accepts else -torch.inf
            return super().sample_from(logits, slots, positions, samples)

    change_sampler(patch, Wrong)


@mutant(*DEEP, drafter=Oracle)
def processors_do_not_observe_the_path(patch: Patch) -> None:
    class Wrong(Around):
        def observe(self, slot: int, position: int, token: int) -> None:
            pass

    change_sampler(patch, Wrong)


@mutant("deep", drafter=Oracle)
def processors_observe_the_path_twice(patch: Patch) -> None:
    class Wrong(Around):
        def observe(self, slot: int, position: int, token: int) -> None:
            self.sampler.observe(slot, position, token)
            self.sampler.observe(slot, position + 1, token)

    change_sampler(patch, Wrong)


@mutant("deep", drafter=Oracle)
def processors_do_not_observe_the_last_token(patch: Patch) -> None:
    observe_inputs = native_runner.observe_inputs

    def deaf(sampler: Any, step: SchedulerOutput) -> None:
        if step.drafts is None:
            observe_inputs(sampler, step)

    patch.setattr(native_runner, "observe_inputs", deaf)


@mutant("deep")
def nodes_have_the_log_probabilities_of_the_root(patch: Patch) -> None:
    class Wrong(Around):
        def sample_from(self, logits: Any, slots: Any, positions: Any, samples: Any) -> Any:
            result = super().sample_from(logits, slots, positions, samples)
            entries = result.logprob_entries()
            if self.num_calls == 0:
                self.of_roots = dict(zip(np.repeat(slots, samples).tolist(), entries, strict=True))
            else:
                entries = [self.of_roots[slot] for slot in slots.tolist()]
            return SimpleNamespace(
                token_ids=result.token_ids, errors=result.errors, logprob_entries=lambda: entries
            )

    change_sampler(patch, Wrong)


# -- the scheduler ----------------------------------------------------------------


@mutant("fast", "deep", drafter=Oracle)
def tokens_behind_an_end_are_kept(patch: Patch) -> None:
    patch.setattr(Sequence, "num_before_end", lambda sequence, new: len(new) - 1)


@mutant("fast", drafter=Oracle)
def tokens_behind_a_stop_string_are_kept(patch: Patch) -> None:
    patch.setattr(Sequence, "drop_tokens", lambda sequence, count: None)


# -- mistakes that cost speed alone ----------------------------------------------------------------


def no_token_behind_the_accepted_ones(patch: Patch) -> None:
    """A drafted sequence gets its accepted nodes without the token sampled after them."""
    update = Scheduler.update

    def fewer(self: Scheduler, step: SchedulerOutput, output: ModelRunnerOutput) -> Any:
        if step.drafts is None or output.num_tokens is None:
            return update(self, step, output)
        given = np.array(output.num_tokens)
        kept = given - ((step.drafts.counts > 0) & (given > 1))
        ends = np.cumsum(given)
        places = [
            place
            for end, before, count in zip(ends, given, kept)
            for place in range(end - before, end - before + count)
        ]
        output = replace(
            output,
            token_ids=[output.token_ids[place] for place in places],
            logprobs=output.logprobs and [output.logprobs[place] for place in places],
            num_tokens=kept.tolist(),
        )
        return update(self, step, output)

    patch.setattr(Scheduler, "update", fewer)


def no_node_below_the_first_is_taken(patch: Patch) -> None:
    change_next_node(patch, lambda node, *others: None if node else next_node(node, *others))
