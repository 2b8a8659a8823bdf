"""Makes drafts that agree with their target in a chosen share of tokens, for benches and tests.

The demo draft predicts 0.8 and more of its target's tokens, which few pairs do. A weaker draft is
the same model with normal noise in its matrices, of the same relative size in each; bisection finds
the size at which the draft's most likely token is the target's next one in the wanted share of
places. Places are those of the target's own greedy continuations of held-out prompts, without the
continuations that repeat a span of 32 tokens: loops are easy for any draft.

The noise leaves a draft as sure of its tokens as it was, so that its probabilities are worth less
than they say: an engine must find that out by itself.

    python tools/weaken_draft.py OUT_DIR --rates 0.2,0.4,0.6,0.8
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_llm.demo_models import demo_folder, heldout_prompts

SPAN = 32
"""Tokens of a span; a text in which one occurs twice has a loop."""
_PROMPTS, _CONTEXT, _COUNT = 96, 256, 160
_STEPS = 12  # of the bisection
_SEED = 1


def has_loop(tokens: list[int]) -> bool:
    """Whether a span of `SPAN` tokens occurs twice."""
    spans = [tuple(tokens[i : i + SPAN]) for i in range(len(tokens) - SPAN + 1)]
    return len(set(spans)) < len(spans)


@torch.no_grad()
def continuations(folder: Path, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts [N, 256] int64 and the target's greedy continuations [N, 160], those without loops.

    Args:
        folder: of the target.
    """
    model = _load(folder, device)
    rows = heldout_prompts().prompts[:_PROMPTS, -_CONTEXT:].astype("int64")
    prompts = torch.from_numpy(rows).to(device)
    out = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
    tokens = [out.logits[:, -1:].argmax(-1)]
    while len(tokens) < _COUNT:
        out = model(input_ids=tokens[-1], past_key_values=out.past_key_values, use_cache=True)
        tokens.append(out.logits[:, -1:].argmax(-1))
    continued = torch.cat(tokens, 1)
    calm = [not has_loop(row) for row in continued.tolist()]
    assert any(calm), "every continuation has a loop"
    return prompts[calm], continued[calm]


@torch.no_grad()
def agreement(model: torch.nn.Module, prompts: Tensor, continued: Tensor) -> float:
    """Share of the continuations' tokens that are the model's most likely ones."""
    hits = []
    texts = torch.cat([prompts, continued], 1)
    for text, wanted in zip(texts.split(16), continued.split(16), strict=True):
        logits = model(input_ids=text[:, :-1], logits_to_keep=wanted.shape[1]).logits
        hits.append((logits.argmax(-1) == wanted).float())
    return float(torch.cat(hits).mean())


def add_noise(model: torch.nn.Module, weights: dict[str, Tensor], size: float) -> None:
    """Sets the model's parameters to `weights`, with noise in the matrices.

    Args:
        weights: all parameters, by name.
        size: standard deviation of the noise over that of the matrix.
    """
    state = {}
    for place, (name, weight) in enumerate(sorted(weights.items())):
        state[name] = weight
        if weight.ndim == 2 and size:
            generator = torch.Generator().manual_seed(_SEED + place)
            noise = torch.randn(weight.shape, generator=generator)
            state[name] = (weight.float() + size * weight.float().std() * noise).to(weight.dtype)
    model.load_state_dict(state, strict=False)


def weaken(
    source: Path, out: Path, rate: float, prompts: Tensor, continued: Tensor
) -> dict[str, float]:
    """Writes a copy of the draft in `source` that agrees in `rate` of all places to `out`.

    Returns:
        "noise": relative size of the noise, 0 if the draft agrees less than `rate` anyway;
        "agreement": the share reached.
    """
    weights = load_file(source / "model.safetensors")
    model = _load(source, prompts.device)
    low, high = 0.0, 2.0
    reached = agreement(model, prompts, continued)
    if reached <= rate:
        high = 0.0
    for _ in range(_STEPS if high else 0):
        size = (low + high) / 2
        add_noise(model, weights, size)
        reached = agreement(model, prompts, continued)
        low, high = (size, high) if reached > rate else (low, size)
    size = (low + high) / 2
    add_noise(model, weights, size)
    found = {"noise": round(size, 4), "agreement": round(agreement(model, prompts, continued), 4)}
    shutil.copytree(source, out, dirs_exist_ok=True)
    state = model.state_dict()
    saved = {name: state[name].to(weight.dtype).cpu() for name, weight in weights.items()}
    save_file(saved, out / "model.safetensors", metadata={"format": "pt"})
    (out / "agreement.json").write_text(json.dumps({"wanted": rate, **found}) + "\n")
    return found


def _load(folder: Path, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="gets a folder draft-RATE for each rate")
    parser.add_argument("--rates", default="0.2,0.4,0.6,0.8")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    prompts, continued = continuations(demo_folder("demo"), torch.device(args.device))
    print(f"{len(continued)} of {_PROMPTS} continuations without loops")
    for rate in map(float, args.rates.split(",")):
        folder = args.out / f"draft-{rate:g}"
        found = weaken(demo_folder("demo-draft"), folder, rate, prompts, continued)
        print(f"{folder}: agreement {found['agreement']:.3f}, noise {found['noise']:.3f}")


if __name__ == "__main__":
    main()
