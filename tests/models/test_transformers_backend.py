"""Classes of transformers with our attention: through `LLM` as the library itself computes them,
and refused, by name, where they would not be."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from hetero_llm import LLM, ConfigError, ModelLoadError, RequestOutput, SamplingParams
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.engine.resolve import find_model
from hetero_llm.models import transformers_check
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.transformers import load_transformers_config
from hetero_llm.models.experts import Experts
from hetero_llm.models.layers import Activation, GatedActivation, GemmaRMSNorm, Linear, RMSNorm
from hetero_llm.models.loader import load_model
from hetero_llm.models.registry import TRANSFORMERS
from hetero_llm.models.transformers_backend import TransformersForCausalLM
from hetero_llm.models.transformers_modules import Conversion
from tests.models.tiny import rewrite_config

VOCAB = 96
TOLERANCE = 1e-4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {**SIZES, "head_dim": 8}
MIXED = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
EXPERTS = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}

# name -> class, configuration; what each adds is named on the right
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", HEADS),
    "qwen3": ("Qwen3", HEADS),  # norms of heads
    "gemma3": (  # two rotary tables, norms of another kind, a scale of its own, mixed windows
        "Gemma3",
        {**HEADS, **MIXED, "query_pre_attn_scalar": 11},
    ),
    "gemma2": (  # soft caps of scores and of logits
        "Gemma2",
        {**HEADS, **MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "olmo2": ("Olmo2", SIZES),  # norms after
    "cohere": ("Cohere", {**SIZES, "logit_scale": 0.3, "use_qk_norm": True}),  # neighbour-wise
    "granite": (  # multipliers everywhere
        "Granite",
        {
            **SIZES,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
        },
    ),
    "gpt_neox": (  # partial rotary, parallel residual, layer norms
        "GPTNeoX",
        {**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}, "rotary_pct": 0.5},
    ),
    "smollm3": ("SmolLM3", {**SIZES, "no_rope_layer_interval": 2}),  # layers without positions
    "phi": ("Phi", {**SIZES, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {**SIZES, "rope_parameters": LONG, "sliding_window": 5}),  # fused projections
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 8, "norm_topk_prob": True}),
}
PARAMS = SamplingParams(
    temperature=1.0, seed=1, max_tokens=6, ignore_eos=True, logprobs=20, prompt_logprobs=20,
    detokenize=False,
)  # fmt: skip
WITHOUT_PROMPT = dataclasses.replace(PARAMS, prompt_logprobs=None)
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)


def save(
    folder: Path, prefix: str, settings: dict[str, Any], *, suffix: str = "ForCausalLM"
) -> Path:
    """A random model; all weights, norms and biases too."""
    config_class = "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    model = getattr(transformers, prefix + suffix)(getattr(transformers, config_class)(**settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.25 * noise)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save(tmp_path_factory.mktemp(name) / "model", *entry)
        for name, entry in CLASSES.items()
    }


@pytest.fixture(scope="module")
def llama(folders: dict[str, Path]) -> Path:
    return folders["llama"]


def serve(folder: Path, **engine_args: Any) -> LLM:
    defaults = {"dtype": "float32", "device": "cpu", "model_impl": "transformers", "block_size": 8}
    return LLM(str(folder), skip_tokenizer_init=True, **{**defaults, **engine_args})


def load(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> TransformersForCausalLM:
    config = load_transformers_config(folder)
    model = load_model(folder, config, dtype=dtype, device="cpu", show_progress=False, **more)
    assert isinstance(model, TransformersForCausalLM)
    return model


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def assert_equals(reference: Any, outputs: list[RequestOutput]) -> None:
    """All log-probabilities, teacher-forced on the engine's own tokens."""
    for output in outputs:
        (completion,) = output.outputs
        tokens = output.prompt_token_ids + completion.token_ids
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        start = len(output.prompt_token_ids)
        entries = list(enumerate(completion.logprobs, start))
        entries += list(enumerate(output.prompt_logprobs or []))[1:]
        found = [(p - 1, t, e.logprob) for p, entry in entries for t, e in entry.items()]
        rows, columns, ours = (torch.tensor(column) for column in zip(*found, strict=True))
        assert len(ours) >= 20 * len(entries)
        torch.testing.assert_close(ours, expected[rows, columns], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", CLASSES)
def test_equals_transformers(folders: dict[str, Path], name: str) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folders[name], dtype=torch.float32, attn_implementation="eager"
    )
    asked = prompts(20, 1, 31, 9, 3, 26)
    if name == "phi3":  # transformers changes factors when a sequence outgrows the first context
        asked = prompts(33, 34, 40, 36, 37, 33)
    with serve(folders[name]) as llm:
        assert_equals(reference, generate(llm, asked, PARAMS))
        again = generate(llm, [asked[2], asked[5]], WITHOUT_PROMPT)
        assert min(output.num_cached_tokens for output in again) >= 24
        assert_equals(reference, again)
    with serve(folders[name], max_num_batched_tokens=5, max_num_seqs=5) as llm:
        assert_equals(reference, generate(llm, asked[1:4], PARAMS))


