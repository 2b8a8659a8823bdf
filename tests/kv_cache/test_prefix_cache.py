"""The prefix cache saves work and never changes what comes out."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero_llm import LLM, RequestOutput, SamplingParams
from hetero_llm.kv_cache import prefix_cache
from hetero_llm.kv_cache.prefix_cache import PrefixCache, block_contents, hash_block, hash_root

BLOCK = 8
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)


@pytest.fixture(autouse=True)
def one_thread(two_threads: None) -> None:
    """Nothing here is large enough for a second thread."""
    torch.set_num_threads(1)


def start(folder: Path, **engine_args: Any) -> LLM:
    return LLM(
        str(folder),
        dtype="float32",
        device="cpu",
        block_size=BLOCK,
        batch_invariant=True,
        **engine_args,
    )


def generate(
    llm: LLM, prompts: list[list[int]], params: Any = GREEDY, salt: str | None = None
) -> list[RequestOutput]:
    dicts = [{"prompt_token_ids": p, "cache_salt": salt} for p in prompts]
    return llm.generate(dicts, params, use_tqdm=False)


def seen(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens and log-probabilities, which are equal to the last bit or not at all."""
    return [[(c.token_ids, c.logprobs) for c in o.outputs] for o in outputs]


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> Iterator[LLM]:
    with start(tiny_folder, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def shared(tiny_folder: Path) -> Iterator[LLM]:
    """Caches, with so few blocks that prefixes are evicted all the time."""
    with start(tiny_folder, max_model_len=40, num_gpu_blocks_override=9, max_num_seqs=3) as llm:
        yield llm


@pytest.fixture
def cached(tiny_folder: Path) -> Iterator[LLM]:
    with start(tiny_folder) as llm:
        yield llm


# Prompts of a few pieces each, so that they share prefixes of all lengths; two are whole blocks, so
# that equal blocks follow different ones.
PIECES = [[10] * BLOCK, [11] * BLOCK, [12] * (BLOCK + 1)]
PROMPTS = st.lists(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map(lambda pieces: sum(pieces, [])),
    min_size=1,
    max_size=5,
)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(prompts=PROMPTS, samples=st.sampled_from([1, 1, 2]), cut=st.integers(0, 6))
def test_output_is_the_same_with_and_without(
    plain: LLM, shared: LLM, prompts: list[list[int]], samples: int, cut: int
) -> None:
    prompts = [p[: len(p) - cut] for p in prompts]
    params = GREEDY
    if samples > 1:  # forks on top of shared prefixes
        params = dataclasses.replace(params, n=samples, temperature=1.0, seed=cut)
    expected = generate(plain, prompts, params)
    outputs = generate(shared, prompts, params)
    assert seen(outputs) == seen(expected)
    assert [o.num_cached_tokens for o in expected] == [0] * len(prompts)


def test_that_comparison_had_hits_evictions_and_preemptions(shared: LLM, plain: LLM) -> None:
    prompts = [[token] * 27 for token in (20, 21, 22)]
    longer = dataclasses.replace(GREEDY, max_tokens=12)
    before = shared.metrics()
    generate(shared, prompts[:1])
    (hit,) = generate(shared, prompts[:1])
    outputs = generate(shared, prompts, longer)
    (evicted,) = generate(shared, prompts[:1])
    assert hit.num_cached_tokens == 24
    assert evicted.num_cached_tokens < 24
    assert shared.metrics()["num_preemptions"] > before["num_preemptions"]
    assert seen(outputs) == seen(generate(plain, prompts, longer))


def test_a_repeated_prompt_is_taken_from_the_cache_but_for_its_last_token(cached: LLM) -> None:
    """In whole blocks; of the last one a copy, if it is full."""
    for length, expected in ((1, 0), (BLOCK, 7), (BLOCK + 1, 8), (2 * BLOCK, 15), (30, 24)):
        prompt = list(range(100, 100 + length))
        cached.reset_prefix_cache()
        (cold,), (warm,) = generate(cached, [prompt]), generate(cached, [prompt])
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, expected)
        assert seen([warm]) == seen([cold])


