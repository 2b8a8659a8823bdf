"""Log-probabilities as users get them; texts are tested in test_stop_strings.py."""

from __future__ import annotations

from array import array

from hetero_llm.core.request import FinishReason, Sequence
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import SampleLogprobs
from hetero_llm.engine.output_processor import OutputProcessor
from tests.helpers.harness import make_request
from tests.helpers.tokenizers import TOKENIZERS

PROMPT = [100, 101]


def test_tokens_of_equal_log_probability_share_a_rank() -> None:
    """Those of the output and of the prompt; the token itself comes first, then the best."""
    entry = SampleLogprobs(-2.0, 3, ((7, -1.0), (9, -1.0), (5, -2.0), (8, -2.0)))
    params = SamplingParams(max_tokens=1, logprobs=4, prompt_logprobs=4)
    request = make_request("a", PROMPT, params)
    sequence = Sequence(request, 0, array("i", [*PROMPT, 8]), len(PROMPT), logprobs=[entry])
    sequence.finish_reason = FinishReason.LENGTH
    request.sequences, request.prompt_logprobs = [sequence], [None, entry]
    processor = OutputProcessor(TOKENIZERS["byte_level", "fast"], lambda *_: None)
    (output,) = processor.process([sequence])
    assert output.outputs[0].logprobs is not None and output.prompt_logprobs is not None
    (sampled,), (nothing, scored) = output.outputs[0].logprobs, output.prompt_logprobs
    assert nothing is None
    ranks = [(token, entry.rank) for token, entry in sampled.items()]
    assert ranks == [(8, 3), (7, 1), (9, 1), (5, 3)]
    assert [(token, entry.rank) for token, entry in scored.items()] == [
        (101, 3),
        *ranks[1:],
        (8, 3),
    ]
