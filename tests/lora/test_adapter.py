"""Adapters read from files: what they add to the model's own layers, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm.core.errors import AdapterError
from hetero_llm.core.lora import LoRARequest
from hetero_llm.lora.adapter import Adapter, read_adapter
from hetero_llm.lora.targets import AdapterTargets, adapter_targets
from hetero_llm.models.layers import CausalLM, Linear
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.helpers.adapters import (
    TinyAdapter,
    change_config,
    change_tensors,
    linear_modules,
    merge,
    write_adapter,
    write_expert_adapter,
)
from tests.models import tiny_moe
from tests.models.tiny import VARIANTS, make_tiny_checkpoint

ATTENTION = r".*(attn|attention|self_attention)\..*"
_MORE = {("falcon", "grouped"), ("gpt_bigcode", "multi_head"), ("opt", "projections")}
LAYOUTS = [
    (name, variant)
    for index, (name, variant) in enumerate(VARIANTS)
    if (name, variant) in _MORE or name not in [earlier for earlier, _ in VARIANTS[:index]]
]
"""The first variant of each family, and those that store their rows in another order."""
FIRST_OF_FAMILY = {name: variant for name, variant in reversed(VARIANTS)}


def load(folder: Path) -> tuple[CausalLM, AdapterTargets]:
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    return model, adapter_targets(model, config)


def read(adapter: TinyAdapter, targets: AdapterTargets, max_rank: int = 64) -> Adapter:
    request = LoRARequest("a", 1, str(adapter.folder))
    return read_adapter(request, targets, max_rank=max_rank, dtype=torch.float32)


@pytest.mark.parametrize(("family", "variant"), LAYOUTS, ids=["-".join(v) for v in LAYOUTS])
def test_every_family_gets_what_merged_weights_hold(
    tmp_path: Path, family: str, variant: str
) -> None:
    """The weights of a checkpoint that transformers has merged, loaded by name, are the base's plus
    `delta`: so names, fused rows and their order are right."""
    folder = make_tiny_checkpoint(tmp_path / "base", family, variant)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    modules = ATTENTION if family in tiny_moe.FAMILIES else ".*"
    modules = r"(?!.*project_out).*" if family == "opt" else modules
    adapter = write_adapter(tmp_path / "adapter", reference, modules=modules, rank=3)
    merge(reference, adapter)
    reference.save_pretrained(tmp_path / "merged")
    base, targets = load(folder)
    merged, _ = load(tmp_path / "merged")
    found = read(adapter, targets)
    others = dict(merged.named_modules())
    changed = set()
    for name, module in base.named_modules():
        if not isinstance(module, Linear):
            continue
        delta = others[name].weight - module.weight
        if name in found.linears:
            own = found.linears[name].delta(len(module.weight))
            torch.testing.assert_close(delta, own, atol=1e-5, rtol=1e-5)
            changed.add(name)
        else:
            assert not delta.abs().max() > 0, name
    assert changed == set(found.linears)
    assert sum(len(linear.parts) for linear in found.linears.values()) == len(adapter.deltas)


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def targets(tiny_folder: Path) -> AdapterTargets:
    return load(tiny_folder)[1]


class TestLlama:
    """The options of one family."""

    @staticmethod
    def total(adapter: TinyAdapter) -> dict[str, torch.Tensor]:
        """What the fused layers of Llama get, by the name of the `Linear`."""
        fused = {
            "attention.qkv_proj": [f"self_attn.{one}_proj" for one in "qkv"],
            "attention.out_proj": ["self_attn.o_proj"],
            "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
            "mlp.down_proj": ["mlp.down_proj"],
        }
        made = {}
        for name in [name for name in adapter.deltas if name.endswith("q_proj")]:
            layer = name.split(".")[2]
            for ours, theirs in fused.items():
                keys = [f"model.layers.{layer}.{one}" for one in theirs]
                made[f"layers.{layer}.{ours}"] = torch.cat([adapter.deltas[k] for k in keys])
        return made

    @pytest.mark.parametrize(
        "options",
        [
            {"rank": 1},
            {"rank": 64, "strength": 0.05},
            {"rank": 8, "alpha": 3.5, "rslora": True},
            {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 7}},
            {"alpha_pattern": {"k_proj": 1.0, "self_attn.v_proj": 32}, "rslora": True},
            {"dtype": torch.bfloat16},
            {"target_modules": "all-linear"},
            {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                                "down_proj"]},
        ],
    )  # fmt: skip
    def test_ranks_scales_and_targets(
        self, tmp_path: Path, reference: Any, targets: AdapterTargets, options: Mapping[str, Any]
    ) -> None:
        adapter = write_adapter(tmp_path, reference, **options)
        found = read(adapter, targets)
        expected = self.total(adapter)
        assert set(expected) == set(found.linears)
        for name, delta in expected.items():
            own = found.linears[name].delta(len(delta))
            torch.testing.assert_close(own, delta, atol=1e-5, rtol=1e-5)
        assert found.ref.rank == max(one.a.shape[0] for one in found.linears.values())

    def test_layers_to_transform(
        self, tmp_path: Path, reference: Any, targets: AdapterTargets
    ) -> None:
        adapter = write_adapter(
            tmp_path,
            reference,
            modules=r"model\.layers\.1\..*(q|k|v)_proj",
            target_modules=["q_proj", "k_proj", "v_proj"],
            options={"layers_to_transform": [1]},
        )
        assert set(read(adapter, targets).linears) == {"layers.1.attention.qkv_proj"}

    def test_pickled_files_and_names_with_the_adapter(
        self, tmp_path: Path, reference: Any, targets: AdapterTargets
    ) -> None:
        adapter = write_adapter(tmp_path, reference)
        expected = read(adapter, targets).ref.content_hash
        (tmp_path / "adapter_model.safetensors").unlink()
        torch.save(
            {k.replace(".weight", ".default.weight"): v for k, v in adapter.tensors.items()},
            tmp_path / "adapter_model.bin",
        )
        assert read(adapter, targets).ref.content_hash == expected

    def test_the_hash_is_that_of_the_effect(
        self, tmp_path: Path, reference: Any, targets: AdapterTargets
    ) -> None:
        one = write_adapter(tmp_path / "1", reference)
        same = write_adapter(tmp_path / "2", reference, options={"lora_dropout": 0.5})
        scaled = write_adapter(tmp_path / "3", reference, alpha=9)
        other = write_adapter(tmp_path / "4", reference, seed=1)
        hashes = [read(each, targets).ref.content_hash for each in (one, same, scaled, other)]
        assert hashes[0] == hashes[1]
        assert len(set(hashes)) == 3

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("peft_type", "LOHA"),
            ("use_dora", True),
            ("bias", "all"),
            ("lora_bias", True),
            ("modules_to_save", ["lm_head"]),
            ("target_parameters", "experts.down_proj"),
            ("target_parameters", ["mlp.up_proj.weight", 3]),
            ("layer_replication", [[0, 2]]),
            ("trainable_token_indices", [1]),
            ("init_lora_weights", "pissa_niter_4"),
            ("a_new_option", 3),
            ("r", 0),
            ("r", "8"),
            ("lora_alpha", None),
            ("use_rslora", "yes"),
            ("rank_pattern", {"q_proj": -1}),
            ("rank_pattern", {"(": 1}),
            ("alpha_pattern", ["q_proj"]),
            ("target_modules", None),
            ("target_modules", "("),
            ("target_modules", ["q_proj", 3]),
            ("layers_to_transform", "1"),
        ],
    )
    def test_options_that_are_refused(
        self, tmp_path: Path, reference: Any, targets: AdapterTargets, option: str, value: Any
    ) -> None:
        adapter = write_adapter(tmp_path, reference)
        change_config(adapter, **{option: value})
        with pytest.raises(AdapterError) as caught:
            read(adapter, targets)
        assert caught.value.field.split(".")[0] == option
        assert "adapter_config.json" in str(caught.value)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"layers.0.self_attn.q_proj.lora_A.weight": None}, "is missing"),
            ({"layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(3, 4)}, "need"),
            ({"layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4)}, "need"),
            ({"layers.0.mlp.up_proj.lora_A.weight": torch.zeros(4, 64, dtype=torch.int32)}, "I32"),
            ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(4, 64)},
             "another base"),
            ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}, "head"),
            ({"base_model.model.model.embed_tokens.lora_A.weight": torch.zeros(4, 64)}, "head"),
            ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 64)}, "no A"),
            ({"model.layers.0.self_attn.q_proj.lora_A.x.weight": torch.zeros(4, 64)}, "twice"),
        ],
    )  # fmt: skip
    def test_tensors_that_are_refused(
        self,
        tmp_path: Path,
        reference: Any,
        targets: AdapterTargets,
        changes: Mapping[str, torch.Tensor | None],
        reason: str,
    ) -> None:
        adapter = write_adapter(tmp_path, reference, options={"target_modules": "all-linear"})
        change_tensors(adapter, changes)
        with pytest.raises(AdapterError, match=reason) as caught:
            read(adapter, targets)
        assert caught.value.field == "tensor"
        assert "lora" in caught.value.value

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_numbers_that_are_not_finite(
        self, tmp_path: Path, reference: Any, targets: AdapterTargets, value: float
    ) -> None:
        adapter = write_adapter(tmp_path, reference)
        name = next(iter(adapter.tensors))
        broken = adapter.tensors[name].clone()
        broken[0, 0] = value
        change_tensors(adapter, {name: broken})
        with pytest.raises(AdapterError, match="not finite"):
            read(adapter, targets)

    def test_modules_that_the_file_lacks_or_the_options_do_not_name(
        self, tmp_path: Path, reference: Any, targets: AdapterTargets
    ) -> None:
        adapter = write_adapter(
            tmp_path, reference, modules=".*q_proj", target_modules=["q_proj", "v_proj"]
        )
        with pytest.raises(AdapterError, match=r"target_modules=.*lacks: .*layers\.0.*v_proj"):
            read(adapter, targets)
        change_config(adapter, target_modules=["v_proj"])
        with pytest.raises(AdapterError, match=r"does not name these modules.*q_proj"):
            read(adapter, targets)

    def test_rank_above_the_limit(
        self, tmp_path: Path, reference: Any, targets: AdapterTargets
    ) -> None:
        adapter = write_adapter(tmp_path, reference, rank=9)
        with pytest.raises(AdapterError, match=r"r=9: .*max_lora_rank \(8\)"):
            read(adapter, targets, max_rank=8)

    def test_folders_and_files(
        self, tmp_path: Path, reference: Any, targets: AdapterTargets
    ) -> None:
        adapter = write_adapter(tmp_path / "a", reference)
        with pytest.raises(AdapterError, match="no such folder"):
            read(TinyAdapter(tmp_path / "none", {}), targets)
        weights = adapter.folder / "adapter_model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:100])
        with pytest.raises(AdapterError, match="not a readable safetensors file"):
            read(adapter, targets)
        weights.unlink()
        with pytest.raises(AdapterError, match="holds no adapter_model.safetensors"):
            read(adapter, targets)
        weights.write_bytes(whole)
        (adapter.folder / "adapter_config.json").write_text("[1]")
        with pytest.raises(AdapterError, match="a JSON object is needed"):
            read(adapter, targets)
        (adapter.folder / "adapter_config.json").unlink()
        with pytest.raises(AdapterError, match="no such file"):
            read(adapter, targets)

    def test_a_file_without_tensors(
        self, tmp_path: Path, reference: Any, targets: AdapterTargets
    ) -> None:
        adapter = write_adapter(tmp_path, reference)
        change_tensors(adapter, {name: None for name in adapter.tensors})
        with pytest.raises(AdapterError, match="holds no tensor"):
            read(adapter, targets)


NAMED_AS_MLPS = ("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL = ("block_sparse_moe", "w1", "w3", "w2")
EXPERTS = [
    ("mixtral", MIXTRAL),
    ("qwen2_moe", NAMED_AS_MLPS),
    ("qwen3_moe", NAMED_AS_MLPS),
    ("glm4_moe", NAMED_AS_MLPS),
    ("minimax_m2", MIXTRAL),
    ("phimoe", MIXTRAL),
    *((family, None) for family in tiny_moe.FAMILIES),
]


@pytest.mark.parametrize(
    ("family", "modules"), EXPERTS, ids=[f"{f}-{'modules' if m else 'banks'}" for f, m in EXPERTS]
)
def test_experts_get_what_merged_weights_hold(
    tmp_path: Path, family: str, modules: tuple[str, str, str, str] | None
) -> None:
    """As above, for each expert, in both forms in which PEFT has written them."""
    folder = make_tiny_checkpoint(tmp_path / "base", family, FIRST_OF_FAMILY[family])
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapter = write_expert_adapter(tmp_path / "adapter", reference, modules=modules, rank=3)
    merge(reference, adapter)
    reference.save_pretrained(tmp_path / "merged")
    base, targets = load(folder)
    merged, _ = load(tmp_path / "merged")
    found = read(adapter, targets)
    weights, others = (dict(model.named_parameters()) for model in (base, merged))
    assert found.linears == {} and set(found.experts) == targets.expert_weights()
    assert len(found.experts) == len(adapter.deltas) > 0
    for name, experts in found.experts.items():
        delta = others[name] - weights[name]
        own = torch.stack([experts[e].delta(delta.shape[1]) for e in range(len(delta))])
        assert len(experts) == len(delta) and own.abs().max() > 0.1
        torch.testing.assert_close(delta, own, atol=1e-5, rtol=1e-5)
    others_changed = {n for n, w in weights.items() if not torch.equal(w, others[n])}
    assert others_changed == set(found.experts)


class TestExperts:
    """What is refused of adapters of experts."""

    @pytest.fixture
    def base(self, tmp_path: Path) -> tuple[Any, AdapterTargets]:
        folder = make_tiny_checkpoint(tmp_path / "base", "mixtral")
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return reference, load(folder)[1]

    def test_without_room_for_them(self, tmp_path: Path, base: Any) -> None:
        model, _ = load(tmp_path / "base")
        targets = adapter_targets(model, model.config, experts=False)
        for number, modules in enumerate((MIXTRAL, None)):
            adapter = write_expert_adapter(tmp_path / f"a{number}", base[0], modules=modules)
            with pytest.raises(AdapterError, match=r"experts.*needs lora_experts"):
                read(adapter, targets)

    @pytest.mark.parametrize("modules", [MIXTRAL, None])
    def test_attention_alone_though_the_options_name_experts(
        self, tmp_path: Path, base: Any, modules: tuple[str, str, str, str] | None
    ) -> None:
        """Classes of transformers have had no module for an expert since version 5."""
        adapter = write_adapter(tmp_path / "a", base[0], modules=".*q_proj")
        change_config(adapter, target_modules=["q_proj", *(modules or ())[1:]])
        assert not read(adapter, base[1]).experts

    def test_some_are_missing(self, tmp_path: Path, base: Any) -> None:
        adapter = write_expert_adapter(tmp_path / "a", base[0], modules=MIXTRAL)
        gone = {f"layers.0.block_sparse_moe.experts.1.w3.lora_{s}.weight": None for s in "AB"}
        change_tensors(adapter, gone)
        with pytest.raises(AdapterError, match=r"lacks: .*experts\.1\.w3"):
            read(adapter, base[1])

    def test_parameters_that_the_options_or_the_file_lack(self, tmp_path: Path, base: Any) -> None:
        adapter = write_expert_adapter(tmp_path / "a", base[0], modules=None)
        change_config(adapter, target_parameters=["experts.down_proj"])
        with pytest.raises(AdapterError, match="gate_up_proj|base_layer"):
            read(adapter, base[1])
        change_config(adapter, target_parameters=["mlp.gate.weight"])
        with pytest.raises(AdapterError, match="names no parameter of"):
            read(adapter, base[1])
        adapter = write_expert_adapter(
            tmp_path / "b", base[0], modules=None, layers=".*layers.0.*down_proj"
        )
        change_config(adapter, target_parameters=["experts.down_proj"])
        with pytest.raises(AdapterError, match="names parameters that .* lacks"):
            read(adapter, base[1])

    def test_shapes_and_ranks(self, tmp_path: Path, base: Any) -> None:
        adapter = write_expert_adapter(tmp_path / "a", base[0], modules=None)
        with pytest.raises(AdapterError, match="exceeds max_lora_rank"):
            read(adapter, base[1], max_rank=3)
        change_config(adapter, r=5)
        with pytest.raises(AdapterError, match=r"the base model and r need \[20, "):
            read(adapter, base[1])

    def test_both_forms_at_once(self, tmp_path: Path, base: Any) -> None:
        one = write_expert_adapter(tmp_path / "a", base[0], modules=None)
        other = write_expert_adapter(tmp_path / "b", base[0], modules=MIXTRAL)
        change_config(one, target_modules=list(MIXTRAL[1:]))
        change_tensors(one, other.tensors)
        with pytest.raises(AdapterError, match="one for all experts"):
            read(one, base[1])

    @pytest.mark.parametrize("modules", [MIXTRAL, None])
    def test_stored_twice(
        self, tmp_path: Path, base: Any, modules: tuple[str, str, str, str] | None
    ) -> None:
        """By two names of one module: neither of them is dropped quietly."""
        adapter = write_expert_adapter(tmp_path / "a", base[0], modules=modules)
        name = next(name for name in adapter.tensors if "experts" in name)
        called = name.removesuffix(".weight") + ".default.weight"
        change_tensors(adapter, {called: adapter.tensors[name].clone()})
        with pytest.raises(AdapterError, match="its module is stored twice"):
            read(adapter, base[1])

    def test_a_router_by_its_weight(self, tmp_path: Path, base: Any) -> None:
        """`target_parameters` may name any weight; a matrix alone is stored as a layer's."""
        adapter = write_adapter(tmp_path / "a", base[0], modules=".*q_proj")
        change_config(adapter, target_parameters=["layers.0.block_sparse_moe.gate.weight"])
        key = "base_model.model.model.layers.0.block_sparse_moe.gate.lora_"
        change_tensors(
            adapter, {f"{key}A.weight": torch.ones(4, 32), f"{key}B.weight": torch.ones(4, 4)}
        )
        assert "layers.0.mlp.router.gate" in read(adapter, base[1]).linears


def test_routers_in_float32_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "base", "glm4_moe")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapter = write_adapter(tmp_path / "adapter", reference, modules=".*q_proj")
    name = "base_model.model.model.layers.1.mlp.gate.lora_A.weight"
    change_tensors(adapter, {name: torch.zeros(4, 32)})
    with pytest.raises(AdapterError, match=r"mlp\.gate.*router in float32 is not available yet"):
        read(adapter, load(folder)[1])


def test_every_linear_layer_below_the_head_is_a_target(tmp_path: Path) -> None:
    """PEFT's list of all linear layers has no module that the model lacks."""
    for family in ("llama", "gpt2", "gpt_neox", "glm4", "glm4_moe"):
        folder = make_tiny_checkpoint(tmp_path / family, family, FIRST_OF_FAMILY[family])
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
        targets = load(folder)[1]
        for name in linear_modules(reference):
            assert targets.own_name(name) in targets.targets, name
