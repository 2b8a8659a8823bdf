"""The second set of prompts is the same every time, and not the first one."""

from __future__ import annotations

from bench.speculation.any_prompt import prompts
from bench.speculation.other_prompts import other_prompts


def test_a_version_of_python_makes_the_same_prompts() -> None:
    found = other_prompts(4096)
    assert found == other_prompts(4096)
    assert len(found) >= 50
    assert len({str(prompt) for prompt in found.values()}) == len(found)


def test_no_prompt_is_of_the_first_set() -> None:
    first = {str(prompt) for prompt in prompts(4096).values()}
    assert not first & {str(prompt) for prompt in other_prompts(4096).values()}