def test_generated_tokens_are_cached_too(cached: LLM) -> None:
    prompt = list(range(50, 62))
    (first,) = generate(cached, [prompt])
    (second,) = generate(cached, [prompt + first.outputs[0].token_ids])
    assert second.num_cached_tokens == 16  # of 12 + 5


def test_a_salt_is_a_namespace_of_its_own(cached: LLM) -> None:
    prompt = [list(range(40, 60))]
    outputs = {
        salt: (generate(cached, prompt, salt=salt)[0], generate(cached, prompt, salt=salt)[0])
        for salt in (None, "tenant a", "tenant b")
    }
    for cold, warm in outputs.values():
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 16)
        assert seen([cold]) == seen([warm]) == seen([outputs[None][0]])


def test_reset_forgets_everything_and_serving_goes_on(cached: LLM) -> None:
    prompt = [list(range(40, 60))]
    expected = generate(cached, prompt)
    cached.reset_prefix_cache()
    (cold,), (warm,) = generate(cached, prompt), generate(cached, prompt)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 16)
    assert seen([warm]) == seen(expected)


def test_a_reset_while_a_request_runs_does_not_disturb_it(cached: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(40, 60))}
    whole = cached.generate(prompt, GREEDY, use_tqdm=False)
    stream = cached.stream(prompt, GREEDY)
    next(stream)
    cached.reset_prefix_cache()
    *_, last = stream
    assert seen([last]) == seen(whole)
    (after,) = cached.generate(prompt, GREEDY, use_tqdm=False)
    assert seen([after]) == seen(whole)


def test_requests_of_one_batch_share_what_earlier_steps_computed(tiny_folder: Path) -> None:
    prompt = list(range(40, 72))
    with start(tiny_folder, max_num_seqs=1) as llm:
        outputs = generate(llm, [prompt] * 3)
    assert [o.num_cached_tokens for o in outputs] == [0, 31, 31]


def test_prompt_logprobs_are_complete_although_the_prompt_is_cached(cached: LLM) -> None:
    params = dataclasses.replace(GREEDY, prompt_logprobs=1)
    prompt = [list(range(40, 60))]
    cold, warm = generate(cached, prompt, params), generate(cached, prompt, params)
    assert len(warm[0].prompt_logprobs) == 20
    assert warm[0].prompt_logprobs == cold[0].prompt_logprobs
    assert seen(warm) == seen(cold)


def test_metrics_count_tokens_asked_for_and_found(cached: LLM) -> None:
    generate(cached, [list(range(40, 60))])
    metrics = cached.metrics()
    assert (metrics["prefix_cache_queries"], metrics["prefix_cache_hits"]) == (20, 0)
    generate(cached, [list(range(40, 60)), list(range(40, 58)) + [7]])
    metrics = cached.metrics()
    assert (metrics["prefix_cache_queries"], metrics["prefix_cache_hits"]) == (59, 32)
    assert metrics["kv_cache_usage_perc"] == 0.0


def test_without_caching_nothing_is_found(plain: LLM) -> None:
    before = plain.metrics()["prefix_cache_hits"]
    generate(plain, [list(range(40, 60))])
    (again,) = generate(plain, [list(range(40, 60))])
    assert again.num_cached_tokens == 0
    assert plain.metrics()["prefix_cache_hits"] == before == 0


# -- the map itself -------------------------------------------------------------------------

ROOT = hash_root()


def contents(*blocks: list[int]) -> list[bytes]:
    return [prefix_cache.token_bytes(tokens) for tokens in blocks]


@pytest.mark.parametrize(
    "extras",
    [("salt", "a\0images\0k"), ("salt\0a", "images", "k"), ("salt", "a", "images\0k"),
     ("salt", "a", "images", "k", "")],
)  # fmt: skip
def test_no_extra_imitates_others(extras: tuple[str, ...]) -> None:
    """A user chooses the salt."""
    assert hash_root(extras) != hash_root(("salt", "a", "images", "k"))
    assert hash_root(("adapter", "x")) != hash_root() != hash_root(("",))


def test_a_key_hashes_the_parent_and_four_bytes_per_token() -> None:
    tokens = bytes.fromhex("01000000 ff000000 00010000 ffffff7f")
    assert hash_block(ROOT, [1, 255, 256, 2**31 - 1]) == sha256(ROOT + tokens).digest()
    with pytest.raises(struct.error):
        hash_block(ROOT, [2**31])


