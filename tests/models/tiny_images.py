"""Tiny random checkpoints of the models that see images, written by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hetero_llm.core.images import PromptImages

CLASSES = {
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
}
IMAGE_TOKEN, IMAGE_TOKEN_ID = "<image>", 259
VOCAB_SIZE = 264
LONGEST = 256

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_PINPOINTS = [[8, 16], [16, 8], [16, 16]]
_SQUARE = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}

# What only real models' templates do, in a few characters: parts of messages, images among them.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}"
)


def make_tiny_vision(
    folder: Path, kind: str, *, strategy: str = "default", tower: str = "clip", seed: int = 0
) -> Path:
    """Saves a random model, its image processor and a byte-level tokenizer: ids as those of
    `tiny.make_tiny_checkpoint`, and `IMAGE_TOKEN_ID`.

    Args:
        kind: A key of `CLASSES`.
        strategy, tower: Of LLaVA: which of the tower's embeddings are kept, and whose tower it is.
    """
    config = _config(kind, strategy, tower)
    generator = torch.Generator().manual_seed(seed)
    model = getattr(transformers, CLASSES[kind])(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.25 * noise)
        model.lm_head.weight[IMAGE_TOKEN_ID] = 0  # or a whole text of them may be its answer
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_processor(kind, tower)))
    _save_tokenizer(folder)
    return folder


def picture(seed: int, width: int = 13, height: int = 10) -> Image.Image:
    """Noise, so that no two are alike."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def reference_logits(model: Any, token_ids: list[int], images: PromptImages) -> torch.Tensor:
    """[T, vocab] of the class of transformers, all images and tokens in one call."""
    arrays: dict[str, Any] = {}
    for name in images.items[0].arrays:
        parts = [torch.from_numpy(image.arrays[name]) for image in images.items]
        if name == "pixel_values" and parts[0].dim() == 5:  # pieces, of some images more
            most = max(part.shape[1] for part in parts)
            parts = [F.pad(part, (0,) * 7 + (most - part.shape[1],)) for part in parts]
        arrays[name] = torch.cat(parts)
    ids = torch.tensor([token_ids])
    if "image_grid_thw" in arrays:
        arrays["mm_token_type_ids"] = (ids == IMAGE_TOKEN_ID).int()
        model.model.rope_deltas = None
    with torch.no_grad():
        return model(input_ids=ids, **arrays).logits[0]


def _config(kind: str, strategy: str, tower: str) -> Any:
    if kind == "qwen2_vl":
        vision = {
            "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2,
        }  # fmt: skip
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        return transformers.Qwen2VLConfig(
            text_config={**_TEXT, "rope_parameters": rope},
            vision_config=vision,
            image_token_id=IMAGE_TOKEN_ID,
            tie_word_embeddings=False,
        )
    text = transformers.LlamaConfig(**_TEXT)
    towers = {"clip": transformers.CLIPVisionConfig, "siglip": transformers.SiglipVisionConfig}
    more = {"image_grid_pinpoints": _PINPOINTS} if kind == "llava_next" else {}
    name = "LlavaNextConfig" if kind == "llava_next" else "LlavaConfig"
    return getattr(transformers, name)(
        text_config=text,
        vision_config=towers[tower](**_TOWER),
        image_token_index=IMAGE_TOKEN_ID,
        vision_feature_select_strategy=strategy,
        vision_feature_layer=-2,
        tie_word_embeddings=False,
        **more,
    )


def _processor(kind: str, tower: str) -> dict[str, Any]:
    if kind == "qwen2_vl":
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 64, "longest_edge": 1024},
            "patch_size": 4,
            "temporal_patch_size": 2,
            "merge_size": 2,
        }
    if kind == "llava_next":
        return {
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": _PINPOINTS,
            **_SQUARE,
        }
    if tower == "siglip":
        size = {"height": 8, "width": 8}
        return {"image_processor_type": "SiglipImageProcessor", "size": size}
    return {"image_processor_type": "CLIPImageProcessor", **_SQUARE}


def _save_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(IMAGE_TOKEN, special=True)])
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    saved.chat_template = CHAT_TEMPLATE
    saved.save_pretrained(folder)
    assert saved.convert_tokens_to_ids(IMAGE_TOKEN) == IMAGE_TOKEN_ID
