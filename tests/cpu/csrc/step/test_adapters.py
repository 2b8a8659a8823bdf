"""The phases of LoRA adapters in a step: against transformers with merged weights in float32, for
every instruction set, weight format and mix of tokens; and what must not change a result."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hetero_llm.core.lora import NO_ADAPTER, LoRARequest
from hetero_llm.cpu import native
from hetero_llm.cpu.executor import StepInput
from hetero_llm.lora.adapter import Adapter, read_adapter
from hetero_llm.lora.targets import adapter_targets
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.cpu.csrc.step.test_executor import BEST, VOCAB, Part, Served, path_to, text
from tests.helpers.adapters import TinyAdapter, merge, write_adapter, write_expert_adapter

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled library")

# Of logits with a standard deviation of 0.7, as in test_executor; a wrong adapter is 1.3 off.
TOLERANCE = {"float": 2e-4, "bf16": 0.15, "int8": 0.4}


@dataclass(frozen=True)
class Written:
    """A checkpoint and its adapters; of each the tokens' logits with merged weights."""

    folder: Path
    adapters: tuple[TinyAdapter, ...]

    def read(self, which: int, dtype: torch.dtype = torch.float32) -> Adapter:
        return _read(self.folder, self.adapters[which].folder, dtype)

    def logits(self, which: int, token_ids: Sequence[int]) -> torch.Tensor:
        """[len, vocab]; which: -1 for the base."""
        return _logits(self, which, tuple(token_ids))

    def __hash__(self) -> int:
        return hash(self.folder)


@lru_cache(maxsize=32)
def _read(folder: Path, adapter: Path, dtype: torch.dtype) -> Adapter:
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    request = LoRARequest(adapter.name, 1, str(adapter))
    return read_adapter(request, adapter_targets(model, config), max_rank=512, dtype=dtype)


@lru_cache(maxsize=16)
def _merged(written: Written, which: int) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(written.folder, dtype=torch.float32)
    if which != NO_ADAPTER:
        merge(model, written.adapters[which])
    return model.eval()


@lru_cache(maxsize=256)
@torch.inference_mode()
def _logits(written: Written, which: int, token_ids: tuple[int, ...]) -> torch.Tensor:
    return _merged(written, which)(torch.tensor([token_ids])).logits[0]


