"""Encoders against transformers' own forward and pooling, in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from hetero_llm import LLM, ModelLoadError
from tests.pooling.tiny_pooling import make_pooling_checkpoint, reference, text_of

TEXTS = [text_of(length, length) for length in (1, 3, 40, 17, 100, 5, 18, 41)]
CLOSE = 2e-6


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def embeddings(llm: LLM, texts: list[str]) -> np.ndarray:
    return np.array([one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)])


@pytest.mark.parametrize(
    ("class_name", "pooling", "normalize"),
    [
        ("BertModel", "mean", True),
        ("BertModel", "cls", False),
        ("RobertaModel", "mean", False),
        ("XLMRobertaModel", "cls", True),
        ("ModernBertModel", "mean", True),
        ("BertForMaskedLM", "lasttoken", True),
    ],
)
def test_embeddings(tmp_path: Path, class_name: str, pooling: str, normalize: bool) -> None:
    """Batches that are padded, single inputs, and one input longer than a batch."""
    make_pooling_checkpoint(tmp_path, class_name, pooling=pooling, normalize=normalize)
    wanted = reference(tmp_path, TEXTS, pooling, normalize=normalize)
    with LLM(str(tmp_path), device="cpu", max_num_batched_tokens=96) as llm:
        together = embeddings(llm, TEXTS)
        alone = np.concatenate([embeddings(llm, [text]) for text in TEXTS])
    np.testing.assert_allclose(together, wanted, atol=CLOSE * max(1, np.abs(wanted).max()))
    np.testing.assert_allclose(alone, wanted, atol=CLOSE * max(1, np.abs(wanted).max()))


def test_without_files_of_sentence_transformers_the_first_token_is_scaled(tmp_path: Path) -> None:
    make_pooling_checkpoint(tmp_path, "BertModel")
    with LLM(str(tmp_path), device="cpu") as llm:
        found = embeddings(llm, TEXTS)
    np.testing.assert_allclose(found, reference(tmp_path, TEXTS, "cls"), atol=CLOSE)


def test_batch_invariant_gives_equal_bits(tmp_path: Path) -> None:
    make_pooling_checkpoint(tmp_path, "BertModel", pooling="mean")
    with LLM(str(tmp_path), device="cpu", batch_invariant=True) as llm:
        together = embeddings(llm, TEXTS)
        alone = np.concatenate([embeddings(llm, [text]) for text in TEXTS])
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize(
    ("class_name", "labels"),
    [
        ("BertForSequenceClassification", 3),
        ("XLMRobertaForSequenceClassification", 1),
        ("ModernBertForSequenceClassification", 2),
    ],
)
def test_classes_and_scores(tmp_path: Path, class_name: str, labels: int) -> None:
    make_pooling_checkpoint(tmp_path, class_name, changes={"num_labels": labels})
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    auto = transformers.AutoModelForSequenceClassification
    network = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()

    def probabilities(*texts: str) -> list[float]:
        inputs = tokenizer(*texts, return_tensors="pt", padding=False, truncation=False)
        with torch.inference_mode():
            logits = network(**inputs).logits[0]
        found = torch.sigmoid(logits) if labels == 1 else logits.softmax(-1)
        return found.tolist()

    texts = TEXTS[:4]
    with LLM(str(tmp_path), device="cpu") as llm:
        found = [one.outputs.probs for one in llm.classify(texts, use_tqdm=False)]
        np.testing.assert_allclose(found, [probabilities(text) for text in texts], atol=CLOSE)
        if labels == 1:
            scores = [one.outputs.score for one in llm.score(texts[1], texts, use_tqdm=False)]
            wanted = [probabilities(texts[1], text)[0] for text in texts]
            np.testing.assert_allclose(scores, wanted, atol=CLOSE)


def test_segments_of_a_pair(tmp_path: Path) -> None:
    """BERT's cross-encoder knows which text a token is of."""
    make_pooling_checkpoint(tmp_path, "BertForSequenceClassification", changes={"num_labels": 1})
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    auto = transformers.AutoModelForSequenceClassification
    network = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
    inputs = tokenizer("w1 w2", "w3", return_tensors="pt", padding=False)
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1]]
    with torch.inference_mode():
        wanted = torch.sigmoid(network(**inputs).logits)[0].item()
    with LLM(str(tmp_path), device="cpu") as llm:
        (found,) = llm.score("w1 w2", "w3", use_tqdm=False)
    assert found.outputs.score == pytest.approx(wanted, abs=CLOSE)


def test_dense_layers_follow_the_pooling(tmp_path: Path) -> None:
    make_pooling_checkpoint(tmp_path, "BertModel", pooling="mean", normalize=False)
    dense = torch.nn.Linear(32, 8)
    folder = tmp_path / "2_Dense"
    folder.mkdir()
    settings = {"in_features": 32, "out_features": 8, "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.append({"path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelLoadError, match="2_Dense/model.safetensors: cannot be used"):
        LLM(str(tmp_path), device="cpu")
    stored = {f"linear.{name}": one.detach() for name, one in dense.named_parameters()}
    save_file(stored, folder / "model.safetensors")
    pooled = torch.from_numpy(reference(tmp_path, TEXTS, "mean", normalize=False))
    wanted = torch.tanh(dense(pooled)).detach().numpy()
    with LLM(str(tmp_path), device="cpu") as llm:
        np.testing.assert_allclose(embeddings(llm, TEXTS), wanted, atol=1e-5)


def test_missing_tensors_end_the_load(tmp_path: Path) -> None:
    make_pooling_checkpoint(tmp_path, "BertModel")
    with pytest.raises(ModelLoadError, match=r"tensors missing or of wrong shape: classifier\."):
        LLM(
            str(tmp_path),
            device="cpu",
            hf_overrides={"architectures": ["BertForSequenceClassification"]},
        )
