"""Typical acceptance against a plain walk of its own, and how often it takes which token."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm import LLM
from hetero_llm.core.acceptance import TypicalAcceptance
from hetero_llm.core.draft_tree import DraftTree, join_trees
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import AdmittedSequence, ModelRunnerOutput, SchedulerOutput
from hetero_llm.cpu import native
from hetero_llm.demo_models import heldout_prompts
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.runner.verify import DraftedStep, typical_bounds, verify
from hetero_llm.sampling.sampler import Sampler
from hetero_llm.spec_decode.verify import tree_tokens

VOCAB, LENGTH = 12, 5
RULE = TypicalAcceptance(0.09, 0.3)
HOT = SamplingParams(temperature=1.0)


def table_of(seed: int, spread: float = 2.0) -> torch.Tensor:
    """[vocab, vocab] logits after each token: of a model that looks at nothing else."""
    return spread * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def sampler_of(params: list[SamplingParams], seed: int, num_logprobs: int | None = None) -> Sampler:
    sampler = Sampler(len(params), VOCAB, torch.device("cpu"))
    for slot, given in enumerate(params):
        known = tuple(range(LENGTH))
        sampler.admit(AdmittedSequence(slot, known, LENGTH, given, seed + slot, 0, num_logprobs))
    return sampler


def run(
    trees: list[DraftTree | None],
    table: torch.Tensor,
    sampler: Sampler,
    rule: TypicalAcceptance | None,
) -> ModelRunnerOutput:
    """One step; each sequence's last token is 0."""
    drafts = join_trees(trees)
    count = len(trees)
    step = SchedulerOutput(
        np.arange(count, dtype=np.int32), np.full(count, LENGTH - 1, np.int32), drafts.counts + 1,
        np.zeros(count, np.int32), np.ones(count, np.int32), (), (), np.zeros((3, 0), np.int32),
        np.zeros((2, 0), np.int32), drafts,
    )  # fmt: skip
    rows = tree_tokens(step, drafts)
    cache = PagedKVCache(KVCacheShape(1, 1, 2, 4, torch.float32), 200, torch.device("cpu"))
    drafted = DraftedStep(
        step, rows, np.arange(len(rows.kv_indices)), lambda asked: table[rows.token_ids[asked]], []
    )
    return verify(drafted, sampler, cache, typical=rule)


def random_tree(rng: np.random.Generator) -> DraftTree:
    count = int(rng.integers(0, 12))
    parents = [int(rng.integers(-1, node)) for node in range(count)]
    tokens = rng.integers(0, VOCAB, count)
    return DraftTree(tokens.astype(np.int32), np.array(parents, np.int32))


