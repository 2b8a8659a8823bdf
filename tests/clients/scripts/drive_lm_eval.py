"""lm_eval over /v1/completions, with a local data set and the server's own tokenizer."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager


def main() -> None:
    given, found = map(Path, sys.argv[1:])
    setup = json.loads(given.read_text())
    os.environ["OPENAI_API_KEY"] = setup["key"]  # of completions; the tokenizer's is an argument
    os.chdir(setup["tasks"])  # where the YAML files' paths begin
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": setup["model"],
            "base_url": f"{setup['url']}/v1/completions",
            "auth_token": setup["key"],
            "num_concurrent": 4,
            "batch_size": 3,
            "max_length": 128,
        },
        tasks=setup["names"],
        task_manager=TaskManager(include_path=setup["tasks"], include_defaults=False),
        num_fewshot=0,
        bootstrap_iters=0,
        log_samples=True,
    )
    assert results is not None
    samples = {
        name: [_sample(one) for one in sorted(ones, key=lambda one: one["doc_id"])]
        for name, ones in results["samples"].items()
    }
    scores = {
        name: {key: value for key, value in values.items() if isinstance(value, float)}
        for name, values in results["results"].items()
    }
    answer = {"version": version("lm_eval"), "samples": samples, "scores": scores}
    found.write_text(json.dumps(answer))


def _sample(one: dict[str, Any]) -> dict[str, Any]:
    """What was asked and what came back, in the same order."""
    arguments = one["arguments"]
    if isinstance(arguments, dict):  # by name, in some versions
        arguments = [list(each.values()) for each in arguments.values()]
    return {"arguments": [list(each) for each in arguments], "answers": one["resps"]}


if __name__ == "__main__":
    main()
