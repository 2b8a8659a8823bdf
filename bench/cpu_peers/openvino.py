"""OpenVINO GenAI as a runner; the model is a folder of `optimum-cli export openvino`."""

from __future__ import annotations

import argparse

import numpy as np
import openvino
import openvino_genai

from bench.cpu_peers import method


def pipeline(folder: str, threads: int) -> openvino_genai.LLMPipeline:
    """The pipeline with continuous batching and no prefix cache."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    return openvino_genai.LLMPipeline(
        folder,
        "CPU",
        INFERENCE_PRECISION_HINT="bf16",
        INFERENCE_NUM_THREADS=threads,
        PERFORMANCE_HINT="LATENCY",
        scheduler_config=scheduler,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    method.add_arguments(parser)
    args = parser.parse_args()
    pipe = pipeline(args.model, args.threads)

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        ids = np.array(prompts, np.int64)
        wanted = openvino_genai.GenerationConfig()
        wanted.max_new_tokens = wanted.min_new_tokens = new_tokens
        wanted.ignore_eos = True
        wanted.do_sample = False
        wanted.apply_chat_template = False
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        tokens = pipe.generate(inputs, wanted).tokens
        assert all(len(row) == new_tokens for row in tokens)

    vocab_size = method.read_config(args.model)["vocab_size"]
    version = openvino_genai.get_version().split("-")[0]
    method.report(f"openvino-genai {version}", generate, vocab_size, args)


if __name__ == "__main__":
    main()
