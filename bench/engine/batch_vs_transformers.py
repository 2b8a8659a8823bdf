"""Batched decoding of the demo target on a CPU against transformers' `generate`.

16 held-out prompts of mixed lengths, 128 new tokens each, bf16, greedy. transformers runs them as
one left-padded batch; both use the same number of torch threads in the same process, in turns.
Tokens/s counts generated tokens over the whole call, prompts included.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import transformers

from bench.common import bench_parser, median_ratio, report
from bench.generation import greedy, seconds
from hetero_llm import LLM
from hetero_llm.demo_models import demo_folder, heldout_prompts

NEW_TOKENS = 128
BATCH = 16


def prompts(seed: int) -> list[list[int]]:
    """Distinct held-out prompts, cut to lengths from 64 to 1,024 tokens."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(heldout_prompts().prompts), BATCH, replace=False)
    lengths = np.linspace(64, 1024, BATCH).astype(int)
    return [
        heldout_prompts().prompts[i, -n:].tolist() for i, n in zip(chosen, lengths, strict=True)
    ]


def run_ours(llm: LLM, batch: list[list[int]]) -> float:
    taken = seconds(llm, batch, greedy(NEW_TOKENS, detokenize=True))
    llm.reset_prefix_cache()
    return BATCH * NEW_TOKENS / taken


@torch.inference_mode()
def run_transformers(model: transformers.PreTrainedModel, batch: list[list[int]]) -> float:
    longest = max(map(len, batch))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in batch])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
    begin = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )
    taken = time.perf_counter() - begin
    assert out.shape[1] == longest + NEW_TOKENS
    return BATCH * NEW_TOKENS / taken


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        demo_folder("demo"), dtype=torch.bfloat16
    ).eval()
    ours, theirs = [], []
    with LLM("demo", dtype="bfloat16", device="cpu") as llm:
        run_ours(llm, prompts(99))  # warm-up
        run_transformers(model, [p[-16:] for p in prompts(99)])
        for round_ in range(args.rounds):
            batch = prompts(round_)
            ours.append(run_ours(llm, batch))
            theirs.append(run_transformers(model, batch))
    rows = [
        {"engine": "hetero_llm", "tokens_per_s": float(np.median(ours))},
        {"engine": "transformers generate", "tokens_per_s": float(np.median(theirs))},
    ]
    ratio = median_ratio(ours, theirs)
    print(f"ratio (median of {args.rounds} rounds): {ratio:.2f}")
    about = {"ratio": ratio, "threads": args.threads, "model": "demo", "dtype": "bf16"}
    report("batch_vs_transformers", about, rows, args.out)


if __name__ == "__main__":
    main()
