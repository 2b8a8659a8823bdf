"""The lookahead cache's file: defaults, every key's bounds, every way it can be wrong."""

from __future__ import annotations

import json
import math
import os
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.config.lookahead_config import (
    FILE_NAME,
    Given,
    LookaheadConfig,
    is_snapshot,
    lookahead_config,
    read_lookahead_file,
)
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.core.errors import ConfigError

# The example of TACO's page, whose values are the defaults it states but for the last four.
MANUAL_FILE = {
    "copy_length": 7,
    "match_length": 2,
    "turbo_match_length": 7,
    "min_match_length": 2,
    "cell_max_size": 16,
    "voc_size": 200000,
    "top_k": 1,
    "threshold": 2.0,
    "decay": 0.5,
    "is_hybrid": True,
    "log_interval": 3000,
    "target_parallelism": 512,
    "top_k_in_cell": 16,
    "token_paths_top_k": 2,
    "start_freq": 10.0,
    "num_threads": 8,
    "global_cache_switch": True,
    "cache_mode": 2,
    "cache_size": 5000000,
    "max_seq_len": 32768,
    "eos_token_id": 2,
    "is_debug": True,
}

WRONG: list[tuple[str, Any, str]] = [
    ("cache_mode", 4, "must be at most 3"),
    ("cache_mode", -1, "must be at least 0"),
    ("cache_mode", True, "must be an integer"),
    ("cache_mode", 2.0, "must be an integer"),
    ("cache_mode", None, "must be an integer"),
    ("cache_size", 13, "is less than one path: turbo_match_length + copy_length is 14 tokens"),
    ("cache_size", 0, "must be at least 1"),
    ("cache_size", 5e6, "must be an integer"),
    ("cache_size", 2**31, "must be at most 2147483647"),
    ("copy_length", 0, "must be at least 1"),
    ("copy_length", 64, "must be at most 63"),
    ("match_length", 0, "must be at least 1"),
    ("turbo_match_length", 1, "is less than min_match_length (2)"),
    ("turbo_match_length", 65, "must be at most 64"),
    ("min_match_length", 8, "exceeds turbo_match_length (7)"),
    ("min_match_length", 0, "must be at least 1"),
    ("cell_max_size", 0, "must be at least 1"),
    ("cell_max_size", 257, "must be at most 256"),
    ("voc_size", 0, "must be at least 1"),
    ("max_seq_len", 0, "must be at least 1"),
    ("eos_token_id", -1, "token ids are 0 to 2147483647"),
    ("eos_token_id", [2, 2**31], "token ids are 0 to 2147483647"),
    ("eos_token_id", True, "must be a token id or a list of token ids"),
    ("eos_token_id", [2, "</s>"], "must be a token id or a list of token ids"),
    ("eos_token_id", {"id": 2}, "must be a token id or a list of token ids"),
    ("top_k", 0, "must be at least 1"),
    ("threshold", math.nan, "must be a finite number"),
    ("threshold", math.inf, "must be a finite number"),
    ("threshold", -0.5, "must be at least 0"),
    ("threshold", "2", "must be a number"),
    ("decay", 0, "must be greater than 0"),
    ("decay", 1, "must be less than 1"),
    ("decay", math.nan, "must be a finite number"),
    ("is_hybrid", 1, "must be True or False"),
    ("is_debug", "true", "must be True or False"),
    ("log_interval", 0, "must be at least 1"),
    ("target_parallelism", 0, "must be at least 1"),
    ("top_k_in_cell", 0, "must be at least 1"),
    ("token_paths_top_k", 0, "must be at least 1"),
    ("start_freq", 0, "must be greater than 0"),
    ("start_freq", 1e9, "must be at most 16777216"),
    ("num_threads", 0, "must be at least 1"),
    ("global_cache_switch", None, "must be True or False"),
    ("ignore_prompt", 0, "must be True or False"),
    ("warmup_file", 5, "must be a string"),
    ("warmup_file", "", "must not be empty"),
]
WRONG_IDS = [f"{key}-{value}" for key, value, _ in WRONG]


def load(folder: str) -> LookaheadConfig:
    return lookahead_config(read_lookahead_file(folder))


def write(folder: Path, content: Any) -> str:
    (folder / FILE_NAME).write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


