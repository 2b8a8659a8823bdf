"""Writes a Llama checkpoint of `make_checkpoint` as GGUF; needs numpy and gguf only.

The file has no tokenizer ("no_vocab"): the bench feeds token ids. Rows of q and k are put in the
order of llama.cpp's rotation, which pairs neighbours.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TYPES = {
    "bf16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
    "q8_0": (gguf.LlamaFileType.MOSTLY_Q8_0, gguf.GGMLQuantizationType.Q8_0),
}


def read_bf16_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(name, float32 array) of a safetensors file that holds bfloat16 only."""
    data = np.memmap(path, np.uint8, "r")
    header_bytes = int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8 : 8 + header_bytes].tobytes())
    header.pop("__metadata__", None)
    body = data[8 + header_bytes :]
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", (name, entry["dtype"])
        first, last = entry["data_offsets"]
        halves = np.frombuffer(body[first:last].tobytes(), np.uint16)
        values = (halves.astype(np.uint32) << 16).view(np.float32)
        yield name, values.reshape(entry["shape"])


def neighbour_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * dim, in] from pairs of halves to pairs of neighbours."""
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def write_header(writer: gguf.GGUFWriter, config: dict[str, Any], file_type: Any) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(file_type)
    writer.add_tokenizer_model("no_vocab")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=list(_TYPES), default="bf16")
    args = parser.parse_args()
    config = json.loads((args.folder / "config.json").read_text())
    file_type, tensor_type = _TYPES[args.type]
    writer = gguf.GGUFWriter(args.out, "llama")
    write_header(writer, config, file_type)
    for name, values in read_bf16_tensors(args.folder / "model.safetensors"):
        if "q_proj" in name:
            values = neighbour_pairs(values, config["num_attention_heads"])
        if "k_proj" in name:
            values = neighbour_pairs(values, config["num_key_value_heads"])
        ours = name
        for theirs, short in _NAMES.items():
            ours = ours.replace(theirs, short)
        kind = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else tensor_type
        writer.add_tensor(ours, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
