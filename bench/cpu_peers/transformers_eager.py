"""transformers' `generate` as it comes as a runner: eager, bfloat16, one torch operator at a time.

Runs with transformers 4.51 to 5.x, on a folder of `make_checkpoint`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

from bench.cpu_peers import method


def load(folder: Path, threads: int) -> transformers.PreTrainedModel:
    """The model in bfloat16 with the attention that transformers prefers."""
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def generator(model: transformers.PreTrainedModel) -> method.Generate:
    """`generate` as the method calls it: prompts of equal lengths as one batch."""

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
        )
        assert out.shape[1] == ids.shape[1] + new_tokens

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    method.add_arguments(parser)
    args = parser.parse_args()
    folder = Path(args.model)
    name = f"transformers {transformers.__version__} torch {torch.__version__} eager"
    model = load(folder, args.threads)
    method.report(name, generator(model), method.read_config(folder)["vocab_size"], args)


if __name__ == "__main__":
    main()
