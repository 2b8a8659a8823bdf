"""What the arguments say of a draft model on the target's device, and of typical acceptance."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm.config.draft_model_config import DraftModelConfig
from hetero_llm.core.acceptance import TypicalAcceptance
from tests.config.test_speculation_config import DRAFT, NGRAM, draft, folder, refused, speculation

__all__ = ["folder"]  # a fixture


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
