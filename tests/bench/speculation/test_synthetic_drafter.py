"""The synthetic drafter accepts exactly as many tokens per step as `right` says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.speculation.synthetic_drafter import SyntheticDrafter
from hetero_llm import SamplingParams
from hetero_llm.core.request import Sequence
from tests.helpers.harness import VOCAB, expected_output, make_request
from tests.helpers.traffic import make_engine, run_all

PARAMS = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True, detokenize=False)
PROMPTS = ([1, 2, 3], [4, 5], [6] * 9)


@pytest.mark.parametrize(("right", "nodes"), [(0, 3), (3, 7), (7, 7)])
def test_every_step_accepts_the_right_nodes(right: int, nodes: int) -> None:
    requests = [make_request(str(i), prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]
    plain = run_all(make_engine(True, max_num_batched_tokens=64), requests)
    record = {
        tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in plain.values()
    }
    drafter = SyntheticDrafter(record, right=right, nodes=nodes, vocab_size=VOCAB)
    served = make_engine(True, max_num_batched_tokens=64, drafter=drafter)
    requests = [make_request(str(i), prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]
    outputs = run_all(served, requests)
    for name, output in outputs.items():
        assert output.outputs[0].token_ids == plain[name].outputs[0].token_ids
    metrics = served.engine.metrics()
    assert metrics["num_steps"] == 1 + 24 / (right + 1)  # one token from the prompt, 24 to go
    assert metrics["spec_decode_num_accepted_tokens"] == 3 * right * 24 // (right + 1)
    assert drafter.num_open == 0


def test_drafts() -> None:
    drafter = SyntheticDrafter({(1, 2): [7, 8, 49, 5]}, right=1, nodes=3, vocab_size=VOCAB)

    def draft(tokens: list[int], max_nodes: int = 9, sample: int = 0) -> list[int]:
        request = make_request(str(tokens[:2]), tokens[:2], PARAMS)
        batch = drafter.propose([Sequence(request, sample, tokens, 2)], [max_nodes], 1)
        assert batch.counts.tolist() == [len(batch.token_ids)]
        assert batch.parents.tolist() == list(range(-1, len(batch.token_ids) - 1))
        return batch.token_ids.tolist()

    assert draft([1, 2]) == [7, 9, 0]  # the token after 49 is 0
    assert draft([1, 2, 7]) == [8, 0, 6]
    assert draft([1, 2, 7], max_nodes=2) == [8, 0]
    assert draft([1, 2, 7, 8, 49]) == [5]
    assert draft([1, 2, 7, 8, 49, 5]) == []
    assert draft([1, 2, 7], sample=1) == []
    assert draft([1, 3, 7]) == []


@pytest.mark.parametrize(("right", "nodes"), [(-1, 3), (4, 3), (0, 0), (3, 64)])
def test_wrong_numbers(right: int, nodes: int) -> None:
    with pytest.raises(ValueError, match=f"right={right}, nodes={nodes}"):
        SyntheticDrafter({}, right=right, nodes=nodes, vocab_size=VOCAB)


def test_a_request_that_went_another_way_still_gets_its_own_tokens() -> None:
    record = {tuple(prompt): [9] * 25 for prompt in PROMPTS}
    drafter = SyntheticDrafter(record, right=4, nodes=5, vocab_size=VOCAB)
    served = make_engine(True, drafter=drafter)
    params = replace(PARAMS, n=2, temperature=1.0)
    outputs = run_all(served, [make_request("a", PROMPTS[0], params)])
    for index, completion in enumerate(outputs["a"].outputs):
        assert completion.token_ids == expected_output(PROMPTS[0], params, index)
