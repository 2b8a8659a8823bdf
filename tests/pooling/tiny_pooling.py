"""Tiny random pooling models, written by transformers, and what transformers makes of a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

WORDS = [f"w{index}" for index in range(90)]
VOCAB = ["<pad>", "<unk>", "<s>", "</s>", "yes", "no", *WORDS]
_SIZES: dict[str, Any] = {
    "vocab_size": len(VOCAB), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
_DECODER = {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
_MODERN = {"global_attn_every_n_layers": 2, "local_attention": 16, "cls_token_id": 2,
           "sep_token_id": 3}  # fmt: skip
_ROBERTA = {"max_position_embeddings": 129, "type_vocab_size": 1}
_FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {}, "Roberta": _ROBERTA, "XLMRoberta": _ROBERTA, "ModernBert": _MODERN,
    "Qwen3": _DECODER, "Qwen2": _DECODER, "Llama": _DECODER,
    "Mistral": {**_DECODER, "sliding_window": None},
}  # fmt: skip


def make_pooling_checkpoint(
    folder: Path,
    class_name: str,
    *,
    changes: Mapping[str, Any] | None = None,
    pooling: str | None = None,
    normalize: bool = True,
    prompts: Mapping[str, Any] | None = None,
    max_seq_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Saves a random model with a word tokenizer.

    Args:
        class_name: such as "BertModel".
        changes: of its configuration.
        pooling: "cls", "mean" or "lasttoken" writes the files of sentence-transformers.
        prompts: content of config_sentence_transformers.json.
    """
    family = next(name for name in sorted(_FAMILIES, key=len) if class_name.startswith(name))
    settings = {**_SIZES, **_FAMILIES[family], **(changes or {})}
    config = getattr(transformers, family + "Config")(**settings)
    generator = torch.Generator().manual_seed(1)
    model = getattr(transformers, class_name)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.25 * noise)
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(
        folder, segments=family == "Bert", decoder=family in ("Qwen2", "Qwen3", "Mistral", "Llama")
    )
    if pooling is not None:
        write_modules(folder, pooling, normalize=normalize, max_seq_length=max_seq_length)
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def write_modules(
    folder: Path, pooling: str, *, normalize: bool, max_seq_length: int | None = None
) -> None:
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    kinds += [("2_Normalize", "Normalize")] if normalize else []
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    flags = {f"pooling_mode_{mode}": False for mode in ("cls_token", "mean_tokens", "lasttoken")}
    flags["pooling_mode_" + {"cls": "cls_token", "mean": "mean_tokens"}.get(pooling, pooling)] = (
        True
    )
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    if max_seq_length is not None:
        settings = {"max_seq_length": max_seq_length, "do_lower_case": False}
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings))


def save_tokenizer(folder: Path, *, decoder: bool, segments: bool = False) -> None:
    """A word a token; <s> and </s> around an encoder's text, </s> behind a decoder's."""
    vocab = {word: index for index, word in enumerate(VOCAB)}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single, pair = ("$A </s>", "$A $B:1 </s>:1") if decoder else (
        "<s> $A </s>", "<s> $A </s> $B:1 </s>:1"
    )  # fmt: skip
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    # What bge's tokenizer.json asks for, and what must not be done behind the engine's back.
    made.enable_truncation(16)
    made.enable_padding(pad_id=0, pad_token="<pad>", length=16)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", bos_token="<s>",
        eos_token="</s>", cls_token="<s>", sep_token="</s>",
        model_input_names=["input_ids", *["token_type_ids"] * segments, "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip


def text_of(length: int, start: int = 0) -> str:
    """A text of so many words."""
    return " ".join(WORDS[(start + 7 * index) % len(WORDS)] for index in range(length))


def reference(
    folder: Path, texts: Sequence[Any], pooling: str, *, normalize: bool = True, **options: Any
) -> np.ndarray:
    """[B, D]: transformers' hidden states of one text after the other, pooled in float32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", padding=False, **options)
        with torch.inference_mode():
            hidden = model(**inputs).last_hidden_state[0]
        row = {"cls": hidden[0], "mean": hidden.mean(0), "lasttoken": hidden[-1]}[pooling]
        rows.append(row / row.norm() if normalize else row)
    return torch.stack(rows).numpy()
