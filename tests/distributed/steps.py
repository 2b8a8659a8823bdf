"""Random steps, as Hypothesis strategies."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.grammar import Grammar
from hetero_llm.core.lora import AdapterLoad, AdapterRef, LoRARequest
from hetero_llm.core.sampling_params import RequestOutputKind, SamplingParams
from hetero_llm.core.step import AdmittedSequence, PromptLogprobSpan, SchedulerOutput

INT32 = st.integers(-(2**31), 2**31 - 1)
NUMBERS = st.integers(0, 2**31 - 1)
_TEXT = st.text(max_size=12)


def int32s(*shape: int) -> st.SearchStrategy[np.ndarray]:
    return arrays.arrays(np.int32, shape, elements=INT32)


PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 3),
    presence_penalty=st.floats(-2, 2),
    temperature=st.floats(0, 4),
    top_p=st.floats(0.1, 1.0),
    top_k=st.sampled_from([-1, 1, 50]),
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), max_size=2),
    stop_token_ids=st.lists(NUMBERS, max_size=2),
    max_tokens=st.none() | st.integers(1, 9),
    logprobs=st.none() | st.integers(0, 5),
    prompt_logprobs=st.none() | st.integers(0, 5),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-100, 100), min_size=1),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=3),
    output_kind=st.sampled_from(RequestOutputKind),
    no_repeat_ngram_size=st.integers(0, 4),
)

GRAMMARS = st.builds(Grammar, _TEXT, st.lists(NUMBERS, max_size=3).map(tuple), st.none() | NUMBERS)

ADMITTED = st.builds(
    AdmittedSequence,
    request_slot=NUMBERS,
    token_ids=st.lists(INT32, max_size=30).map(lambda ids: array("i", ids)),
    num_prompt_tokens=NUMBERS,
    params=PARAMS,
    seed=st.integers(0, 2**64 - 1),
    sample_index=NUMBERS,
    num_logprobs=st.none() | NUMBERS,
    num_prompt_logprobs=NUMBERS,
    end_ids=st.lists(NUMBERS, max_size=3).map(tuple),
    bad_word_ids=st.lists(st.lists(NUMBERS, max_size=2).map(tuple), max_size=2).map(tuple),
    grammar=st.none() | GRAMMARS,
    adapter_slot=st.integers(-1, 3),
)

ADAPTER_LOADS = st.builds(
    AdapterLoad,
    st.integers(0, 3),
    st.builds(
        AdapterRef,
        st.builds(LoRARequest, st.just("name"), st.integers(1, 9), st.just("/folder")),
        st.just("ab" * 32),
        st.integers(1, 64),
    ),
)


@st.composite
def steps(draw: st.DrawFn) -> SchedulerOutput:
    """Steps in the form of real ones; their numbers mean nothing."""
    count, writes, copies = (draw(st.integers(0, 5)) for _ in range(3))
    tokens = draw(st.integers(0, 40))
    drafts = None
    if draw(st.booleans()):
        nodes = draw(st.integers(0, 20))
        drafts = DraftBatch(
            draw(int32s(count)), draw(int32s(nodes)), draw(int32s(nodes))
        )  # fmt: skip
    block_table_writes = draw(int32s(3, writes))
    if draw(st.booleans()):  # a view that is not contiguous, as of a larger buffer
        block_table_writes = np.concatenate([block_table_writes, block_table_writes], axis=1)[
            :, :writes
        ]
    plain = draw(st.booleans())
    spans = st.lists(st.builds(PromptLogprobSpan, NUMBERS, NUMBERS, NUMBERS), max_size=2)
    return SchedulerOutput(
        request_slots=draw(int32s(count)),
        num_computed_tokens=draw(int32s(count)),
        num_scheduled_tokens=draw(int32s(count)),
        token_ids=draw(int32s(tokens)),
        num_samples=draw(int32s(count)),
        prompt_logprob_spans=() if plain else tuple(draw(spans)),
        admitted=() if plain else tuple(draw(st.lists(ADMITTED, max_size=2))),
        block_table_writes=block_table_writes,
        block_copies=draw(int32s(2, copies)),
        drafts=drafts,
        kv_loads=() if plain else tuple(draw(st.lists(NUMBERS, max_size=2))),
        adapter_loads=() if plain else tuple(draw(st.lists(ADAPTER_LOADS, max_size=2))),
    )


def assert_same(one: SchedulerOutput, other: SchedulerOutput) -> None:
    """All fields are equal, of the same types."""
    for name in SchedulerOutput.__slots__:
        ours, theirs = getattr(one, name), getattr(other, name)
        if name == "drafts" and ours is not None and theirs is not None:
            for field in ("counts", "token_ids", "parents"):
                assert_same_array(getattr(ours, field), getattr(theirs, field))
        elif isinstance(ours, np.ndarray):
            assert_same_array(ours, theirs)
        else:
            assert ours == theirs, name


def assert_same_array(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == theirs.dtype == np.int32 and ours.shape == theirs.shape
    assert (ours == theirs).all()
