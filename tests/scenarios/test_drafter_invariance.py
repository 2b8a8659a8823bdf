"""With every drafter the tokens are those of a run without drafts, all of them in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.drafter import Drafter
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step_times import StepTimes
from hetero_llm.cpu import native
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from hetero_llm.spec_decode.proposal_account import ProposalAccount
from tests.helpers.draft_traffic import EVERYTHING, FAST, MAX_LEN, VOCAB, Bench, make_model
from tests.helpers.drafters import Garbage, Oracle, Siblings

LLAMA = "llama", "gqa"
WINDOWS = "qwen2", "layer_types"  # of five tokens in some layers
NATIVE: dict[str, Any] = {}
TWO_THREADS = {"cpu_threads": 2}
INVARIANT = {"batch_invariant": True}
BENCHES: dict[str, tuple[int, tuple[str, str], dict[str, SamplingParams], dict[str, Any]]] = {
    **{f"native fast {n}": (n, LLAMA, FAST, NATIVE) for n in (1, 7, 64)},
    "native fast windows": (7, WINDOWS, FAST, TWO_THREADS),
    **{f"native {n}": (n, LLAMA, EVERYTHING, NATIVE) for n in (7, 64)},
    **{f"invariant {n}": (n, LLAMA, EVERYTHING, INVARIANT) for n in (1, 64)},
    "invariant windows": (7, WINDOWS, EVERYTHING, INVARIANT),
}


def lookahead(mode: int) -> Callable[[Bench], Drafter]:
    config = LookaheadConfig(
        cache_mode=mode,
        voc_size=VOCAB,
        max_seq_len=MAX_LEN,
        eos_token_id=(2,),
        token_paths_top_k=3,
        num_threads=2,
    )
    return lambda _: HybridDrafter(config, width=MAX_LEN, capacity=1 << 16)


DRAFTERS: dict[str, Callable[[Bench], Drafter | None]] = {
    "none": lambda _: None,
    "oracle": lambda bench: Oracle(bench.record, VOCAB),
    "garbage": lambda bench: Garbage(bench.record, VOCAB),
    "siblings": lambda bench: Siblings(bench.record, VOCAB),
    "raw": lookahead(0),
    "turbo": lookahead(1),
    "hybrid": lookahead(2),
    "merged": lookahead(3),
}
LEARNERS = ("raw", "turbo", "hybrid", "merged")
# Those whose parts "hybrid" has are alone on a few; without drafts there is one size.
ALONE = ("native fast 7", "native 7", "native fast windows")
LEFT_OUT = {
    *((bench, name) for bench in BENCHES if bench not in ALONE for name in LEARNERS),
    *((bench, "none") for bench in BENCHES if BENCHES[bench][0] != 7),
}
LEFT_OUT -= {(bench, "hybrid") for bench in BENCHES}
PAIRS = [(b, d) for b in BENCHES for d in DRAFTERS if (b, d) not in LEFT_OUT]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """One thread for torch, as the native executor has its own. Step times are not observed: the
    size of drafts would depend on the machine's load."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTimes, "observe", lambda *_: None)
        patch.setattr(ProposalAccount, "set_step_times", lambda *_: None)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {model: make_model(folder / "-".join(model), *model) for model in (LLAMA, WINDOWS)}


@pytest.fixture(scope="module")
def benches(models: dict[tuple[str, str], Path]) -> Callable[[str], Bench]:
    @cache
    def bench_of(name: str) -> Bench:
        batch, model, kinds, engine_args = BENCHES[name]
        if engine_args is not INVARIANT and native.load() is None:
            pytest.skip("needs the compiled library")
        return Bench(models[model], batch, kinds, **engine_args)

    return bench_of


@pytest.fixture(autouse=True)
def same_threads(two_threads: None, quiet: None) -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("where", "name"), PAIRS)
def test_the_tokens_are_those_without_drafts(
    benches: Callable[[str], Bench], where: str, name: str
) -> None:
    bench = benches(where)
    bench.forget()
    drafter = DRAFTERS[name](bench)
    counts: Counter[str] = Counter()
    # In the second run there are earlier outputs to draft from and prefixes to share.
    for _ in range(2 if name in LEARNERS or "fast" in where else 1):
        different, counted = bench.serve(drafter)
        assert different == []
        counts += counted
    generated, accepted = counts["generation_tokens"], counts["num_accepted_tokens"]
    assert counts["aborted"] > 0 and counts["prefix_cache_hits"] > 0
    assert bench.batch == 1 or counts["num_preemptions"] > 0
    if drafter is None:
        assert counts["num_drafts"] == 0
        return
    assert bench.switch.most_sequences > 0.5 * bench.batch
    if name == "garbage":
        assert counts["num_draft_tokens"] > generated and bench.switch.most_nodes > 50
    elif name == "siblings":
        assert accepted > 0.05 * generated and bench.switch.most_nodes == 63
        assert bench.switch.num_branches > generated
    else:
        assert accepted > (0.4 if name == "oracle" else 0.2) * generated
        assert name != "oracle" or counts["stops_inside"] > 0


@pytest.mark.parametrize("where", BENCHES)
def test_the_traffic_has_all_it_should(benches: Callable[[str], Bench], where: str) -> None:
    bench = benches(where)
    assert bench.plain.counts["most_running"] > 0.8 * bench.batch
    ends = Counter(
        (one.finish_reason, type(one.stop_reason))
        for last in bench.plain.last.values()
        for one in last.outputs
    )
    assert ends["length", type(None)] > 0
    assert ends["stop", str] > 0 and (bench.batch < 64 or ends["stop", int] > 0)
