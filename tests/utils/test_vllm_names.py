"""What scripts for vLLM import from its utils."""

from __future__ import annotations

import pytest

from hetero_llm.utils import FlexibleArgumentParser, random_uuid


@pytest.mark.parametrize("word", ["--max-len", "--max_len"])
@pytest.mark.parametrize("defined", ["--max-len", "--max_len"])
def test_flags_with_either_sign(word: str, defined: str) -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument(defined, type=int)
    parser.add_argument("--text")
    assert parser.parse_args([word, "5"]).max_len == 5
    assert parser.parse_args([f"{word}=5", "--text=--max_len"]).text == "--max_len"


def test_unknown_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        FlexibleArgumentParser().parse_args(["--no_such_flag"])
    assert "--no_such_flag" in capsys.readouterr().err


def test_ids_differ() -> None:
    ids = {random_uuid() for _ in range(100)}
    assert len(ids) == 100 and {len(one) for one in ids} == {32}
