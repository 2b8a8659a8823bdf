"""Which drafts the arguments ask for, and every combination that makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.args_features import SPECULATIVE
from hetero_llm.config.draft_model_config import DraftModelConfig
from hetero_llm.config.engine_config import EngineConfig, SpeculationConfig
from hetero_llm.config.lookahead_config import FILE_NAME, LookaheadConfig
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.core.errors import ConfigError

NGRAM = {"speculative_model": "[ngram]", "num_speculative_tokens": 5, "ngram_prompt_lookup_max": 4}
DRAFT: dict[str, Any] = {
    "speculative_model": "demo-draft",
    "num_speculative_tokens": 5,
    "cpu_draft_worker": True,
}
BOTH = "speculative_config: "


def speculation(**given: Any) -> SpeculationConfig | None:
    return EngineConfig.from_args(resolve_engine_args({"model": "demo", **given})).speculation


def refused(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        speculation(**given)
    assert str(caught.value).startswith(f"{caught.value.field}=")
    return str(caught.value)


def cache(**given: Any) -> LookaheadConfig:
    config = speculation(**given)
    assert config is not None and config.method == "lookahead"
    assert config.num_speculative_tokens is None
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (0, 0)
    assert config.lookahead is not None
    return config.lookahead


def lookup(**given: Any) -> tuple[int | None, int, int]:
    config = speculation(**given)
    assert config is not None and config.method == "ngram"
    assert config.lookahead is None
    return config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max


def draft(**given: Any) -> DraftModelConfig:
    config = speculation(**given)
    assert config is not None and config.method == "draft_model"
    assert config.num_speculative_tokens is None
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (0, 0)
    assert config.draft is not None
    return config.draft


@pytest.fixture
def folder(tmp_path: Path) -> str:
    content = {"cache_mode": 1, "copy_length": 9, "ignore_prompt": False, "cache_size": 5000}
    (tmp_path / FILE_NAME).write_text(json.dumps(content), encoding="utf-8")
    return str(tmp_path)


def test_nothing_asked_for() -> None:
    assert speculation() is None
    assert speculation(use_lookahead=False, speculative_config=None) is None
    assert speculation(cpu_decoding_memory_utilization=0.15) is None


def test_longest_draft_is_a_tree_of_all_nodes() -> None:
    (row,) = [spec for spec in SPECULATIVE if spec.name == "num_speculative_tokens"]
    assert row.maximum == MAX_NODES


class TestLookahead:
    def test_switch_and_folder(self, tmp_path: Path, folder: str) -> None:
        assert cache(use_lookahead=True) == LookaheadConfig()
        empty = tmp_path / "empty"
        empty.mkdir()
        assert cache(lookahead_cache_config_dir=empty) == LookaheadConfig()
        expected = LookaheadConfig(
            cache_mode=1,
            copy_length=9,
            sure_copy_length=9,
            cache_size=5000,
            token_paths_top_k=1,
        )
        assert cache(lookahead_cache_config_dir=folder) == expected
        assert cache(lookahead_cache_config_dir=folder, use_lookahead=True) == expected

    def test_folder_that_is_none(self) -> None:
        wrong = refused(lookahead_cache_config_dir="no/such/folder")
        assert wrong == "lookahead_cache_config_dir='no/such/folder': is not a folder"

    def test_error_in_the_file(self, tmp_path: Path) -> None:
        (tmp_path / FILE_NAME).write_text('{"decay": 2}', encoding="utf-8")
        wrong = refused(lookahead_cache_config_dir=str(tmp_path))
        assert wrong == "lookahead_cache_config.json: decay=2.0: must be less than 1"

    def test_flags_that_belong_to_it(self) -> None:
        config = cache(
            use_lookahead=True, ignore_prompt_for_lookahead_cache=True, num_speculative_tokens=4
        )
        assert config == LookaheadConfig(ignore_prompt=True, copy_length=4, sure_copy_length=4)

    def test_memory(self) -> None:
        default = speculation(use_lookahead=True)
        assert default is not None and default.memory_utilization == 0.15
        more = speculation(use_lookahead=True, cpu_decoding_memory_utilization=1)
        assert more is not None and more.memory_utilization == 1.0

    @pytest.mark.parametrize(
        ("value", "reason"),
        [(0.0, "greater than 0"), (1.1, "at most 1"), (float("nan"), "a finite number")],
    )
    def test_wrong_memory(self, value: float, reason: str) -> None:
        wrong = refused(use_lookahead=True, cpu_decoding_memory_utilization=value)
        assert wrong == f"cpu_decoding_memory_utilization={value}: must be {reason}"

    def test_flag_against_file(self, folder: str) -> None:
        of_file = "lookahead_cache_config.json: "
        assert refused(lookahead_cache_config_dir=folder, num_speculative_tokens=4) == (
            f"num_speculative_tokens=4: contradicts {of_file}copy_length=9; give one of them"
        )
        assert refused(lookahead_cache_config_dir=folder, cpu_decoding_memory_utilization=0.3) == (
            f"cpu_decoding_memory_utilization=0.3: contradicts {of_file}cache_size=5000; "
            "give one of them"
        )
        wrong = refused(lookahead_cache_config_dir=folder, ignore_prompt_for_lookahead_cache=True)
        assert wrong == (
            f"ignore_prompt_for_lookahead_cache=True: contradicts {of_file}ignore_prompt=False; "
            "give one of them"
        )

    def test_size_null_in_the_file_is_no_size(self, tmp_path: Path) -> None:
        (tmp_path / FILE_NAME).write_text('{"cache_size": null}', encoding="utf-8")
        given = {
            "lookahead_cache_config_dir": str(tmp_path),
            "cpu_decoding_memory_utilization": 0.3,
        }
        assert cache(**given).cache_size is None


class TestPromptLookup:
    def test_shortest_match_is_one_unless_given(self) -> None:
        assert lookup(**NGRAM) == (5, 1, 4)
        assert lookup(**NGRAM, ngram_prompt_lookup_min=2) == (5, 2, 4)
        assert lookup(**NGRAM, ngram_prompt_lookup_min=4) == (5, 4, 4)

    def test_what_is_required(self) -> None:
        assert refused(**NGRAM | {"num_speculative_tokens": None}) == (
            "num_speculative_tokens=None: prompt lookup needs the number of draft tokens for each "
            "step"
        )
        assert refused(**NGRAM | {"ngram_prompt_lookup_max": None}) == (
            "ngram_prompt_lookup_max=None: prompt lookup needs the longest match to look for"
        )

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"num_speculative_tokens": 0}, "num_speculative_tokens=0: must be at least 1"),
            ({"num_speculative_tokens": 64}, "num_speculative_tokens=64: must be at most 63"),
            ({"num_speculative_tokens": True}, "num_speculative_tokens=True: must be an integer"),
            ({"ngram_prompt_lookup_max": 0}, "ngram_prompt_lookup_max=0: must be at least 1"),
            ({"ngram_prompt_lookup_min": 0}, "ngram_prompt_lookup_min=0: must be at least 1"),
            (
                {"ngram_prompt_lookup_min": 5},
                "ngram_prompt_lookup_min=5: exceeds ngram_prompt_lookup_max (4)",
            ),
        ],
    )
    def test_wrong_value(self, given: dict[str, Any], message: str) -> None:
        assert refused(**NGRAM | given) == message


class TestOneMethod:
    @pytest.mark.parametrize(
        ("given", "contradiction"),
        [
            ({"use_lookahead": True}, "use_lookahead=True: contradicts "),
            ({"lookahead_cache_config_dir": "x"}, "lookahead_cache_config_dir='x': contradicts "),
        ],
    )
    def test_not_both(self, given: dict[str, Any], contradiction: str) -> None:
        expected = f"{contradiction}speculative_model='[ngram]'; give one of them"
        assert refused(**NGRAM | {"ngram_prompt_lookup_max": None}, **given) == expected
        assert "=4: needs speculative_model='[ngram]'" in refused(
            use_lookahead=True, ngram_prompt_lookup_max=4
        )

    @pytest.mark.parametrize(
        ("given", "needed"),
        [
            ({"num_speculative_tokens": 3}, "a draft model, speculative_model='[ngram]' or the "),
            ({"speculative_disable_by_batch_size": 3}, "drafts of some kind, such as the "),
            ({"ngram_prompt_lookup_max": 3}, "speculative_model='[ngram]'"),
            ({"ngram_prompt_lookup_min": 3}, "speculative_model='[ngram]'"),
            ({"ignore_prompt_for_lookahead_cache": True}, "the lookahead cache (use_lookahead or"),
            ({"cpu_decoding_memory_utilization": 0.5}, "the lookahead cache (use_lookahead or"),
        ],
    )
    def test_value_without_effect(self, given: dict[str, Any], needed: str) -> None:
        assert f": needs {needed}" in refused(**given)

    def test_value_of_the_cache_with_prompt_lookup(self) -> None:
        assert ": needs the lookahead cache" in refused(
            **NGRAM, cpu_decoding_memory_utilization=0.5
        )


class TestMapping:
    @pytest.mark.parametrize(
        ("given", "held"),
        [
            ({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, (3, 2, 4)),
            ({"prompt_lookup_max": 4}, (3, 4, 4)),
            ({"prompt_lookup_min": 3}, (3, 3, 3)),
            ({}, (3, 5, 5)),
            ({"prompt_lookup_max": None, "disable_by_batch_size": None}, (3, 5, 5)),
        ],
    )
    @pytest.mark.parametrize("name", [{"method": "ngram"}, {"model": "[ngram]"}])
    def test_prompt_lookup(
        self, name: dict[str, str], given: dict[str, Any], held: tuple[int, int, int]
    ) -> None:
        mapping = {**name, "num_speculative_tokens": 3, **given}
        assert lookup(speculative_config=mapping) == held

    def test_names_of_prompt_lookup(self) -> None:
        for names in [{"model": "ngram"}, {"method": "[ngram]"}]:
            assert lookup(speculative_config={**names, "num_speculative_tokens": 3})
        for model in ("ngram", "[ngram]"):
            names = {"method": "ngram", "model": model}
            assert lookup(speculative_config={**names, "num_speculative_tokens": 3})

    def test_lookahead(self, folder: str) -> None:
        file = str(Path(folder) / FILE_NAME)  # as good as any JSON here
        inline = {"method": "lookahead", "decay": 0.1, "eos_token_id": 2, "warmup_file": file}
        expected = LookaheadConfig(decay=0.1, eos_token_id=(2,), warmup_file=file)
        assert cache(speculative_config=inline) == expected
        assert cache(speculative_config={"method": "lookahead", "cache_mode": 1}) == (
            LookaheadConfig(cache_mode=1, token_paths_top_k=1)
        )
        with_file = {"config_dir": folder, "decay": 0.1, "copy_length": 9}
        config = cache(speculative_config=with_file)
        assert (config.decay, config.copy_length, config.cache_mode) == (0.1, 9, 1)
        short = {"method": "lookahead", "num_speculative_tokens": 4}
        assert cache(speculative_config=short).copy_length == 4

    @pytest.mark.parametrize(
        ("mapping", "message"),
        [
            ({}, "method=None: must be 'ngram', 'lookahead' or 'draft_model'"),
            (
                {"method": "suffix"},
                "method='suffix': must be 'ngram', 'lookahead', 'draft_model' or '[ngram]'",
            ),
            ({"method": "draft_model"}, "model=None: a draft model is a folder or a hub id"),
            ({"method": 3}, "method=3: must be a string"),
            ({"model": "some/model"}, "num_speculative_tokens=None: a draft model needs the"),
            ({"method": "lookahead", "model": "ngram"}, "method='lookahead': contradicts "),
            ({"method": "ngram"}, "num_speculative_tokens=None: prompt lookup needs"),
            ({"num_speculative_tokens": 3}, "num_speculative_tokens=3: needs "),
            ({"decay": 0.2}, "decay=0.2: needs the lookahead cache"),
            (
                {"method": "ngram", "num_speculative_tokens": 3, "decay": 0.2},
                "decay=0.2: needs the lookahead cache",
            ),
            (
                {"method": "ngram", "num_speculative_tokens": 3, "config_dir": "x"},
                "config_dir='x': contradicts speculative_config: method='ngram'",
            ),
            (
                {"method": "lookahead", "prompt_lookup_max": 3},
                "prompt_lookup_max=3: needs speculative_model='[ngram]'",
            ),
            ({"method": "lookahead", "decay": 1}, "decay=1.0: must be less than 1"),
            ({"method": "lookahead", "cache_mode": "2"}, "cache_mode='2': must be an integer"),
            ({"method": "lookahead", "num_threads": None}, "num_threads=None: must be an integer"),
            (
                {"method": "lookahead", "copy_length": 5, "num_speculative_tokens": 5},
                "num_speculative_tokens=5: contradicts speculative_config: copy_length=5",
            ),
            (
                {"method": "ngram", "num_speculative_tokens": 0},
                "num_speculative_tokens=0: must be at least 1",
            ),
            (
                {
                    "method": "ngram",
                    "num_speculative_tokens": 3,
                    "prompt_lookup_min": 4,
                    "prompt_lookup_max": 3,
                },
                "prompt_lookup_min=4: exceeds speculative_config: prompt_lookup_max (3)",
            ),
            ({"method": "lookahead", "dekay": 1}, "dekay=1: unknown key; did you mean 'decay'?"),
            ({"metod": "lookahead"}, "metod='lookahead': unknown key; did you mean 'method'?"),
            (
                {"method": "ngram", "quantization": "fp8"},
                "quantization='fp8': is not available yet",
            ),
        ],
    )
    def test_refused(self, mapping: dict[str, Any], message: str) -> None:
        assert refused(speculative_config=mapping).startswith(f"{BOTH}{message}")

    def test_not_a_mapping(self) -> None:
        assert "must be a mapping" in refused(speculative_config="ngram")

    def test_joined_with_single_flags(self) -> None:
        mapping = {"method": "ngram", "num_speculative_tokens": 3}
        assert lookup(speculative_config=mapping, ngram_prompt_lookup_max=4) == (3, 4, 4)
        same = {"speculative_model": "[ngram]", "num_speculative_tokens": 3}
        assert lookup(speculative_config=mapping, **same) == (3, 5, 5)
        inline = {"decay": 0.1, "ignore_prompt": True}
        expected = LookaheadConfig(decay=0.1, ignore_prompt=True)
        for more in ({}, {"ignore_prompt_for_lookahead_cache": True}):
            assert cache(speculative_config=inline, use_lookahead=True, **more) == expected

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (
                {"num_speculative_tokens": 4},
                f"num_speculative_tokens=4: contradicts {BOTH}num_speculative_tokens=3",
            ),
            (
                {"ngram_prompt_lookup_max": 4},
                f"ngram_prompt_lookup_max=4: contradicts {BOTH}prompt_lookup_max=5",
            ),
            ({"use_lookahead": True}, f"{BOTH}method='ngram': contradicts use_lookahead=True"),
        ],
    )
    def test_contradicted_by_single_flags(self, flags: dict[str, Any], message: str) -> None:
        mapping = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}
        assert refused(speculative_config=mapping, **flags).startswith(message)

    def test_contradicted_by_the_file(self, folder: str) -> None:
        mapping = {"config_dir": folder, "copy_length": 5}
        assert refused(speculative_config=mapping) == (
            f"{BOTH}copy_length=5: contradicts lookahead_cache_config.json: copy_length=9; "
            "give one of them"
        )
        wrong = refused(speculative_config={"config_dir": "here"}, lookahead_cache_config_dir="x")
        assert wrong.startswith(
            f"lookahead_cache_config_dir='x': contradicts {BOTH}config_dir='here'"
        )
