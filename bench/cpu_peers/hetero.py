"""Our own engine as a runner: `LLM.generate` on the CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import hetero_llm
from bench.cpu_peers import method
from hetero_llm import LLM, SamplingParams

MAX_CONTEXT, MAX_BATCH = 1024, 8


def start(
    folder: Path, *, dtype: str = "bfloat16", backend: str = "native", threads: int = 2
) -> LLM:
    """The engine on `folder`; weights are random if there are none in it."""
    torch.set_num_threads(threads)
    stored = any(folder.glob("*.safetensors"))
    return LLM(
        str(folder),
        device="cpu",
        dtype="bfloat16",
        load_format="auto" if stored else "dummy",
        skip_tokenizer_init=True,
        max_model_len=MAX_CONTEXT,
        max_num_seqs=MAX_BATCH,
        cpu_backend=backend,
        cpu_weight_dtype="auto" if dtype == "bfloat16" else dtype,
        cpu_threads=threads,
    )


def generator(llm: LLM) -> method.Generate:
    """`LLM.generate` as the method calls it."""

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs)

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    method.add_arguments(parser)
    parser.add_argument("--backend", choices=("native", "torch", "ipex"), default="native")
    args = parser.parse_args()
    folder = Path(args.model)
    with start(folder, dtype=args.dtype, backend=args.backend, threads=args.threads) as llm:
        name = f"hetero-llm {hetero_llm.__version__} {args.backend}"
        method.report(name, generator(llm), method.read_config(folder)["vocab_size"], args)


if __name__ == "__main__":
    main()
