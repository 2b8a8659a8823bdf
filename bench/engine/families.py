"""Decode speed of every native family at one shape, in bytes read per second against Llama's.

All have hidden 4096, 32 heads of 128 (except where a family fixes other sizes), 16 layers, a
vocabulary of 32000 and random bf16 weights. MLPs without a gate have matrices half as wide again,
so that all layers weigh about the same; what still differs (KV heads, biases) is in the bytes: a
step reads every weight but the embedding once, and its sequences' KV. `of_llama` compares bytes per
second with Llama's in the same run, which is measured first and last.

Method of `bench/engine/decode.py`: prompts of 128 distinct random ids, greedy, ms per step from the
difference of a long and a short run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.common import Rows, bench_parser, numbers, report
from bench.engine.decode import PROMPT, ms_per_step
from bench.shapes import Prompts, start, write_config
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.registry import model_class

HIDDEN, HEADS, KV_HEADS, LAYERS, VOCAB, INNER = 4096, 32, 8, 16, 32000, 14336
CONTEXT = 2048
STEPS = 64

_COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MODERN = {
    **_COMMON,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": CONTEXT,
}
_GATED = {**_MODERN, "num_key_value_heads": KV_HEADS, "intermediate_size": INNER}
_PLAIN = {**_MODERN, "num_key_value_heads": KV_HEADS, "intermediate_size": INNER * 3 // 2}
_GPT = {
    **_COMMON,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": CONTEXT,
    "n_inner": INNER * 3 // 2,
}


def _of(architecture: str, model_type: str, shape: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **shape, **own}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _of("LlamaForCausalLM", "llama", _GATED),
    "mistral": _of("MistralForCausalLM", "mistral", _GATED, sliding_window=1024),
    "qwen2": _of("Qwen2ForCausalLM", "qwen2", _GATED),
    "qwen3": _of("Qwen3ForCausalLM", "qwen3", _GATED, head_dim=128),
    "gemma": _of(
        "GemmaForCausalLM", "gemma",
        {**_GATED, "tie_word_embeddings": True, "num_attention_heads": 16},
        head_dim=256, hidden_activation="gelu_pytorch_tanh",
    ),
    "gemma2": _of(
        "Gemma2ForCausalLM", "gemma2", {**_GATED, "tie_word_embeddings": True},
        head_dim=128, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=128,
        sliding_window=1024,
    ),
    "phi3": _of("Phi3ForCausalLM", "phi3", _GATED, original_max_position_embeddings=CONTEXT),
    "internlm2": _of("InternLM2ForCausalLM", "internlm2", _GATED, bias=False),
    "internlm": _of("InternLMForCausalLM", "internlm", {**_GATED, "num_key_value_heads": HEADS}),
    "baichuan-7b": _of("BaichuanForCausalLM", "baichuan", {**_MODERN, "intermediate_size": INNER}),
    "xverse": _of("XverseForCausalLM", "xverse", {**_GATED, "num_key_value_heads": HEADS}),
    "qwen": _of(
        "QWenLMHeadModel", "qwen", {**_MODERN, "intermediate_size": 2 * INNER},
        seq_length=CONTEXT, kv_channels=128, use_logn_attn=False, use_dynamic_ntk=False,
    ),
    "chatglm": _of(
        "ChatGLMModel", "chatglm", _COMMON,
        hidden_size=HIDDEN, num_layers=LAYERS, num_attention_heads=HEADS, kv_channels=128,
        ffn_hidden_size=INNER, seq_length=CONTEXT, padded_vocab_size=VOCAB,
        multi_query_attention=True, multi_query_group_num=KV_HEADS, rmsnorm=True,
        add_qkv_bias=True,
    ),
    "glm": _of("GlmForCausalLM", "glm", _GATED, head_dim=128),
    "glm4": _of("Glm4ForCausalLM", "glm4", _GATED, head_dim=128),
    "stablelm": _of("StableLmForCausalLM", "stablelm", _GATED, use_qkv_bias=False),
    "phi": _of("PhiForCausalLM", "phi", _PLAIN),
    "nemotron": _of("NemotronForCausalLM", "nemotron", _PLAIN, hidden_act="relu2", head_dim=128),
    "starcoder2": _of("Starcoder2ForCausalLM", "starcoder2", _PLAIN, sliding_window=None),
    "gpt-neox": _of(
        "GPTNeoXForCausalLM", "gpt_neox", {**_PLAIN, "num_key_value_heads": HEADS}, rotary_pct=0.25
    ),
    "gpt-j": _of("GPTJForCausalLM", "gptj", _GPT, rotary_dim=64),
    "gpt-2": _of("GPT2LMHeadModel", "gpt2", _GPT),
    "gpt-bigcode": _of("GPTBigCodeForCausalLM", "gpt_bigcode", _GPT, multi_query=True),
    "opt": _of(
        "OPTForCausalLM", "opt", _MODERN, ffn_dim=INNER * 3 // 2, word_embed_proj_dim=HIDDEN
    ),
    "bloom": _of(
        "BloomForCausalLM", "bloom", {**_COMMON, "tie_word_embeddings": True},
        hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS, seq_length=CONTEXT,
    ),
    "falcon": _of(
        "FalconForCausalLM", "falcon", {**_COMMON, "tie_word_embeddings": True},
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_kv_heads=KV_HEADS, new_decoder_architecture=True, bias=False, alibi=False,
        max_position_embeddings=CONTEXT,
    ),
}  # fmt: skip
"""config.json of each; Bloom and Falcon have MLPs of four times the hidden size."""


def bytes_per_step(config: ModelConfig, batch: int, context: float) -> int:
    """Bytes that a decode step of `batch` sequences has to read; weights in bf16."""
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    weights = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    kv = batch * context * config.num_layers * 2 * config.num_kv_heads * config.head_dim
    return int(2 * (weights + kv))


def measure(
    family: str, batches: list[int], *, device: str, steps: int, layers: int | None = None
) -> Rows:
    """A row for each batch. `layers`: instead of `LAYERS`, for a trial."""
    raw = dict(FAMILIES[family])
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        if layers is not None and key in raw:
            raw[key] = layers
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        config = load_model_config(write_config(raw, Path(folder)))
    llm, _ = start(
        raw, dtype="bfloat16", device=device, max_model_len=1024, max_num_seqs=max(batches),
        enable_prefix_caching=False, gpu_memory_utilization=0.5,
    )  # fmt: skip
    with llm:
        for batch in batches:
            # The least of three: the machine's own pauses only ever add.
            ms = ms_per_step(llm, Prompts(VOCAB, seed=batch), batch, steps=steps, middle=min)
            read = bytes_per_step(config, batch, PROMPT + steps / 2)
            rows.append(
                {"family": family, "batch": batch, "ms_per_step": ms, "GB": read / 1e9,
                 "GB/s": read / ms / 1e6}
            )  # fmt: skip
    return rows


def compared(rows: Rows) -> Rows:
    """With each row's bytes per second against the best of Llama's at the same batch."""
    best = {
        row["batch"]: max(
            r["GB/s"] for r in rows if r["family"] == "llama" and r["batch"] == row["batch"]
        )
        for row in rows
    }
    return [{**row, "of_llama": row["GB/s"] / best[row["batch"]]} for row in rows]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--layers", type=int, help="fewer than the bench has, for a trial")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    rows: Rows = []
    failed = {}
    for family in ["llama", *(f for f in args.families if f != "llama"), "llama"]:
        try:
            rows += measure(
                family, args.batches, device=args.device, steps=args.steps, layers=args.layers
            )
        except Exception as error:  # the others' figures are worth having
            failed[family] = f"{type(error).__name__}: {error}"
            print(f"{family}: {failed[family]}", flush=True)
    report("families", {"steps": args.steps, "failed": failed}, compared(rows), args.out)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
