"""Which drafts the arguments ask for, and every combination that makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.core.acceptance import TypicalAcceptance
from hetero_llm.core.args import resolve_engine_args
from hetero_llm.core.args_features import SPECULATIVE
from hetero_llm.core.config import EngineConfig, SpeculationConfig
from hetero_llm.core.draft import MAX_NODES
from hetero_llm.core.draft_model_config import DraftModelConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.core.lookahead_config import FILE_NAME, LookaheadConfig

NGRAM = {"speculative_model": "[ngram]", "num_speculative_tokens": 5, "ngram_prompt_lookup_max": 4}
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
            cache_mode=1, copy_length=9, cache_size=5000, token_paths_top_k=1
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
        assert config == LookaheadConfig(ignore_prompt=True, copy_length=4)

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


DRAFT: dict[str, Any] = {
    "speculative_model": "demo-draft",
    "num_speculative_tokens": 5,
    "cpu_draft_worker": True,
}
IN_MAPPING: dict[str, Any] = {
    "cpu_draft_worker": True,
    "speculative_config": {
        "method": "draft_model",
        "model": "demo-draft",
        "num_speculative_tokens": 5,
    },
}


def draft(**given: Any) -> DraftModelConfig:
    config = speculation(**given)
    assert config is not None and config.method == "draft_model"
    assert config.num_speculative_tokens is None
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (0, 0)
    assert config.draft is not None
    return config.draft


class TestDraftModel:
    @pytest.mark.parametrize("given", [DRAFT, IN_MAPPING, DRAFT | IN_MAPPING])
    def test_alone(self, given: dict[str, Any]) -> None:
        assert draft(**given) == DraftModelConfig(
            "demo-draft", None, 5, None, None, "auto", "auto", None, False
        )
        config = speculation(**given)
        assert config is not None and config.lookahead is None and config.most_sequences is None

    def test_every_setting(self) -> None:
        given = DRAFT | {
            "speculative_max_model_len": 2048,
            "speculative_disable_by_batch_size": 12,
            "speculative_overlap": "enumerate",
            "draft_timeout_ms": 3,
            "draft_threads": 6,
            "draft_weight_dtype": "int8",
            "draft_optional": True,
        }
        assert draft(**given) == DraftModelConfig(
            "demo-draft", None, 5, 2048, 6, "int8", "enumerate", 0.003, True
        )
        config = speculation(**given)
        assert config is not None and config.most_sequences == 12

    def test_settings_of_the_mapping(self) -> None:
        mapping = {
            "model": "some/model",
            "revision": "v2",
            "num_speculative_tokens": 7,
            "max_model_len": 100,
            "disable_by_batch_size": 4,
        }
        found = draft(cpu_draft_worker=True, speculative_config=mapping)
        assert (found.model, found.revision, found.num_tokens) == ("some/model", "v2", 7)
        assert found.max_model_len == 100
        config = speculation(cpu_draft_worker=True, speculative_config=mapping)
        assert config is not None and config.most_sequences == 4

    @pytest.mark.parametrize(
        ("given", "cache"),
        [
            (DRAFT | {"use_lookahead": True}, LookaheadConfig()),
            (IN_MAPPING | {"use_lookahead": True}, LookaheadConfig()),
            (
                {
                    "cpu_draft_worker": True,
                    "speculative_config": {
                        "method": "lookahead",
                        "model": "demo-draft",
                        "num_speculative_tokens": 5,
                        "copy_length": 9,
                        "decay": 0.1,
                    },
                },
                LookaheadConfig(copy_length=9, decay=0.1),
            ),
        ],
    )
    def test_beside_the_cache(self, given: dict[str, Any], cache: LookaheadConfig) -> None:
        """num_speculative_tokens is the draft model's then, copy_length the cache's."""
        assert draft(**given).num_tokens == 5
        config = speculation(**given)
        assert config is not None and config.lookahead == cache

    def test_beside_the_cache_of_a_file(self, folder: str) -> None:
        config = speculation(**DRAFT, lookahead_cache_config_dir=folder)
        assert config is not None and config.lookahead is not None and config.draft is not None
        assert (config.lookahead.copy_length, config.draft.num_tokens) == (9, 5)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"num_speculative_tokens": None},
                "num_speculative_tokens=None: a draft model needs the number of draft tokens for "
                "each step",
            ),
            ({"num_speculative_tokens": 64}, "num_speculative_tokens=64: must be at most 63"),
            (
                {"speculative_model": None, "num_speculative_tokens": None},
                "cpu_draft_worker=True: needs a draft model (speculative_model)",
            ),
            (
                {"speculative_model": "[ngram]", "ngram_prompt_lookup_max": 3},
                "cpu_draft_worker=True: needs a draft model (speculative_model)",
            ),
            ({"ngram_prompt_lookup_max": 3}, "ngram_prompt_lookup_max=3: needs speculative_model="),
            ({"cpu_decoding_memory_utilization": 0.5}, "cpu_decoding_memory_utilization=0.5: need"),
            ({"speculative_overlap": "on"}, "speculative_overlap='on': must be 'auto', 'off' or "),
            ({"draft_timeout_ms": 0}, "draft_timeout_ms=0.0: must be greater than 0"),
            ({"draft_threads": 0}, "draft_threads=0: must be at least 1"),
            ({"draft_weight_dtype": "fp4"}, "draft_weight_dtype='fp4': must be 'auto', 'int8', "),
            ({"speculative_max_model_len": 0}, "speculative_max_model_len=0: must be at least 1"),
            (
                {"speculative_disable_by_batch_size": 0},
                "speculative_disable_by_batch_size=0: must be at least 1",
            ),
            (
                {"speculative_model_quantization": "fp8"},
                "speculative_model_quantization='fp8': quantization of draft models is not avail",
            ),
        ],
    )
    def test_refused(self, changes: dict[str, Any], message: str) -> None:
        assert refused(**DRAFT | changes).startswith(message)

    @pytest.mark.parametrize("more", [{}, {"use_lookahead": True}])
    @pytest.mark.parametrize(
        "setting",
        [
            {"cpu_draft_worker": True},
            {"speculative_overlap": "off"},
            {"draft_timeout_ms": 1.0},
            {"draft_threads": 2},
            {"draft_weight_dtype": "int8"},
            {"draft_optional": True},
            {"speculative_max_model_len": 100},
        ],
    )
    def test_settings_without_a_draft_model(
        self, setting: dict[str, Any], more: dict[str, Any]
    ) -> None:
        assert ": needs a draft model (speculative_model)" in refused(**setting, **more)

    @pytest.mark.parametrize(
        ("mapping", "message"),
        [
            ({"model": "a"}, "num_speculative_tokens=None: a draft model needs the number of "),
            ({"method": "draft_model", "num_speculative_tokens": 3}, "model=None: a draft model "),
            ({"method": "ngram", "model": "a"}, "method='ngram': contradicts "),
            ({"method": "draft_model", "model": "[ngram]"}, "method='draft_model': contradicts "),
            ({"method": "lookahead", "revision": "x"}, "revision='x': needs a draft model"),
            ({"method": "lookahead", "max_model_len": 9}, "max_model_len=9: needs a draft model"),
            (
                {"model": "a", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2},
                "draft_tensor_parallel_size=2: is not available yet",
            ),
        ],
    )
    def test_refused_mapping(self, mapping: dict[str, Any], message: str) -> None:
        assert refused(cpu_draft_worker=True, speculative_config=mapping).startswith(
            f"{BOTH}{message}"
        )

    @pytest.mark.parametrize("given", [DRAFT, IN_MAPPING])
    def test_on_the_device(self, given: dict[str, Any]) -> None:
        found = draft(**given | {"cpu_draft_worker": False})
        assert (found.model, found.num_tokens, found.on_cpu) == ("demo-draft", 5, False)
        assert draft(**given).on_cpu

    def test_on_the_device_there_is_no_cache_beside_it(self) -> None:
        wrong = refused(**DRAFT | {"cpu_draft_worker": False}, use_lookahead=True)
        assert wrong.startswith("cpu_draft_worker=False: drafts of the lookahead cache are merged")

    @pytest.mark.parametrize(
        "setting",
        [
            {"speculative_overlap": "off"},
            {"draft_timeout_ms": 1.0},
            {"draft_threads": 2},
            {"draft_weight_dtype": "int8"},
        ],
    )
    def test_settings_of_a_worker_that_is_not_wanted(self, setting: dict[str, Any]) -> None:
        wrong = refused(**DRAFT | {"cpu_draft_worker": False}, **setting)
        assert "it needs cpu_draft_worker=True" in wrong

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ({"speculative_model": "b"}, f"speculative_model='b': contradicts {BOTH}model='demo"),
            ({"speculative_max_model_len": 5}, f"speculative_max_model_len=5: contradicts {BOTH}m"),
            ({"speculative_model": "[ngram]"}, f"{BOTH}model='demo-draft': contradicts "),
        ],
    )
    def test_flags_against_the_mapping(self, flags: dict[str, Any], message: str) -> None:
        mapping = {**IN_MAPPING["speculative_config"], "max_model_len": 6}
        given = {"cpu_draft_worker": True, "speculative_config": mapping}
        assert refused(**given, **flags).startswith(message)


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


class TestDraftModelOnTheDevice:
    GIVEN = {"speculative_model": "demo-draft", "num_speculative_tokens": 5}

    def test_what_it_shares_with_the_worker(self) -> None:
        given = self.GIVEN | {
            "draft_optional": True,
            "speculative_max_model_len": 70,
            "speculative_disable_by_batch_size": 4,
        }
        assert draft(**given) == DraftModelConfig(
            "demo-draft", None, 5, 70, None, "auto", "auto", None, True, False
        )
        config = speculation(**given)
        assert config is not None and config.most_sequences == 4

    def test_no_cache_of_a_file_beside_it(self, folder: str) -> None:
        wrong = refused(**self.GIVEN, lookahead_cache_config_dir=folder)
        assert "set cpu_draft_worker=True, or leave the cache out" in wrong


class TestAcceptance:
    TYPICAL = {"spec_decoding_acceptance_method": "typical_acceptance_sampler"}
    BOUNDS = {
        "typical_acceptance_sampler_posterior_threshold": 0.2,
        "typical_acceptance_sampler_posterior_alpha": 0.5,
    }

    @pytest.mark.parametrize("drafts", [{"use_lookahead": True}, NGRAM, DRAFT])
    def test_of_any_drafts(self, drafts: dict[str, Any]) -> None:
        def rule(**more: Any) -> TypicalAcceptance | None:
            config = speculation(**drafts, **more)
            assert config is not None
            return config.typical

        assert rule() is None
        assert rule(spec_decoding_acceptance_method="rejection_sampler") is None
        assert rule(**self.TYPICAL) == TypicalAcceptance(0.09, 0.3)
        assert rule(**self.TYPICAL, **self.BOUNDS) == TypicalAcceptance(0.2, 0.5)

    def test_in_the_mapping(self) -> None:
        mapping = {
            "method": "lookahead",
            "acceptance_method": "typical_acceptance_sampler",
            "posterior_alpha": 0.5,
        }
        config = speculation(speculative_config=mapping)
        assert config is not None and config.typical == TypicalAcceptance(0.09, 0.5)
        assert refused(
            speculative_config=mapping, typical_acceptance_sampler_posterior_alpha=0.4
        ).startswith("typical_acceptance_sampler_posterior_alpha=0.4: contradicts speculative_conf")

    @pytest.mark.parametrize("name", BOUNDS)
    def test_bounds_without_effect(self, name: str) -> None:
        assert refused(use_lookahead=True, **{name: self.BOUNDS[name]}) == (
            f"{name}={self.BOUNDS[name]}: needs "
            "spec_decoding_acceptance_method='typical_acceptance_sampler'"
        )

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (TYPICAL, "='typical_acceptance_sampler': needs drafts of some kind"),
            ({"spec_decoding_acceptance_method": "x"}, "='x': must be 'rejection_sampler' or "),
            ({**TYPICAL, "typical_acceptance_sampler_posterior_threshold": 0}, "greater than 0"),
            ({**TYPICAL, "typical_acceptance_sampler_posterior_threshold": 1.5}, "at most 1"),
            ({**TYPICAL, "typical_acceptance_sampler_posterior_alpha": 0}, "greater than 0"),
        ],
    )
    def test_refused(self, given: dict[str, Any], message: str) -> None:
        assert message in refused(**given)
