"""Sampling by depth over a stand-in for a model, whose logits depend on one token alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm.core.draft_tree import DraftTree, join_trees
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import AdmittedSequence, SchedulerOutput
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.runner.verify import DraftedStep, verify
from hetero_llm.sampling.sampler import Sampler
from hetero_llm.spec_decode.verify import tree_tokens

VOCAB, SLOTS, BLOCK = 32, 4, 4
PROMPT = (3, 1, 4)
GREEDY = SamplingParams(temperature=0)


def logits_of(token: int, likely: int = 1) -> torch.Tensor:
    """Most likely is the `likely`-th token after `token`, then the next one, ..."""
    return -torch.tensor([float((t - token - likely) % VOCAB) for t in range(VOCAB)])


class Verified:
    """One step of several sequences, verified.

    Args:
        trees: of each sequence, in request slots 0, 1, ...; None: no draft.
        params: of each one.
        known: tokens of each one.
        likely: see `logits_of`.
    """

    def __init__(
        self,
        trees: list[DraftTree | None],
        params: list[SamplingParams],
        known: list[tuple[int, ...]],
        num_logprobs: int | None = None,
        likely: int = 1,
    ) -> None:
        count = len(trees)
        self.sampler = Sampler(SLOTS, VOCAB, torch.device("cpu"))
        for slot, (given, tokens) in enumerate(zip(params, known, strict=True)):
            ends = tuple(given.stop_token_ids or ())
            state = AdmittedSequence(
                slot, tokens, len(PROMPT), given, 1, 0, num_logprobs, end_ids=ends
            )
            self.sampler.admit(state)
        drafts = join_trees(trees)
        starts = np.array([len(tokens) - 1 for tokens in known], np.int32)
        self.step = SchedulerOutput(
            np.arange(count, dtype=np.int32),
            starts,
            drafts.counts + 1,
            np.array([tokens[-1] for tokens in known], np.int32),
            np.ones(count, np.int32),
            (),
            (),
            np.zeros((3, 0), np.int32),
            np.zeros((2, 0), np.int32),
            drafts,
        )
        shape = KVCacheShape(1, 1, 2, BLOCK, torch.float32)
        self.cache = PagedKVCache(shape, 64, torch.device("cpu"))
        tokens = tree_tokens(self.step, drafts)
        self.asked: list[list[int]] = []

        def logits_after(asked: np.ndarray) -> torch.Tensor:
            self.asked.append(asked.tolist())
            return torch.stack([logits_of(t, likely) for t in tokens.token_ids[asked].tolist()])

        self.slot_mapping = np.random.default_rng(0).permutation(64 * BLOCK)[
            : len(tokens.kv_indices)
        ]
        for number, place in enumerate(self.slot_mapping):
            self.cache.data[place // BLOCK, 0, :, place % BLOCK] = number
        self.drafted = DraftedStep(self.step, tokens, self.slot_mapping, logits_after, [])
        self.last_tokens = torch.full((SLOTS,), -1)
        self.output = verify(self.drafted, self.sampler, self.cache, self.last_tokens)

    def kv_of_tokens(self) -> list[int]:
        """For each token the number of the token whose KV is now in its KV slot."""
        return [int(self.cache.data[p // BLOCK, 0, 0, p % BLOCK, 0, 0]) for p in self.slot_mapping]


def tree(*nodes: tuple[int, int]) -> DraftTree:
    """Of tokens and parents."""
    tokens, parents = zip(*nodes, strict=True)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))


def test_all_sequences_are_sampled_depth_by_depth() -> None:
    verified = Verified(
        [
            tree((9, -1), (5, -1), (6, 1), (7, 1), (7, 2)),
            None,
            tree((7, -1), (9, 0)),
            tree((2, -1)),
        ],
        [GREEDY] * 4,
        [(*PROMPT, 4), (*PROMPT, 8), (*PROMPT, 5, 6), PROMPT],
    )
    output = verified.output
    assert output.num_tokens == [4, 1, 2, 1]
    assert output.token_ids == [5, 6, 7, 8, 9, 7, 8, 5]
    assert (output.logprobs, output.errors, output.prompt_logprobs) == (None, {}, {})
    assert verified.asked == [[0, 6, 7, 10], [2, 8], [3], [5]]
    assert verified.last_tokens.tolist() == [8, 9, 8, 5]
    assert verified.kv_of_tokens() == [0, 2, 3, 5, 4, 5, 6, 7, 8, 9, 10, 11]


def test_penalties_count_the_path_once() -> None:
    """The same token is most likely again, so it is sampled until the penalty has grown: how often
    depends on what was accepted, and not on siblings that carry it as well."""
    params = SamplingParams(temperature=0, frequency_penalty=0.6)
    sequence = [*PROMPT, 4]
    expected, entries = [], []
    for _ in range(6):
        logits = logits_of(sequence[-1], 0)
        entries.append(logits.log_softmax(0))
        logits = logits - 0.6 * torch.bincount(torch.tensor(sequence[3:]), minlength=VOCAB)
        expected.append(int(logits.argmax()))
        sequence.append(expected[-1])
    assert expected == [4, 5, 5, 6, 6, 7]
    path = tree((4, -1), (4, -1), (4, 0), (5, 0), (5, 0), (5, 3), (6, 5), (5, 5), (6, 6))
    verified = Verified([path], [params], [(*PROMPT, 4)], num_logprobs=1, likely=0)
    assert verified.output.token_ids == expected
    assert verified.asked == [[0], [1], [4], [6], [7], [9]]
    assert verified.output.logprobs is not None
    for token, logprobs, entry in zip(expected, entries, verified.output.logprobs, strict=True):
        assert entry is not None  # the model's own, before any penalty
        assert entry.sampled == pytest.approx(float(logprobs[token]))
        assert entry.top == ((int(logprobs.argmax()), pytest.approx(float(logprobs.max()))),)
    for position, token in enumerate(sequence[:-1]):  # as the next step's root, and all before it
        verified.sampler.observe(0, position, token)
    for token in (4, 5, 6):  # each counts twice: two penalties of 0.6
        for logit, wins in ((1.3, True), (1.1, False)):
            logits = torch.zeros(1, VOCAB)
            logits[0, token] = logit
            next_place = np.array([len(sequence)])
            result = verified.sampler.sample(logits, np.zeros(1, int), next_place, np.ones(1, int))
            assert (int(result.token_ids[0]) == token) == wins


@pytest.mark.parametrize("stops", [False, True])
def test_a_users_processor_raises_further_down(stops: bool) -> None:
    calls: list[int] = []

    def processor(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append(len(output_ids))
        if len(output_ids) >= 3:
            raise ValueError("no more")
        return logits

    params = SamplingParams(
        temperature=0, logits_processors=[processor], stop_token_ids=[6] if stops else []
    )
    chain = tree((5, -1), (6, 0), (7, 1), (8, 2))
    verified = Verified([chain], [params], [(*PROMPT, 4)])
    assert verified.output.token_ids == [5, 6] and verified.output.errors == {}
    assert calls == ([1, 2] if stops else [1, 2, 3])
    step: Any = np.zeros(1, np.int32)
    verified.sampler.observe(0, 5, 6)
    result = verified.sampler.sample(logits_of(6).unsqueeze(0), step, step + 6, step + 1)
    assert calls == [1, 2, 3]  # it is not asked again
    assert result.errors == {0: "logits processor processor raised ValueError: no more"}


def test_an_error_at_the_root_is_reported_at_once() -> None:
    def processor(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise ValueError("never")

    params = SamplingParams(temperature=0, logits_processors=[processor])
    chain = tree((5, -1), (6, 0))
    verified = Verified([chain, chain], [params, GREEDY], [(*PROMPT, 4)] * 2)
    assert list(verified.output.errors) == [0]
    assert verified.output.num_tokens == [1, 3]
    assert verified.output.token_ids[1:] == [5, 6, 7]