def distribution(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """What a request samples from, computed in numpy: temperature and top-k."""
    values = logits.double().numpy() / params.temperature
    if params.top_k > 0:
        values = np.where(values < np.sort(values)[-params.top_k], -np.inf, values)
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def reference(
    tree: DraftTree, table: torch.Tensor, params: SamplingParams, sampler: Sampler, slot: int
) -> tuple[list[int], int]:
    """The tokens of one sequence, and how many of them the target did not sample."""
    emitted: list[int] = []
    lossy, at, last = 0, -1, 0
    while True:
        position = np.array([LENGTH + len(emitted)])
        drawn = sampler.sample(table[last : last + 1], np.array([slot]), position, np.ones(1, int))
        token = int(drawn.token_ids)
        children = [n for n, parent in enumerate(tree.parents.tolist()) if parent == at]
        offered = [int(tree.token_ids[n]) for n in children]
        if token not in offered and not params.greedy:
            p = distribution(table[last], params)
            entropy = -sum(x * math.log(x) for x in p if x > 0)
            bound = min(RULE.threshold, RULE.alpha * math.exp(-entropy))
            typical = [t for t in offered if p[t] > bound]
            if typical:
                token = typical[0]
                lossy += 1
        emitted.append(token)
        if token not in offered:
            return emitted, lossy
        at, last = children[offered.index(token)], token


def test_every_decision_is_that_of_a_plain_walk() -> None:
    rng = np.random.default_rng(0)
    kinds = [
        HOT,
        replace(HOT, temperature=0.6),
        replace(HOT, top_k=3),
        SamplingParams(temperature=0),
    ]
    lossy = emitted = 0
    for seed in range(60):
        table = table_of(seed)
        trees = [random_tree(rng) for _ in kinds]
        output = run(trees, table, sampler_of(kinds, seed), RULE)
        assert output.num_tokens is not None
        others, tokens = sampler_of(kinds, seed), list(output.token_ids)
        for slot, (tree, params, count) in enumerate(zip(trees, kinds, output.num_tokens)):
            own, tokens = tokens[:count], tokens[count:]
            expected, given_way = reference(tree, table, params, others, slot)
            assert own == expected
            assert not given_way or not params.greedy
            lossy, emitted = lossy + given_way, emitted + count
    assert lossy > 30 and emitted > 300


@pytest.mark.parametrize(("rank", "accepted"), [(0, True), (1, True), (2, False), (11, False)])
def test_how_often_a_token_is_accepted(rank: int, accepted: bool) -> None:
    """Always where it is typical, else as often as the target samples it."""
    logits = torch.log(torch.tensor([0.5, 0.3] + [0.02] * 10))
    table = logits.expand(VOCAB, VOCAB)
    p = distribution(logits, HOT)
    bound = min(0.09, 0.3 * math.exp(float((p * np.log(p)).sum())))
    assert (p[rank] > bound) == accepted
    tree = DraftTree(np.array([rank], np.int32), np.array([-1], np.int32))
    slots = 50
    taken = total = 0
    for seed in range(0, 40 * slots, slots):
        output = run([tree] * slots, table, sampler_of([HOT] * slots, seed), RULE)
        assert output.num_tokens is not None
        taken += output.num_tokens.count(2)
        total += slots
    deviation = math.sqrt(total * p[rank] * (1 - p[rank]))
    assert taken == total if accepted else abs(taken - total * p[rank]) < 4 * deviation


def test_bounds() -> None:
    """The threshold where the distribution is sharp, less where it is flat."""
    sharp = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    flat = torch.full((1, 4), 0.25)
    assert typical_bounds(sharp, RULE).tolist() == pytest.approx([0.09])
    assert typical_bounds(flat, RULE).tolist() == pytest.approx([0.075])


def test_log_probabilities_are_those_of_the_token_taken() -> None:
    table = torch.log(torch.tensor([0.5, 0.3] + [0.02] * 10)).expand(VOCAB, VOCAB)
    tree = DraftTree(np.array([1], np.int32), np.array([-1], np.int32))
    for seed in range(5):
        output = run([tree], table, sampler_of([HOT], seed, num_logprobs=0), RULE)
        assert output.token_ids[0] == 1 and output.logprobs is not None
        assert output.logprobs[0] is not None
        assert output.logprobs[0].sampled == pytest.approx(math.log(0.3), abs=1e-5)


BACKENDS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(native.load() is None, reason="no compiler")),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_demo_pair_accepts_more(backend: str) -> None:
    """At temperature 1 more than losslessly; greedy requests of the same batch stay as they are."""
    prompts: Any = [{"prompt_token_ids": p} for p in heldout_prompts().prompts[:4, -32:].tolist()]
    hot = SamplingParams(temperature=1.0, seed=1, max_tokens=28, ignore_eos=True)
    greedy = replace(hot, temperature=0.0)
    params = [hot, greedy, hot, greedy]

    def serve(**more: Any) -> tuple[list[list[int]], float]:
        with LLM(
            "demo", device="cpu", dtype="float32", max_model_len=64, max_num_seqs=4,
            cpu_backend=backend, speculative_model="demo-draft", num_speculative_tokens=4, **more,
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
            metrics = llm.metrics()
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        accepted = metrics["spec_decode_num_accepted_tokens"]
        return tokens, accepted / metrics["spec_decode_num_drafts"]

    lossless, per_draft = serve(spec_decoding_acceptance_method="rejection_sampler")
    lossy, more_per_draft = serve(spec_decoding_acceptance_method="typical_acceptance_sampler")
    assert [lossy[1], lossy[3]] == [lossless[1], lossless[3]]
    assert lossy[0] != lossless[0] and more_per_draft > per_draft + 0.2
