"""Decoders as pooling models against transformers in float32: chunks, tensor names, classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hetero_llm import LLM, PoolingError, PoolingParams
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.pooling import Finish, PoolingInput, PoolingRequest
from hetero_llm.engine.builders.build_pooling import BuiltPooling
from hetero_llm.engine.factory import build
from hetero_llm.pooling.decoder_runner import DecoderRunner
from tests.pooling.tiny_pooling import make_pooling_checkpoint, reference, text_of

TEXTS = [text_of(length, length) for length in (1, 3, 40, 17, 100, 5, 18)]
CLOSE = 2e-6
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(folder: Path, **arguments: Any) -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32", **arguments)


@pytest.mark.parametrize(
    ("class_name", "pooling", "changes"),
    [
        ("Qwen3ForCausalLM", "lasttoken", {"tie_word_embeddings": False}),
        ("Qwen3ForCausalLM", "mean", {"tie_word_embeddings": True}),
        ("Qwen3Model", "lasttoken", {}),
        ("MistralModel", "mean", {"sliding_window": 24}),
        ("LlamaModel", "cls", {}),
    ],
)
def test_chunks_against_whole_inputs(
    tmp_path: Path, class_name: str, pooling: str, changes: dict[str, Any]
) -> None:
    """32 tokens a step cut all but the shortest inputs; 4096 compute them in one step."""
    make_pooling_checkpoint(tmp_path, class_name, changes=changes, pooling=pooling)
    wanted = reference(tmp_path, TEXTS, pooling)
    for tokens in (32, 4096):
        with load(tmp_path, max_num_batched_tokens=tokens, max_num_seqs=5) as llm:
            found = [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]
            steps = llm.metrics()["num_steps"]
        np.testing.assert_allclose(found, wanted, atol=CLOSE)
        total = sum(len(text.split()) + 1 for text in TEXTS)
        assert steps == (-(-total // 32) if tokens == 32 else 2)


def test_bfloat16(tmp_path: Path) -> None:
    """The type in which decoders run unless told otherwise: other kernels than in float32."""
    make_pooling_checkpoint(tmp_path, "Qwen3ForCausalLM", pooling="lasttoken")
    wanted = reference(tmp_path, TEXTS, "lasttoken")
    with LLM(str(tmp_path), device="cpu", max_num_batched_tokens=32) as llm:
        found = np.array([one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)])
    assert (found * wanted).sum(1).min() > 0.99
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)


def test_blocks_come_back_after_results_and_aborts(tmp_path: Path) -> None:
    make_pooling_checkpoint(tmp_path, "Qwen3Model", pooling="lasttoken")
    given = {"model": str(tmp_path), "device": "cpu", "max_num_batched_tokens": 16}
    built = build(EngineConfig.from_args(resolve_engine_args(given)), show_progress=False)
    assert isinstance(built, BuiltPooling)
    engine, runner = built.engine, built.engine.runner
    assert isinstance(runner, DecoderRunner)
    free = runner.num_free_blocks
    for key in ("a", "b"):
        tokens = np.arange(6, 56, dtype=np.int32)
        engine.add_request(PoolingRequest(key, [PoolingInput(tokens)] * 3, Finish()))
    engine.step()
    assert runner.num_running == 1 and runner.num_free_blocks == free - 1
    engine.abort("a")
    assert runner.num_running == 0 and runner.num_free_blocks == free
    results = []
    while engine.has_unfinished:
        results += engine.step()
    assert [one.key for one in results] == ["b"] and len(results[0].values) == 3
    assert runner.num_free_blocks == free and len(engine.queue) == 0
    engine.abort("b")  # unknown by now
    assert engine.step() == []


def test_an_embedder_generates_if_asked_to(tmp_path: Path) -> None:
    """The same folder serves both, as its class is a causal model's."""
    make_pooling_checkpoint(tmp_path, "Qwen3ForCausalLM", pooling="lasttoken")
    with load(tmp_path, runner="generate") as llm:
        assert llm.generate(["w1 w2"], use_tqdm=False)[0].outputs[0].token_ids
        with pytest.raises(PoolingError, match="task='embed': this model generates text"):
            llm.embed("w1")
    with load(tmp_path) as llm, pytest.raises(PoolingError, match="task='generate': Qwen3"):
        llm.generate("w1")


def test_runner_pooling_makes_an_embedder_of_a_generator(tmp_path: Path) -> None:
    make_pooling_checkpoint(tmp_path, "LlamaForCausalLM")
    wanted = {kind: reference(tmp_path, TEXTS, kind) for kind in ("lasttoken", "mean")}
    with load(tmp_path, task="embed") as llm:
        found = [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]
    np.testing.assert_allclose(found, wanted["lasttoken"], atol=CLOSE)
    pooler = {"pooling_type": "MEAN"}
    with load(tmp_path, runner="pooling", pooler_config=pooler) as llm:
        found = [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]
    np.testing.assert_allclose(found, wanted["mean"], atol=CLOSE)


@pytest.mark.parametrize("labels", [1, 4])
def test_classifier_behind_a_decoder(tmp_path: Path, labels: int) -> None:
    name = "Qwen3ForSequenceClassification"
    make_pooling_checkpoint(tmp_path, name, changes={"num_labels": labels})
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    auto = transformers.AutoModelForSequenceClassification
    network = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
    wanted = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt", padding=False)
        with torch.inference_mode():
            wanted.append(network(**inputs).logits[0].tolist())
    raw = PoolingParams(use_activation=False)
    with load(tmp_path, max_num_batched_tokens=32) as llm:
        found = [one.outputs.probs for one in llm.classify(TEXTS, pooling_params=raw)]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_reranker_by_two_tokens(tmp_path: Path, tied: bool) -> None:
    """The probability of "yes" against "no" as the next token, as Qwen3-Reranker's card has it."""
    make_pooling_checkpoint(tmp_path, "Qwen3ForCausalLM", changes={"tie_word_embeddings": tied})
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    no_yes = tokenizer.convert_tokens_to_ids(["no", "yes"])
    wanted = []
    for text in TEXTS:
        inputs = tokenizer("w3 w4", text, return_tensors="pt", padding=False)
        with torch.inference_mode():
            logits = network.eval()(**inputs).logits[0, -1, no_yes]
        wanted.append(logits.softmax(0)[1].item())
    with load(tmp_path, hf_overrides=RERANKER) as llm:
        found = [one.outputs.score for one in llm.score("w3 w4", TEXTS, use_tqdm=False)]
    np.testing.assert_allclose(found, wanted, atol=CLOSE)