@pytest.mark.parametrize("name", ["llama", "gemma3", "cohere", "smollm3"])
def test_greedy_batch_with_batch_invariance(folders: dict[str, Path], name: str) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folders[name], dtype=torch.float32, attn_implementation="eager"
    )
    asked = prompts(11, 5, 23, 17)
    with serve(folders[name], batch_invariant=True) as llm:
        together = generate(llm, asked, GREEDY)
        alone = generate(llm, asked[:1], GREEDY)
    assert alone[0].outputs[0].token_ids == together[0].outputs[0].token_ids
    for output in together:
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.no_grad():
            likeliest = reference(torch.tensor([tokens])).logits[0].argmax(-1)
        assert likeliest[len(output.prompt_token_ids) - 1 : -1].tolist() == tokens[-32:]


def test_a_class_with_products_of_its_own_is_not_batch_invariant(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Conversion, "mlps_of_experts", lambda *_: None)
    with pytest.raises(ConfigError, match="batch_invariant=True: Qwen3MoeForCausalLM") as caught:
        serve(folders["qwen3_moe"], batch_invariant=True)
    assert "differently in other batches" in str(caught.value)


def test_draws_with_the_lookahead_cache_are_the_same(llama: Path) -> None:
    asked = prompts(9, 14)
    params = dataclasses.replace(GREEDY, max_tokens=20)
    with serve(llama) as plain, serve(llama, use_lookahead=True) as with_drafts:
        expected = generate(plain, asked, params)
        for _ in range(2):
            found = generate(with_drafts, asked, params)
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
        metrics = with_drafts.metrics()
    assert metrics["spec_decode_num_accepted_tokens"] > 0, metrics


def test_bfloat16_and_dummy_weights(llama: Path, folders: dict[str, Path]) -> None:
    for folder in (llama, folders["gemma3"]):
        for load_format in ("auto", "dummy"):
            with serve(folder, dtype="bfloat16", load_format=load_format) as llm:
                (output,) = generate(llm, prompts(9), dataclasses.replace(GREEDY, max_tokens=4))
                assert len(output.outputs[0].token_ids) == 4


# -- parts replaced -------------------------------------------------------------------------


def test_parts_that_others_replace_are_found(folders: dict[str, Path]) -> None:
    model = load(folders["llama"])
    kinds = [type(module) for module in model.modules()]
    assert nn.Linear not in kinds
    assert sum(isinstance(m, Linear) for m in model.modules()) == 3 * 6 + 1
    assert sum(isinstance(m, RMSNorm) for m in model.modules()) == 3 * 2 + 1
    assert sum(isinstance(m, GatedActivation) for m in model.modules()) == 3
    gemma = load(folders["gemma3"])
    assert sum(isinstance(m, GemmaRMSNorm) for m in gemma.modules()) == 3 * 6 + 1
    moe = load(folders["qwen3_moe"])
    assert sum(isinstance(m, Experts) for m in moe.modules()) == 3
    neox = load(folders["gpt_neox"])
    assert sum(isinstance(m, Activation) for m in neox.modules()) == 3


def test_nothing_is_left_without_memory_and_tied_weights_stay_tied(
    folders: dict[str, Path],
) -> None:
    for name, folder in folders.items():
        model = load(folder)
        assert not any(p.is_meta for p in model.parameters()), name
        assert not any(b.is_meta for b in model.buffers()), name
    tied = load(folders["gemma3"])
    assert tied.lm_head.weight is tied.causal.get_input_embeddings().weight
    assert load(folders["llama"]).lm_head.weight is not None