def load_error(folder: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    return caught.value


class TestValues:
    def test_defaults(self) -> None:
        config = LookaheadConfig()
        expected = dict(MANUAL_FILE, is_debug=False, eos_token_id=None)
        expected |= dict.fromkeys(("cache_size", "max_seq_len", "warmup_file"))
        assert asdict(config) == expected | {"ignore_prompt": False, "sure_copy_length": 15}

    @pytest.mark.parametrize(("key", "value", "reason"), WRONG, ids=WRONG_IDS)
    def test_wrong_value_names_the_key(self, key: str, value: Any, reason: str) -> None:
        with pytest.raises(ConfigError) as caught:
            lookahead_config({key: Given(f"file: {key}", value)})
        assert caught.value.field == f"file: {key}"
        assert str(caught.value).startswith(f"file: {key}=")
        assert str(caught.value).endswith(reason)

    @pytest.mark.parametrize(("key", "value", "reason"), WRONG, ids=WRONG_IDS)
    def test_no_object_holds_a_wrong_value(self, key: str, value: Any, reason: str) -> None:
        with pytest.raises(ConfigError):
            LookaheadConfig(**{key: value})
        with pytest.raises(ConfigError):
            replace(LookaheadConfig(), **{key: value})

    def test_both_match_lengths_given(self) -> None:
        with pytest.raises(ConfigError, match="^min_match_length=5: exceeds turbo_match_length"):
            LookaheadConfig(min_match_length=5, turbo_match_length=4)

    def test_bounds_that_are_still_good(self) -> None:
        config = LookaheadConfig(
            cache_mode=3,
            copy_length=MAX_NODES,
            min_match_length=1,
            turbo_match_length=1,
            cache_size=1 + MAX_NODES,
            threshold=0,
            decay=0.999,
        )
        assert config.cache_size == 64
        assert type(config.threshold) is float

    def test_end_tokens_become_a_tuple(self) -> None:
        numpy = pytest.importorskip("numpy")
        for given, held in [(2, (2,)), ([2, 7], (2, 7)), (numpy.int64(3), (3,)), ([], ())]:
            assert LookaheadConfig(eos_token_id=given).eos_token_id == held
        assert LookaheadConfig(eos_token_id=300_000).eos_token_id == (300_000,)

    def test_is_immutable_and_keeps_its_value_when_copied(self) -> None:
        config = LookaheadConfig(eos_token_id=(2,), cache_size=100)
        assert replace(config, voc_size=32000) == LookaheadConfig(
            eos_token_id=(2,), cache_size=100, voc_size=32000
        )
        with pytest.raises(FrozenInstanceError):
            config.decay = 0.1


class TestFile:
    def test_no_folder_and_no_file_are_the_defaults(self, tmp_path: Path) -> None:
        assert lookahead_config({}) == LookaheadConfig()
        assert load(str(tmp_path)) == LookaheadConfig()
        assert load(write(tmp_path, {})) == LookaheadConfig()

    def test_the_manuals_example(self, tmp_path: Path) -> None:
        config = load(write(tmp_path, MANUAL_FILE))
        rest = {"warmup_file": None, "ignore_prompt": False, "sure_copy_length": 7}
        assert asdict(config) == MANUAL_FILE | {"eos_token_id": (2,)} | rest

    def test_byte_order_mark(self, tmp_path: Path) -> None:
        (tmp_path / FILE_NAME).write_text('{"top_k": 3}', encoding="utf-8-sig")
        assert load(str(tmp_path)).top_k == 3

    @pytest.mark.parametrize(
        ("content", "width"),
        [
            ({}, 2),
            ({"copy_length": 4}, 2),
            ({"cache_mode": 2}, 1),
            ({"cache_mode": 1, "token_paths_top_k": 4}, 4),
        ],
    )
    def test_beam_width_is_one_where_only_the_mode_is_set(
        self, tmp_path: Path, content: dict[str, int], width: int
    ) -> None:
        assert load(write(tmp_path, content)).token_paths_top_k == width

    def test_warmup_file_is_relative_to_the_folder(self, tmp_path: Path) -> None:
        file = tmp_path / "warm" / "up.json"
        file.parent.mkdir()
        file.write_text("[]")
        folder = write(tmp_path, {"warmup_file": "warm/up.json"})
        assert load(folder).warmup_file == str(file)
        other = tmp_path / "other"
        other.mkdir()
        assert load(write(other, {"warmup_file": str(file)})) == (
            LookaheadConfig(warmup_file=str(file))
        )

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (None, "cannot be read: No such file or directory"),
            (b"", "holds nothing"),
            (b" \n" * 3000, "holds nothing"),
            (b"prompt,output\n", "is neither JSON objects with prompt and output nor a snapshot"),
            (b"\xff\xfe[\0]\0", None),
            (b"\xef\xbb\xbf [", None),
            (b"\n{}", None),
            (b"\x90\0\0\0\0\0\0\0{", None),
        ],
    )
    def test_warmup_file_that_is_none(
        self, tmp_path: Path, content: bytes | None, reason: str | None
    ) -> None:
        file = tmp_path / "up"
        if content is not None:
            file.write_bytes(content)
        folder = write(tmp_path, {"warmup_file": "up"})
        if reason is None:
            assert load(folder).warmup_file == str(file)
            assert is_snapshot(str(file)) is (b"\0" in content)
            return
        error = load_error(folder)
        assert error.field == "lookahead_cache_config.json: warmup_file"
        assert str(error).endswith(f"{str(file)!r}: {reason}")

    def test_warmup_file_without_a_global_cache(self, tmp_path: Path) -> None:
        error = load_error(write(tmp_path, {"warmup_file": "w", "global_cache_switch": False}))
        assert error.field == "lookahead_cache_config.json: warmup_file"
        assert str(error).endswith("which global_cache_switch turns off")

    def test_error_has_the_path_of_the_key(self, tmp_path: Path) -> None:
        error = load_error(write(tmp_path, {"top_k": 2, "decay": 1.5}))
        assert error.field == "lookahead_cache_config.json: decay"
        assert str(error) == "lookahead_cache_config.json: decay=1.5: must be less than 1"

    def test_nan_reaches_the_check_of_its_key(self, tmp_path: Path) -> None:
        error = load_error(write(tmp_path, {"threshold": math.nan}))
        assert str(error) == ("lookahead_cache_config.json: threshold=nan: must be a finite number")

    def test_empty_warmup_file(self, tmp_path: Path) -> None:
        error = load_error(write(tmp_path, {"warmup_file": ""}))
        assert str(error) == "lookahead_cache_config.json: warmup_file='': must not be empty"

    def test_unknown_key_suggests_the_nearest(self, tmp_path: Path) -> None:
        error = load_error(write(tmp_path, {"copy_lenght": 5}))
        assert error.field == "lookahead_cache_config.json: copy_lenght"
        assert str(error).endswith("=5: unknown key; did you mean 'copy_length'?")
        assert str(load_error(write(tmp_path, {"zzz": 5}))).endswith("zzz=5: unknown key")

    def test_key_given_twice(self, tmp_path: Path) -> None:
        (tmp_path / FILE_NAME).write_text('{"top_k": 1, "top_k": 2}', encoding="utf-8")
        error = load_error(str(tmp_path))
        assert str(error) == "lookahead_cache_config.json: top_k=2: is given twice"

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b'{"top_k": 1', "lookahead_cache_config.json is not valid JSON: "),
            (b"", "lookahead_cache_config.json is not valid JSON: "),
            (b'{"top_k": ' + b"9" * 5000 + b"}", "lookahead_cache_config.json is not valid JSON: "),
            (b"[" * 100_000, "lookahead_cache_config.json is not valid JSON: "),
            (b'{"top_k": "\xff"}', "lookahead_cache_config.json is not valid JSON: "),
            (b"[1, 2]", "lookahead_cache_config.json must hold a JSON object"),
            (b"null", "lookahead_cache_config.json must hold a JSON object"),
        ],
        ids=["cut", "empty", "huge number", "deep", "not utf-8", "list", "null"],
    )
    def test_broken_file(self, tmp_path: Path, content: bytes, reason: str) -> None:
        (tmp_path / FILE_NAME).write_bytes(content)
        error = load_error(str(tmp_path))
        assert error.field == "lookahead_cache_config_dir"
        assert error.value == str(tmp_path)
        assert f": {reason}" in str(error)

    def test_file_that_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / FILE_NAME).mkdir()
        error = load_error(str(tmp_path))
        assert error.field == "lookahead_cache_config_dir"
        assert "lookahead_cache_config.json cannot be read: " in str(error)

    def test_link_that_leads_nowhere_is_not_a_missing_file(self, tmp_path: Path) -> None:
        os.symlink(tmp_path / "gone.json", tmp_path / FILE_NAME)
        assert "is a link that leads nowhere" in str(load_error(str(tmp_path)))

    @pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_text("{}")])
    def test_folder_that_is_none(self, tmp_path: Path, make: Any) -> None:
        folder = tmp_path / "conf"
        make(folder)
        error = load_error(str(folder))
        assert error.field == "lookahead_cache_config_dir"
        assert error.value == str(folder)
        assert str(error).endswith("is not a folder")