def make(folder: Path, ranks: Sequence[dict], **sizes: int) -> Written:
    torch.manual_seed(0)
    wanted = {
        "vocab_size": VOCAB, "hidden_size": 72, "intermediate_size": 104, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
        "max_position_embeddings": 512, **sizes,
    }  # fmt: skip
    config = transformers.LlamaConfig(**wanted, initializer_range=0.08, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).float()
    model.save_pretrained(folder / "base")
    adapters = tuple(
        write_adapter(folder / f"a{i}", model, seed=i, dtype=torch.bfloat16, **options)
        for i, options in enumerate(ranks)
    )
    return Written(folder / "base", adapters)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Ranks 1 to 128, different ones in one product, subsets of the modules; outputs and inputs
    that are no multiples of a strip or of a panel."""
    return make(
        tmp_path_factory.mktemp("adapters"),
        [
            {"rank": 8, "strength": 0.2},
            {"rank": 1, "alpha": 3.0, "strength": 0.5, "modules": r".*(q_proj|v_proj|gate_proj)"},
            {"rank": 128, "strength": 0.05, "rslora": True, "alpha": 4.0},
            {"rank": 20, "strength": 0.2, "modules": r".*1\..*(k_proj|o_proj|up_proj|down_proj)",
             "rank_pattern": {"k_proj": 3, "up_proj": 33}},
        ],
    )  # fmt: skip


class Adapted(Served):
    """An executor with adapter slots, filled with the given adapters."""

    def __init__(
        self,
        written: Written,
        weight_format: str,
        isa: int,
        threads: int,
        dtype: torch.dtype,
        *,
        filled: Sequence[int] = (0, 1, 2, 3),
        library: ctypes.CDLL | None = None,
    ) -> None:
        super().__init__(written.folder, weight_format, isa, threads, 16, library)
        self._written, self._dtype = written, dtype
        self.executor.make_adapter_slots(max(len(filled), 4), dtype)
        for slot, which in enumerate(filled):
            self.fill(slot, which)

    def fill(self, slot: int, which: int) -> None:
        self.executor.fill_adapter_slot(slot, self._written.read(which, self._dtype))

    def adapted(self, parts: Sequence[Part], slots: Sequence[int]) -> torch.Tensor:
        inputs = replace(self.rows(parts), adapter_slots=np.array(slots, np.int32))
        return self.executor.logits(inputs, np.arange(len(inputs.token_ids)))


def check(written: Written, served: Adapted, tolerance: float) -> None:
    """Prompts in chunks, then single tokens, chunks and a tree, each with another adapter."""
    texts = {slot: text(slot, length) for slot, length in enumerate((131, 47, 20, 33, 90))}
    slots = {0: 2, 1: 0, 2: 3, 3: NO_ADAPTER, 4: 1}
    begin = [Part(slot, 0, texts[slot][:size]) for slot, size in enumerate((130, 25, 20, 32, 89))]
    tree = Part(2, 20, text(9, 9), [0, 0, 1, 2, 2, 3, 0, 7])
    mixed = [
        Part(0, 130, texts[0][130:]),
        tree,
        Part(1, 25, texts[1][25:]),
        Part(3, 32, texts[3][32:]),
        Part(4, 89, texts[4][89:]),
    ]
    for parts in (begin, mixed):
        ours = served.adapted(parts, [slots[part.slot] for part in parts])
        row = 0
        for part in parts:
            for within in range(len(part.tokens)):
                if part is tree:
                    expected = written.logits(
                        slots[part.slot], [*texts[2], *path_to(tree, within)]
                    )[-1]
                else:
                    known = written.logits(slots[part.slot], texts[part.slot])
                    expected = known[part.start + within]
                error = float((ours[row] - expected).abs().max())
                assert error < tolerance, (part.slot, within, error)
                row += 1


@pytest.mark.parametrize(
    ("weight_format", "dtype"),
    [
        ("float", torch.float32),
        ("float", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("bf16", torch.float32),
        ("int8", torch.bfloat16),
    ],
)
def test_merged_weights(
    written: Written, weight_format: str, dtype: torch.dtype, library: ctypes.CDLL, isa: int
) -> None:
    of_both = max(TOLERANCE[weight_format], TOLERANCE["bf16" if dtype.itemsize == 2 else "float"])
    served = Adapted(written, weight_format, isa, 2, dtype, library=library)
    check(written, served, of_both)


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """All experts of a mixture that gives each token all of them, so that no rounding changes a
    choice; those of one layer, in the other form; attention alone; and a rank above a strip."""
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=72, intermediate_size=104, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=24, max_position_embeddings=512,
        num_local_experts=3, num_experts_per_tok=3, initializer_range=0.08,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).to(torch.bfloat16).float()
    model.save_pretrained(folder / "base")
    names = ("block_sparse_moe", "w1", "w3", "w2")
    adapters = (
        write_expert_adapter(folder / "a0", model, modules=names, rank=5, strength=0.3),
        write_expert_adapter(
            folder / "a1", model, modules=None, layers=r".*layers\.1\..*", rank=8, seed=1,
            strength=0.4, dtype=torch.bfloat16,
        ),
        write_adapter(
            folder / "a2", model, modules=".*q_proj", rank=4, strength=1.0, dtype=torch.bfloat16
        ),
        write_expert_adapter(folder / "a3", model, modules=None, rank=37, seed=3, strength=0.1),
    )  # fmt: skip
    return Written(folder / "base", adapters)


@pytest.mark.parametrize(
    ("weight_format", "dtype"),
    [
        ("float", torch.float32),
        ("bf16", torch.bfloat16),
        ("bf16", torch.float32),
        ("int8", torch.bfloat16),
    ],
)
def test_merged_experts(
    of_experts: Written, weight_format: str, dtype: torch.dtype, library: ctypes.CDLL, isa: int
) -> None:
    tolerance = max(TOLERANCE[weight_format], TOLERANCE["bf16" if dtype.itemsize == 2 else "float"])
    served = Adapted(of_experts, weight_format, isa, 2, dtype, library=library)
    check(of_experts, served, tolerance)
    tokens = text(1, 47)
    logits = [of_experts.logits(which, tokens) for which in range(-1, 4)]
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert (one - other).abs().max() > tolerance


@pytest.mark.parametrize("threads", [1, 5])
def test_experts_on_any_number_of_threads(of_experts: Written, threads: int) -> None:
    check(of_experts, Adapted(of_experts, "float", BEST, threads, torch.float32), 2e-4)


def test_adapters_are_told_apart(written: Written) -> None:
    """What the tolerances above are to be compared with."""
    tokens = text(1, 47)
    logits = [written.logits(which, tokens) for which in range(-1, 4)]
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert (one - other).abs().max() > 1.2


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_any_number_of_threads(written: Written, threads: int) -> None:
    check(written, Adapted(written, "float", BEST, threads, torch.float32), TOLERANCE["float"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_columns_are_shared_and_summed_in_one_order(
    dtype: torch.dtype, library: ctypes.CDLL, isa: int, tmp_path: Path
) -> None:
    """Inputs longer than a block of A's columns: few tokens share the blocks among threads, many do
    not; a token's result is the same to the bit."""
    ranks = [{"rank": 5, "strength": 0.2}, {"rank": 17, "strength": 0.2}]
    long = make(tmp_path, ranks, hidden_size=1096, intermediate_size=2120, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    tokens = text(3, 70)
    one = Adapted(long, "float", isa, 1, dtype, filled=(0, 1), library=library)
    many = Adapted(long, "float", isa, 5, dtype, filled=(0, 1), library=library)
    for slot in (0, 1):
        alone = [one.adapted([Part(0, 0, tokens[:2])], [slot])]
        alone += [one.adapted([Part(0, at, [tokens[at]])], [slot]) for at in range(2, 6)]
        shared = [many.adapted([Part(0, 0, tokens[:2])], [slot])]
        shared += [many.adapted([Part(0, at, [tokens[at]])], [slot]) for at in range(2, 6)]
        assert torch.equal(torch.cat(alone), torch.cat(shared))
        expected = long.logits(slot, tokens[:6])
        tolerance = 1e-3 if dtype == torch.float32 else 0.5
        assert (torch.cat(alone) - expected).abs().max() < tolerance


@pytest.mark.parametrize("weight_format", ["float", "bf16"])
def test_a_tokens_result_does_not_depend_on_its_neighbours(
    written: Written, weight_format: str, library: ctypes.CDLL, isa: int
) -> None:
    """First tokens of sequences, so that attention sees one token each."""
    dtype = torch.float32 if weight_format == "float" else torch.bfloat16
    served = Adapted(written, weight_format, isa, 2, dtype, library=library)
    tokens = text(7, 8)
    slots = [2, 0, NO_ADAPTER, 2, 1, 3, 0, 2]
    together = served.adapted([Part(i, 0, [tokens[i]]) for i in range(8)], slots)
    for i in range(8):
        alone = served.adapted([Part(i, 0, [tokens[i]])], [slots[i]])
        assert torch.equal(alone[0], together[i]), i
        pair = served.adapted(
            [Part(i, 0, [tokens[i]]), Part((i + 1) % 8, 0, [5])], [slots[i], (slots[i] + 2) % 4]
        )
        assert torch.equal(pair[0], together[i]), i


@pytest.mark.parametrize("weight_format", ["float", "bf16", "int8", "int4"])
def test_a_step_without_adapters_is_that_of_an_executor_without_slots(
    written: Written, weight_format: str
) -> None:
    """To the bit, and so are the tokens without one beside those with one."""
    plain = Served(written.folder, weight_format, BEST, 2, blocks=16)
    dtype = torch.float32 if weight_format == "float" else torch.bfloat16
    served = Adapted(written, weight_format, BEST, 2, dtype)
    parts = [Part(i, 0, text(i, length)) for i, length in enumerate((5, 1, 40))]
    expected = plain.logits(parts)
    assert torch.equal(served.logits(parts), expected)
    assert torch.equal(served.adapted(parts, [NO_ADAPTER] * 3), expected)
    mixed = served.adapted(parts, [NO_ADAPTER, 0, NO_ADAPTER])
    assert torch.equal(mixed[:5], expected[:5])
    assert torch.equal(mixed[6:], expected[6:])
    assert (mixed[5] - expected[5]).abs().max() > 0.1


def test_a_slot_that_is_filled_again_keeps_nothing(written: Written) -> None:
    """Larger and smaller adapters take turns in a slot, with steps in between."""
    served = Adapted(written, "float", BEST, 2, torch.float32, filled=(2, 0))
    tokens = text(5, 30)
    for which in (0, 3, 2, 1, 2):
        served.fill(0, which)
        ours = served.adapted([Part(0, 0, tokens), Part(1, 0, tokens)], [0, 1])
        assert (ours[:30] - written.logits(which, tokens)).abs().max() < TOLERANCE["float"]
        assert (ours[30:] - written.logits(0, tokens)).abs().max() < TOLERANCE["float"]


def test_a_poisoned_slot_reaches_its_own_tokens_alone(written: Written) -> None:
    served = Adapted(written, "bf16", BEST, 2, torch.bfloat16)
    parts = [Part(i, 0, text(i, 3)) for i in range(4)]
    before = served.adapted(parts, [0, 1, NO_ADAPTER, 0])
    adapter = written.read(1, torch.bfloat16)
    broken = {
        name: replace(linear, a=torch.full_like(linear.a, torch.nan))
        for name, linear in adapter.linears.items()
    }
    served.executor.fill_adapter_slot(1, replace(adapter, linears=broken))
    after = served.adapted(parts, [0, 1, NO_ADAPTER, 0])
    assert after[3:6].isnan().all()
    assert torch.equal(after[:3], before[:3])
    assert torch.equal(after[6:], before[6:])


def test_heads_that_end_within_a_strip(library: ctypes.CDLL, isa: int, tmp_path: Path) -> None:
    """Queries end, and keys begin and end, in the middle of 16 outputs; a gate of 40."""
    odd = make(
        tmp_path, [{"rank": 4, "strength": 0.3}, {"rank": 40, "strength": 0.1}],
        hidden_size=24, intermediate_size=40, num_attention_heads=3, num_key_value_heads=1,
        head_dim=8,
    )  # fmt: skip
    served = Adapted(odd, "float", isa, 2, torch.float32, filled=(0, 1), library=library)
    tokens = text(2, 25)
    ours = served.adapted([Part(0, 0, tokens), Part(1, 0, tokens)], [0, 1])
    for which in (0, 1):
        error = (ours[25 * which : 25 * which + 25] - odd.logits(which, tokens)).abs().max()
        assert error < TOLERANCE["float"]


def test_an_empty_slot_is_our_own_mistake(written: Written) -> None:
    served = Adapted(written, "float", BEST, 1, torch.float32, filled=(0,))
    with pytest.raises(AssertionError, match="a step uses an empty slot"):
        served.adapted([Part(0, 0, [1, 2])], [1])


def test_an_adapter_of_another_model_is_our_own_mistake(written: Written) -> None:
    served = Adapted(written, "float", BEST, 1, torch.float32, filled=(0,))
    adapter = written.read(0)
    for name, linear in adapter.linears.items():
        shorter = replace(linear, a=linear.a[:, :-1])
        with pytest.raises(AssertionError):
            served.executor.fill_adapter_slot(0, replace(adapter, linears={name: shorter}))
        last = replace(linear.parts[-1], first_row=linear.parts[-1].first_row + 8)
        moved = replace(linear, parts=(*linear.parts[:-1], last))
        with pytest.raises(AssertionError):
            served.executor.fill_adapter_slot(0, replace(adapter, linears={name: moved}))


def test_the_input_says_the_slot_of_every_sequence(written: Written) -> None:
    served = Adapted(written, "float", BEST, 1, torch.float32, filled=(0,))
    inputs: StepInput = served.rows([Part(0, 0, [1, 2]), Part(1, 0, [3])])
    with pytest.raises(AssertionError):
        replace(inputs, adapter_slots=np.zeros(3, np.int32))
    with pytest.raises(AssertionError):
        replace(inputs, adapter_slots=np.zeros(2, np.int64))
