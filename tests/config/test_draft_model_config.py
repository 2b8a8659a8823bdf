"""Draft models in the arguments: alone, beside the lookahead cache, on the device."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm.config.draft_model_config import DraftModelConfig
from hetero_llm.config.lookahead_config import LookaheadConfig
from tests.config.test_speculation_config import (
    BOTH,
    DRAFT,
    draft,
    folder,
    refused,
    speculation,
)

__all__ = ["folder"]  # a fixture

IN_MAPPING: dict[str, Any] = {
    "cpu_draft_worker": True,
    "speculative_config": {
        "method": "draft_model",
        "model": "demo-draft",
        "num_speculative_tokens": 5,
    },
}


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
                LookaheadConfig(copy_length=9, sure_copy_length=9, decay=0.1),
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
