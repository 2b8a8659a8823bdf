"""Some seeds of the fuzzers against transformers; `tests.helpers.engine_fuzz` and
`tests.helpers.feature_fuzz` run more by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from hetero_llm.core.step_times import StepTimes
from hetero_llm.spec_decode.proposal_account import ProposalAccount
from tests.helpers import feature_fuzz
from tests.helpers.draft_traffic import make_model
from tests.helpers.engine_fuzz import Reference, run_seed

SEEDS = (1, 2, 22)
FEATURE_SEEDS = (16,)
GUIDED_SEEDS = (1,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("fuzz") / "model")


def test_random_mixes_of_features_equal_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without step times, the size of drafts does not depend on the machine's load.
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    monkeypatch.setattr(ProposalAccount, "set_step_times", lambda *_: None)
    reference = Reference(folder)
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        counts += run_seed(seed, folder, reference)
    assert counts["equal"] > 20 and counts["tie"] <= 1
    for event in ("aborted", "num_preemptions", "prefix_cache_hits"):
        assert counts[event], event
    assert counts["spec_decode_num_accepted_tokens"] > 20


def test_families_weights_and_drafters_of_all_kinds_equal_transformers(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    with feature_fuzz.without_times():
        worlds = feature_fuzz.Worlds(tmp_path)
        for seed in FEATURE_SEEDS:
            counts += feature_fuzz.run_seed(seed, worlds)
        for seed in GUIDED_SEEDS:
            counts += feature_fuzz.run_seed(seed, worlds, guided=True)
    assert counts["equal"] > 10 and counts["tie"] <= 1
    assert counts["aborted"] and counts["spec_decode_num_accepted_tokens"] > 20
    assert counts["adapters lora"] and counts["adapters virtual"]
