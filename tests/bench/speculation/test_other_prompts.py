"""The second and the third set of prompts are the same every time, and no other set's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.speculation.any_prompt import prompts
from bench.speculation.other_prompts import Prompt, other_prompts
from bench.speculation.third_prompts import third_prompts

MAKERS = pytest.mark.parametrize("make", [other_prompts, third_prompts])


@MAKERS
def test_a_version_of_python_makes_the_same_prompts(
    make: Callable[[int], dict[str, Prompt]],
) -> None:
    found = make(4096)
    assert found == make(4096)
    assert len(found) >= 50
    assert len({str(prompt) for prompt in found.values()}) == len(found)


def test_no_prompt_is_of_two_sets() -> None:
    sets = [make(4096).values() for make in (prompts, other_prompts, third_prompts)]
    texts = [str(prompt) for one in sets for prompt in one]
    assert len(set(texts)) == len(texts)