def test_hidden_states_are_those_below_the_head(llama: Path) -> None:
    reference = transformers.LlamaForCausalLM.from_pretrained(llama)
    model = load(llama)
    ids = torch.tensor(prompts(1)[0])
    with torch.no_grad():
        expected = reference.model(input_ids=ids[None]).last_hidden_state[0]
        # The first row of a sequence attends to itself alone.
        found = model(ids, torch.zeros(1, dtype=torch.int64), FirstRow(model.config.num_heads))
    torch.testing.assert_close(found, expected)


class FirstRow:
    """An `Attend` for single rows."""

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.repeat_interleave(self.heads // v.shape[1], dim=1)

    def rotary(self, layer: int, qkv: Tensor, heads: Any, rows: Any) -> Tensor:
        raise AssertionError("transformers rotates by itself")

    def select(self, layer: int, x: Tensor) -> Tensor:
        raise AssertionError("classes of transformers return every row")


# -- which implementation -------------------------------------------------------------------


def test_auto_takes_the_native_family_where_there_is_one(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hetero_llm")
    load_config = LoadConfigs(folders)
    assert load_config("llama", "auto").architecture == "LlamaForCausalLM"
    assert load_config("llama", "native").architecture == "LlamaForCausalLM"
    assert load_config("llama", "transformers").architecture == TRANSFORMERS
    assert not caplog.records
    assert load_config("olmo2", "auto").architecture == TRANSFORMERS
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "Olmo2ForCausalLM" in record.getMessage()
    with pytest.raises(ModelLoadError, match="Olmo2ForCausalLM"):
        load_config("olmo2", "native")


def test_overrides_of_the_configuration(folders: dict[str, Path]) -> None:
    load_config = LoadConfigs(folders)
    olmo = load_config("olmo2", "auto", hf_overrides={"max_position_embeddings": 32})
    assert olmo.max_model_len == 32 < load_config("olmo2", "auto").max_model_len
    named = load_config("llama", "auto", hf_overrides={"architectures": ["Olmo2ForCausalLM"],
                                                       "model_type": "olmo2"})  # fmt: skip
    assert named.architecture == TRANSFORMERS
    with pytest.raises(ModelLoadError, match="hf_overrides needs a class of transformers' own"):
        load_config(
            "olmo2",
            "transformers",
            trust_remote_code=True,
            hf_overrides={"model_type": "own", "auto_map": {"AutoModelForCausalLM": "m.C"}},
        )


class LoadConfigs:
    """Configurations as the engine finds them."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders

    def __call__(self, name: str, model_impl: str, **engine_args: Any) -> ModelConfig:
        args = {"model": str(self.folders[name]), "model_impl": model_impl, **engine_args}
        config = EngineConfig.from_args(resolve_engine_args(args))
        return find_model(config.load)[1]


def test_other_values_are_an_error_that_lists_them(llama: Path) -> None:
    with pytest.raises(ConfigError, match="model_impl.*auto.*native.*transformers"):
        serve(llama, model_impl="vlm")


@pytest.mark.parametrize(
    "argument",
    [{"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"rope_theta": 100.0}],
)
def test_arguments_of_native_families_are_refused_by_name(
    llama: Path, argument: dict[str, Any]
) -> None:
    (name,) = argument
    with pytest.raises(ConfigError, match=f"{name}=.*LlamaForCausalLM runs on transformers"):
        serve(llama, **argument)


def test_what_only_the_native_executor_does_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="cpu_weight_dtype"):
        serve(llama, cpu_weight_dtype="int8")


def test_disable_sliding_window_caps_the_context(folders: dict[str, Path]) -> None:
    load_config = LoadConfigs(folders)
    assert load_config("gemma3", "auto").sliding_windows == (5, None, 5)
    without = load_config("gemma3", "auto", disable_sliding_window=True)
    assert (without.sliding_windows, without.max_model_len) == ((None,) * 3, 5)
    with serve(folders["gemma3"], disable_sliding_window=True) as llm:
        generate(llm, prompts(3), dataclasses.replace(GREEDY, max_tokens=2))


# -- refusals -------------------------------------------------------------------------------

REFUSED = {
    "an encoder with a decoder": (
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
        "T5ForConditionalGeneration.*no decoder-only model",
    ),
    "a state-space model": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        "state_size: MambaForCausalLM has a state-space model",
    ),
    "linear attention": (
        {
            "architectures": ["MiniMaxForCausalLM"], "model_type": "minimax",
            "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2,
        },
        "layer_types: 'linear_attention' is not supported",
    ),
    "latent attention": (
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
        "kv_lora_rank: DeepseekV3ForCausalLM has multi-head latent attention",
    ),
    "remote code": (
        {
            "architectures": ["OwnForCausalLM"], "model_type": "own",
            "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"},
        },
        "auto_map.*OwnForCausalLM.*--trust-remote-code",
    ),
    "an unknown class": (
        {"architectures": ["OwnForCausalLM"], "model_type": "own"},
        "model_type='own': transformers .* knows no such one",
    ),
    "another class of a known family": (
        {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
        "no decoder-only model of transformers; its causal language model is LlamaForCausalLM",
    ),
    "quantized weights": (
        {
            "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2",
            "quantization_config": {"bits": 4},
        },
        "quantization_config.*not supported with Olmo2ForCausalLM",
    ),
    "no class": ({"model_type": "olmo2"}, "architectures=None"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_its_configuration(tmp_path: Path, kind: str) -> None:
    raw, message = REFUSED[kind]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelLoadError, match=message):
        load_transformers_config(tmp_path)


@pytest.mark.parametrize("name", ["BioGpt", "Falcon"])
def test_a_class_outside_the_attention_interface_is_refused(tmp_path: Path, name: str) -> None:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }  # fmt: skip
    getattr(transformers, f"{name}Config")(**settings).save_pretrained(tmp_path)
    rewrite_config(tmp_path, architectures=[f"{name}ForCausalLM"])
    with pytest.raises(ModelLoadError, match=f"{name}ForCausalLM.*computes attention by itself"):
        load(tmp_path, load_format="dummy")


def test_attention_sinks_are_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**HEADS, **MIXED, "num_local_experts": 2, "num_experts_per_tok": 1}
    transformers.GptOssConfig(**settings).save_pretrained(tmp_path)
    rewrite_config(tmp_path, architectures=["GptOssForCausalLM"])
    model = load(tmp_path, load_format="dummy")
    with pytest.raises(ModelLoadError, match="layer 0 asks its attention for s_aux"):
        model.finish_loading(batch_invariant=False)


BROKEN_PROMISES: dict[str, tuple[str, dict[str, Any], str]] = {
    "scale": ("llama", {"attn_scale": 0.5}, "layer 0 scales by 0.35.*its config says 0.5"),
    "soft cap": ("llama", {"attn_softcap": 30.0}, "layer 0 has a soft cap of None"),
    "window": ("gemma3", {"sliding_windows": (5, 5, 5)}, "layer 1 attends within .* None"),
    "heads": ("llama", {"num_kv_heads": 4}, "keys of layer 0 are .1, 2, 11, 8."),
    "layers": ("llama", {"num_layers": 4, "sliding_windows": (None,) * 4}, "attends 3 times"),
}


@pytest.mark.parametrize("kind", BROKEN_PROMISES)
def test_a_promise_that_the_class_does_not_keep(folders: dict[str, Path], kind: str) -> None:
    name, changes, message = BROKEN_PROMISES[kind]
    model = load(folders[name])
    model.config = dataclasses.replace(model.config, **changes)
    with pytest.raises(ModelLoadError, match=message):
        model.finish_loading(batch_invariant=False)


def test_a_class_that_mixes_rows_is_found_by_its_logits(llama: Path) -> None:
    model = load(llama)
    model.finish_loading(batch_invariant=False)
    layer = model.causal.model.layers[1]
    inner = layer.mlp.forward
    layer.mlp.forward = lambda x: inner(x + x.roll(1, dims=1))
    with pytest.raises(ModelLoadError, match="with our attention its logits are off by"):
        model.finish_loading(batch_invariant=False)


def test_the_class_gets_its_own_attention_back_for_the_trial_only(llama: Path) -> None:
    model = load(llama)
    transformers_check.try_model(model)
    assert model.causal.config._attn_implementation == "hetero_llm"


# -- code that comes with the model ---------------------------------------------------------

OWN_CLASS = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_the_model_runs_only_when_it_is_trusted(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    folder = shutil.copytree(llama, tmp_path / "own")
    (folder / "own.py").write_text(OWN_CLASS)
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    rewrite_config(folder, architectures=["OwnForCausalLM"], model_type="own", auto_map=auto_map)
    with pytest.raises(ModelLoadError, match=r"OwnForCausalLM.*--trust-remote-code"):
        serve(folder, model_impl="auto")
    reference = transformers.LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    with serve(folder, model_impl="auto", trust_remote_code=True) as llm:
        assert_equals(reference, generate(llm, prompts(9), PARAMS))
