"""GGUF files as models: the tokens of transformers' class with the numbers that the file's blocks
stand for, read independently of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm import LLM, SamplingParams
from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.cpu import native
from hetero_llm.models.read_config import load_model_config
from tests.helpers.gguf_files import TinyGguf, make_tiny_gguf, sizes_for
from tests.models.gguf.test_tokenizer import byte_level
from tests.models.loading import load
from tests.models.tiny import DenseAttend

NEW_TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
PROMPTS = [[9], list(range(3, 23))]
FAMILIES = [
    ("llama", "gqa", "Q4_0", {}),
    ("llama", "biases", "Q5_1", {}),
    ("qwen2", "full", "Q8_0", {}),
    ("qwen3", "full", "Q4_1", {}),
    ("qwen3_moe", "full", "Q4_0", {"mlp_only_layers": [], "moe_intermediate_size": 32}),
    ("gemma", "tied_biases", "Q8_0", {"attention_bias": False}),
    ("gemma2", "soft_caps", "Q4_1", {"query_pre_attn_scalar": 8}),
]


@pytest.fixture(autouse=True)
def one_thread(two_threads: None) -> None:
    torch.set_num_threads(1)


def make(folder: Path, family: str, variant: str, kind: str, changes: dict[str, Any]) -> TinyGguf:
    changes = {"intermediate_size": 64, **changes}
    return make_tiny_gguf(folder, family, variant, types=lambda _: kind, changes=changes, seed=3)


def start(model: Path | str, **engine_args: Any) -> LLM:
    engine_args = {"dtype": "float32", "skip_tokenizer_init": True, **engine_args}
    return LLM(str(model), device="cpu", max_model_len=64, **engine_args)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """By transformers, without its cache."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("family", "variant", "kind", "changes"), FAMILIES)
def test_the_tokens_of_transformers(
    tmp_path: Path, family: str, variant: str, kind: str, changes: dict[str, Any]
) -> None:
    tiny = make(tmp_path, family, variant, kind, changes)
    with start(tiny.path) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [greedy(tiny.model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_logits_of_quantized_matrices(tmp_path: Path, kind: str) -> None:
    """Matrices that stay quantized, which the CPU's engine does not serve so."""
    tiny = make_tiny_gguf(tmp_path, "llama", types=lambda _: kind, changes=sizes_for(kind))
    model = load(tiny.path)
    ids = list(range(3, 35))
    with torch.inference_mode():
        expected = tiny.model(torch.tensor([ids])).logits[0]
        attend = DenseAttend(model.config, [len(ids)])
        found = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), attend))
    # Products of two stored numbers are rounded to float16 as scales: 2.4e-4 of each.
    bound = 1e-2 if kind.endswith("_K") else 1e-5
    assert (found - expected).square().mean() <= bound**2 * expected.square().mean()


@pytest.mark.skipif(native.load() is None, reason="needs the compiled library")
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_blocks_stay_where_weights_are_to_be_rounded(tmp_path: Path, kind: str) -> None:
    """Only inputs are rounded then: scores are nearer to those of the file's numbers than with
    these numbers rounded again."""
    tiny = make_tiny_gguf(tmp_path, "llama", types=lambda _: kind, changes=sizes_for(kind))
    tiny.model.save_pretrained(tiny.folder)
    plain = prompt_logprobs(tiny.path)
    kept = prompt_logprobs(tiny.path, cpu_weight_dtype="int4")
    rounded = prompt_logprobs(tiny.folder, cpu_weight_dtype="int4")
    errors = [np.abs(found - plain).mean() for found in (kept, rounded)]
    assert 0 < errors[0] < 0.5 * errors[1], errors


def prompt_logprobs(model: Path, **engine_args: Any) -> np.ndarray:
    """Of one prompt's tokens."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    with start(model, **engine_args) as llm:
        prompt = {"prompt_token_ids": list(range(3, 51))}
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    rows = (output.prompt_logprobs or [])[1:]
    return np.array([next(iter(row.values())).logprob for row in rows if row])


def test_chat_with_what_the_file_holds(tmp_path: Path) -> None:
    """Tokenizer and chat template are the file's; the model is named by its folder."""
    reference, metadata = byte_level("smollm")
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    metadata |= {"tokenizer.chat_template": template}
    vocab_size = reference.get_vocab_size()
    tiny = make_tiny_gguf(
        tmp_path / "a", "llama", changes={"intermediate_size": 64}, vocab_size=vocab_size,
        metadata=metadata,
    )  # fmt: skip
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "named.gguf").write_bytes(tiny.path.read_bytes())
    with start(folder, skip_tokenizer_init=False, load_format="gguf") as llm:
        (output,) = llm.chat([{"role": "user", "content": "the cat"}], GREEDY, use_tqdm=False)
    prompt = [1, *reference.encode("the cat").ids, 2]
    assert list(output.prompt_token_ids or ()) == prompt
    assert list(output.outputs[0].token_ids) == greedy(tiny.model, prompt)


def test_a_draft_model(tmp_path: Path) -> None:
    """A GGUF file drafts for itself: every draft is right."""
    tiny = make(tmp_path, "llama", "gqa", "Q8_0", {})
    with start(tiny.path, speculative_model=str(tiny.path), num_speculative_tokens=3) as llm:
        prompts = [{"prompt_token_ids": p} for p in PROMPTS]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [greedy(tiny.model, prompt) for prompt in PROMPTS]


def test_arguments_that_do_not_apply(tmp_path: Path) -> None:
    tiny = make(tmp_path, "llama", "gqa", "Q8_0", {})
    with pytest.raises(ConfigError, match=r"model_impl='transformers': .* is a GGUF file"):
        start(tiny.path, model_impl="transformers")
    with pytest.raises(ConfigError, match="quantization='int4': the checkpoint's weights are quan"):
        start(tiny.path, quantization="int4")
    with pytest.raises(ConfigError, match=r"load_format='safetensors': .* is a GGUF file"):
        start(tiny.path, load_format="safetensors")
    with pytest.raises(ModelLoadError, match="the key 'tokenizer.ggml.tokens' is missing"):
        start(tiny.path, skip_tokenizer_init=False)
    assert load_model_config(tiny.path).quantization is not None
