"""The sampler: distributions by chi-square, supports, and every processor by its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_llm.core.grammar import Grammar
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import AdmittedSequence
from hetero_llm.sampling import processors
from hetero_llm.sampling.sampler import Sampler, most_likely, token_logprobs

VOCAB = 8
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.3, 0.0, -0.7, -1.0, -2.0])
CHI2_999 = {3: 16.27, 7: 24.32}  # 99.9% quantiles by degrees of freedom


def state(params: SamplingParams, *, slot: int = 0, **fields: object) -> AdmittedSequence:
    values: dict = {"token_ids": (1, 2, 3), "num_prompt_tokens": 2, "seed": 0, "sample_index": 0}
    return AdmittedSequence(request_slot=slot, params=params, **(values | fields))


def sample_many(params: SamplingParams, count: int) -> np.ndarray:
    """Histogram of `count` samples, each at another position."""
    sampler = Sampler(1, VOCAB, torch.device("cpu"))
    sampler.admit(state(params))
    result = sampler.sample(
        LOGITS.expand(count, -1),
        np.zeros(count, np.int32),
        np.arange(count, dtype=np.int32),
        np.ones(count, np.int32),
    )
    return np.bincount(result.token_ids.numpy(), minlength=VOCAB)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    inside = probs > 0
    assert counts[~inside].sum() == 0, "a token outside the support was sampled"
    expected = probs[inside] * counts.sum()
    return float(((counts[inside] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_temperature_gives_the_softmax_distribution(temperature: float) -> None:
    probs = (LOGITS / temperature).softmax(-1).double().numpy()
    counts = sample_many(SamplingParams(temperature=temperature, seed=11), 20000)
    assert chi_square(counts, probs) < CHI2_999[7]


def test_top_k_renormalises_over_k_tokens() -> None:
    probs = np.zeros(VOCAB)
    probs[:4] = LOGITS[:4].softmax(-1).double().numpy()
    assert chi_square(sample_many(SamplingParams(top_k=4, seed=3), 20000), probs) < CHI2_999[3]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    full = LOGITS.softmax(-1).double().numpy()
    assert full[:3].sum() < 0.85 <= full[:4].sum()
    probs = np.where(np.arange(VOCAB) < 4, full, 0) / full[:4].sum()
    assert chi_square(sample_many(SamplingParams(top_p=0.85, seed=4), 20000), probs) < CHI2_999[3]


def test_min_p_drops_tokens_relative_to_the_best() -> None:
    full = LOGITS.softmax(-1).double().numpy()
    kept = full >= 0.15 * full.max()
    assert kept.sum() == 4
    probs = np.where(kept, full, 0) / full[kept].sum()
    assert chi_square(sample_many(SamplingParams(min_p=0.15, seed=5), 20000), probs) < CHI2_999[3]


def test_a_tiny_top_p_leaves_the_best_token() -> None:
    assert sample_many(SamplingParams(top_p=1e-6, seed=1), 100)[0] == 100


def test_restrictions_of_one_row_do_not_touch_another() -> None:
    logits = LOGITS.expand(2, -1).clone()
    restricted = processors.restrict_support(
        logits, torch.tensor([2, VOCAB]), torch.tensor([2.0, 2.0]), torch.tensor([0.0, 0.0])
    )
    assert torch.isinf(restricted[0]).sum() == VOCAB - 2
    assert torch.equal(restricted[1], LOGITS)


def test_samples_do_not_depend_on_the_batch() -> None:
    params = [SamplingParams(temperature=t, top_p=p, seed=9) for t, p in ((1, 1), (0.8, 0.9))]
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))

    def run(rows: list[int]) -> list[int]:
        sampler = Sampler(6, VOCAB, torch.device("cpu"))
        for slot in rows:
            sampler.admit(state(params[slot % 2], slot=slot))
        array = np.array(rows, np.int32)
        result = sampler.sample(logits[rows], array, array + 10, np.ones(len(rows), np.int32))
        return result.token_ids.tolist()

    together = run(list(range(6)))
    assert [run([slot])[0] for slot in range(6)] == together
    assert run([5, 3, 1]) == [together[5], together[3], together[1]]


def test_a_forking_row_samples_one_token_per_sample_index() -> None:
    sampler = Sampler(2, VOCAB, torch.device("cpu"))
    params = SamplingParams(n=5, seed=2)
    sampler.admit(state(params))
    slots, positions = np.array([0], np.int32), np.array([4], np.int32)
    sampled = sampler.sample(LOGITS[None], slots, positions, np.array([5], np.int32)).token_ids
    for index in range(5):
        sampler.admit(state(params, slot=1, sample_index=index))
        one = sampler.sample(LOGITS[None], slots + 1, positions, np.array([1], np.int32))
        assert int(one.token_ids[0]) == int(sampled[index])
    assert len(set(sampled.tolist())) > 1


def test_penalties_follow_their_definitions() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    logits = LOGITS.clone()
    seen = torch.tensor([True, False, True, False, False, True, False, False])
    counts = torch.tensor([0.0, 0, 3, 0, 0, 1, 0, 0])
    processors.apply_penalties(logits, params, seen, counts)
    expected = LOGITS.clone()
    expected[0] = 2.0 / 2
    expected[2] = 1.0 / 2 - 0.5 * 3 - 0.25
    expected[5] = -0.7 * 2 - 0.5 - 0.25
    torch.testing.assert_close(logits, expected)


def test_no_repeat_ngram_forbids_exactly_the_completions() -> None:
    logits = torch.zeros(VOCAB)
    processors.forbid_repeated_ngrams(logits, 3, [1, 2, 3, 1, 2, 4, 1, 2])
    assert torch.isinf(logits).nonzero().flatten().tolist() == [3, 4]
    logits = torch.zeros(VOCAB)
    processors.forbid_repeated_ngrams(logits, 1, [1, 5])
    assert torch.isinf(logits).nonzero().flatten().tolist() == [1, 5]
    logits = torch.zeros(VOCAB)
    processors.forbid_repeated_ngrams(logits, 4, [1, 2, 3])
    assert not torch.isinf(logits).any()


def test_bad_words_of_several_tokens_need_their_beginning() -> None:
    logits = torch.zeros(VOCAB)
    processors.forbid_bad_words(logits, [(6,), (1, 2, 3), (2, 2, 4)], [0, 1, 2])
    assert torch.isinf(logits).nonzero().flatten().tolist() == [3, 6]


def test_logprobs_are_the_raw_models() -> None:
    sampler = Sampler(1, VOCAB, torch.device("cpu"))
    params = SamplingParams(temperature=0.3, logit_bias={7: 100.0}, logprobs=2, seed=0)
    sampler.admit(state(params, num_logprobs=2))
    one = np.ones(1, np.int32)
    result = sampler.sample(LOGITS[None], one * 0, one * 3, one)
    (entry,) = result.logprobs.to_host()
    expected = LOGITS.log_softmax(-1)
    assert int(result.token_ids[0]) == 7
    assert entry.sampled == pytest.approx(float(expected[7]))
    assert entry.rank == 8
    assert [token for token, _ in entry.top] == [0, 1]
    assert entry.top[0][1] == pytest.approx(float(expected[0]))


def test_slots_are_plain_until_one_needs_more_than_its_own_logits() -> None:
    sampler = Sampler(3, VOCAB, torch.device("cpu"))
    plain, penalty = SamplingParams(top_p=0.5), SamplingParams(presence_penalty=1.0)
    sampler.admit(state(plain, slot=0))
    assert sampler.all_plain
    for special in (state(penalty, slot=1), state(plain, slot=1, num_logprobs=0)):
        sampler.admit(special)
        assert not sampler.all_plain
        assert sampler.is_plain(np.array([0, 2])) and not sampler.is_plain(np.array([0, 1]))
        sampler.admit(state(plain, slot=1))
        assert sampler.all_plain and sampler.is_plain(np.array([0, 1]))


def test_a_failing_user_processor_names_only_its_slot() -> None:
    def broken(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")

    sampler = Sampler(2, VOCAB, torch.device("cpu"))
    sampler.admit(state(SamplingParams(temperature=0, logits_processors=[broken])))
    sampler.admit(state(SamplingParams(temperature=0), slot=1))
    two = np.ones(2, np.int32)
    result = sampler.sample(LOGITS.expand(2, -1), np.array([0, 1]), two * 3, two)
    assert list(result.errors) == [0]
    assert "boom" in result.errors[0]
    assert int(result.token_ids[1]) == 0


@pytest.mark.parametrize("count", [0, 1, 2, 5, 39, 40])
@pytest.mark.parametrize("distinct", [1, 2, 3, 12, 10**6])
def test_of_equal_tokens_the_lower_id_comes_first(count: int, distinct: int) -> None:
    generator = torch.Generator().manual_seed(distinct)
    logprobs = -torch.randint(0, distinct, (40, 40), generator=generator).float()
    logprobs[0, ::2] = float("-inf")
    ids, values = most_likely(logprobs, count)
    for row, found, high in zip(logprobs.tolist(), ids.tolist(), values.tolist(), strict=True):
        order = sorted(range(40), key=lambda token: (-row[token], token))[:count]
        assert found == order and high == [row[token] for token in order]


def test_equal_tokens_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 0.0]])
    ranks = [token_logprobs(logits, torch.tensor([t]), [0]).rank.item() for t in range(6)]
    assert ranks == [5, 1, 3, 1, 3, 6]


def test_what_a_slot_observes_ends_with_its_sequence() -> None:
    sampler = Sampler(2, VOCAB, torch.device("cpu"))
    plain = SamplingParams()
    sampler.admit(state(plain, slot=0))
    assert not sampler.has_history and sampler.all_plain
    sampler.admit(state(plain, slot=0, grammar=Grammar("x", ())))
    assert sampler.has_history and sampler.all_plain and not sampler.has_processors
    sampler.admit(state(SamplingParams(repetition_penalty=2.0), slot=1))
    sampler.admit(state(plain, slot=0))
    assert sampler.has_history and not sampler.all_plain and sampler.has_processors
    sampler.admit(state(plain, slot=1))
    assert not sampler.has_history and sampler.all_plain
