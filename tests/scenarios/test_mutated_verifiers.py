"""The comparison of test_drafter_invariance.py notices every mistake that a verifier could make.

A mutant that changed no token would show that the traffic misses something.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetero_llm.cpu import native
from tests.helpers.draft_traffic import EVERYTHING, FAST, VOCAB, Bench, make_model
from tests.helpers.drafters import Oracle, Siblings
from tests.helpers.verifier_mutants import (
    MUTANTS,
    WAYS,
    no_node_below_the_first_is_taken,
    no_token_behind_the_accepted_ones,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_threads(two_threads: None, one_thread: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def benches(folder: Path) -> dict[str, Bench]:
    usable = [w for w in WAYS if WAYS[w][1] or native.load() is not None]
    return {way: Bench(folder, 7, WAYS[way][0], **WAYS[way][1]) for way in usable}


@pytest.mark.parametrize(("name", "way"), [(n, way) for n in MUTANTS for way in MUTANTS[n].ways])
def test_a_mutant_is_noticed(
    benches: dict[str, Bench], name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way not in benches:
        pytest.skip("needs the compiled library")
    bench = benches[way]
    drafter = MUTANTS[name].drafter(bench.record, VOCAB, seed=1)
    bench.forget()
    MUTANTS[name].patch(monkeypatch)
    different = bench.serve(drafter)[0] or bench.serve(drafter)[0]
    monkeypatch.undo()
    bench.forget()
    assert different != []


@pytest.mark.parametrize("way", WAYS)
def test_without_a_mutant_there_is_nothing_to_notice(benches: dict[str, Bench], way: str) -> None:
    if way not in benches:
        pytest.skip("needs the compiled library")
    bench = benches[way]
    for kind in (Siblings, Oracle):
        drafter = kind(bench.record, VOCAB, seed=1)
        assert bench.serve(drafter)[0] == bench.serve(drafter)[0] == []


@pytest.mark.parametrize("way", ["fast", "deep"])
def test_right_nodes_are_all_accepted(
    folder: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with each draft one token more; otherwise nothing but the speed would tell."""
    if not WAYS[way][1] and native.load() is None:
        pytest.skip("needs the compiled library")
    kinds = {name: replace(FAST[name], ignore_eos=True) for name in ("greedy", "hot", "samples")}
    if way != "fast":
        kinds["penalties"] = replace(EVERYTHING["penalties"], ignore_eos=True)
    bench = Bench(folder, 7, kinds, **WAYS[way][1])
    different, counts = bench.serve(Oracle(bench.record, VOCAB))
    assert different == []
    assert counts["num_accepted_tokens"] == counts["num_draft_tokens"] > 100
    for patch in (no_token_behind_the_accepted_ones, no_node_below_the_first_is_taken):
        patch(monkeypatch)
        different, counts = bench.serve(Oracle(bench.record, VOCAB))
        monkeypatch.undo()
        assert different == [] and counts["num_accepted_tokens"] < counts["num_draft_tokens"]
