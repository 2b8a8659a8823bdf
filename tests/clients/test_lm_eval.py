"""lm_eval through the server says what the offline `LLM` says, whether the server drafts or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_llm import LLM, SamplingParams
from tests.clients.conftest import scores
from tests.clients.environments import HERE, IN_TIME, needs, run_script
from tests.clients.matrix import Table
from tests.clients.servers import KEY, MODEL, samples

pytestmark = IN_TIME

pytestmark = needs("lm_eval")
TASKS = ("code_choice", "code_word", "code_line")
SCORED = TASKS[:2]


@pytest.fixture(scope="module", params=["url", "drafting_url"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """lm_eval's own record of its questions and their answers."""
    setup = {
        "url": request.getfixturevalue(request.param),
        "key": KEY,
        "model": MODEL,
        "tasks": str(HERE / "tasks"),
        "names": TASKS,
    }
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    home: Path = tmp_path_factory.mktemp("lm_eval")
    # Short texts that the cache has not seen get no drafts on a CPU: the answers are those of the
    # second time.
    for _ in range(2 if request.param == "drafting_url" else 1):
        result = run_script("lm_eval", "drive_lm_eval.py", setup, home, offline)
    drafts = samples(setup["url"], "vllm:spec_decode_num_drafts_total")
    assert (sum(drafts.values()) > 0) == (request.param == "drafting_url")
    return {**result, "server": request.param}


def test_scores(found: Any, offline: LLM, table: Table) -> None:
    encode = offline.get_tokenizer().encode
    worst, flags = 0.0, []
    for name in SCORED:
        assert len(found["samples"][name]) == 12
        for sample in found["samples"][name]:
            for (context, end), answers in zip(sample["arguments"], sample["answers"], strict=True):
                # A space between the two belongs to the end; lm_eval does the same.
                start = context.rstrip()
                whole, first = encode(context + end), len(encode(start))
                theirs = scores(offline, whole)[first - 1 :]
                logprob, greedy = answers[0]
                assert logprob < 0
                worst = max(worst, abs(logprob - sum(one for one, _ in theirs)))
                assert greedy == all(likeliest for _, likeliest in theirs), (context, end)
                flags.append(greedy)
    assert worst <= 1e-4
    assert len(flags) == 48 and len(set(flags)) == 2
    server = {"url": "plain server", "drafting_url": "drafting server"}[found["server"]]
    table.sums[f"lm_eval ({found['version']}), {server}"] = {
        "log-probabilities": len(flags), "greedy": sum(flags), "the largest difference": worst,
    }  # fmt: skip


def test_generated_lines(found: Any, offline: LLM) -> None:
    asked = [sample["arguments"][0][0] for sample in found["samples"]["code_line"]]
    given = [sample["answers"][0] for sample in found["samples"]["code_line"]]
    params = SamplingParams(temperature=0, max_tokens=24, stop=["\n"])
    outputs = offline.generate(asked, params, use_tqdm=False)
    assert [one[0] for one in given] == [output.outputs[0].text for output in outputs]
    assert len({one[0] for one in given}) > 6


def test_its_own_sums(found: Any) -> None:
    """The demo model knows some Python."""
    assert found["scores"]["code_choice"]["acc,none"] > 0.5
