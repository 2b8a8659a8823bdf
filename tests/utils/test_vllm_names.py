"""What scripts for vLLM import from its utils."""

from __future__ import annotations

import logging
import weakref

import pytest

from hetero_llm.utils import (
    FlexibleArgumentParser,
    cleanup_dist_env_and_memory,
    init_logger,
    random_uuid,
)


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


def test_keys_of_a_mapping(capsys: pytest.CaptureFixture[str]) -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--some-config")
    args = parser.parse_args(["--some_config.method", "ngram", "--some-config.depth.max=4"])
    assert args.some_config == '{"method": "ngram", "depth": {"max": 4}}'
    with pytest.raises(SystemExit):
        parser.parse_args(["--some-config.method"])
    assert "--some-config.method=None: needs a value" in capsys.readouterr().err


def test_a_logger_has_its_name() -> None:
    assert init_logger("mine") is logging.getLogger("mine")


def test_memory_is_returned_though_objects_refer_to_each_other() -> None:
    class Engine:
        pass

    engine = Engine()
    engine.me = engine  # type: ignore[attr-defined]
    seen = weakref.ref(engine)
    del engine
    cleanup_dist_env_and_memory()
    assert seen() is None