@pytest.mark.parametrize("size", [8, 16, 4096])
def test_contents_of_a_long_sequence_are_its_blocks(size: int) -> None:
    tokens = list(range(3 * 4096 + 5))
    last = len(tokens) // size
    expected = [struct.pack(f"<{size}i", *tokens[i * size :][:size]) for i in range(last)]
    assert list(block_contents(tokens, size, 0, last)) == expected
    assert list(block_contents(tokens, size, 1, last)) == expected[1:]
    assert list(block_contents(tokens, size, last, last)) == []
    packed = prefix_cache.token_bytes(tokens)
    for at_hand in (0, 4 * size - 1, 4 * size, 4 * 5000, 4 * len(tokens)):
        assert list(block_contents(tokens, size, 1, last, packed[:at_hand])) == expected[1:]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=0, max_size=6),  # a block each
            st.integers(0, 40),  # tokens that are packed
            st.sampled_from(["find", "find", "find", "cache", "evict"]),
            st.sampled_from(["", "salt"]),
        ),
        max_size=40,
    )
)
def test_what_begins_like_the_last_sequence_is_found_all_the_same(calls: list[tuple]) -> None:
    cache, size = PrefixCache(), 4
    for number, (kinds, at_hand, call, salt) in enumerate(calls):
        tokens = [kind for kind in kinds for _ in range(size)] + [9]
        packed = prefix_cache.token_bytes(tokens[:at_hand])
        root = hash_root((salt,))
        pieces = list(block_contents(tokens, size, 0, len(kinds)))
        if call == "cache":
            cache.cache(root, pieces, range(100 * number, 100 * number + len(kinds)))
        elif call == "evict":
            blocks, _ = cache.match(root, pieces)
            if blocks:
                cache.evict(blocks[-1:])
        else:
            assert cache.find(root, tokens, size, packed) == cache.match(root, pieces)


def test_a_match_ends_at_the_first_block_that_is_not_published() -> None:
    cache = PrefixCache()
    keys = cache.cache(ROOT, contents([1, 2], [3, 4], [5, 6]), [7, 8, 9])
    assert keys[0] == hash_block(ROOT, [1, 2])
    assert keys[1:] == [hash_block(keys[0], [3, 4]), hash_block(keys[1], [5, 6])]
    rest = iter(contents([1, 2], [3, 4], [0, 0], [5, 6]))
    assert cache.match(ROOT, rest) == ([7, 8], keys[:2])
    assert list(rest) == contents([5, 6]), "read further than needed"
    assert cache.match(keys[0], contents([3, 4])) == ([8], [keys[1]])
    assert cache.match(hash_root(("salt", "a")), contents([1, 2])) == ([], [])
    cache.evict([8])
    assert cache.match(ROOT, contents([1, 2], [3, 4], [5, 6])) == ([7], keys[:1])
    assert cache.cache(keys[0], contents([3, 4]), [8]) == [keys[1]]
    assert cache.match(ROOT, contents([1, 2], [3, 4], [5, 6])) == ([7, 8, 9], keys)


def test_the_first_block_with_a_prefix_stays_the_one() -> None:
    cache = PrefixCache()
    keys = cache.cache(ROOT, contents([1, 2], [3, 4]), [7, 8])
    assert cache.cache(ROOT, contents([1, 2], [3, 4], [5, 6]), [4, 5, 6])[:2] == keys
    assert cache.uncached([4, 8, 5, 6]) == [4, 5]
    assert cache.match(ROOT, contents([1, 2], [3, 4], [5, 6]))[0] == [7, 8, 6]


def test_only_blocks_published_for_the_first_time_are_hashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[bytes] = []

    def counted(source: bytes) -> Any:
        hashed.append(source)
        return sha256(source)

    monkeypatch.setattr(prefix_cache, "sha256", counted)
    cache = PrefixCache()
    cache.cache(ROOT, contents([1, 2], [3, 4]), [0, 1])
    assert len(hashed) == 2
    cache.match(ROOT, contents([1, 2], [3, 4], [5, 6]))
    cache.cache(ROOT, contents([1, 2], [3, 4]), [2, 3])
    assert len(hashed) == 2
