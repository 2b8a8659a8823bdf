"""llama.cpp as a runner, through the C functions of llama-cpp-python; the model is a GGUF file."""

from __future__ import annotations

import argparse
from typing import Any

import llama_cpp
import numpy as np

from bench.cpu_peers import method

_BATCH, _CONTEXT = 8, 768


def context(path: str, threads: int) -> tuple[Any, int]:
    """A context with a stream for each of `_BATCH` sequences, and the vocabulary's size."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        path.encode(), llama_cpp.llama_model_default_params()
    )
    assert model, f"{path}: not loaded"
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = _BATCH * _CONTEXT
    params.n_batch, params.n_ubatch = 2048, 512
    params.n_seq_max = _BATCH
    params.n_threads = params.n_threads_batch = threads
    params.kv_unified = False
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    return llama_cpp.llama_init_from_model(model, params), vocab_size


class Generator:
    """Greedy generation; one call of llama_decode per step."""

    def __init__(self, ctx: Any, vocab_size: int) -> None:
        self._ctx = ctx
        self._vocab_size = vocab_size
        self._memory = llama_cpp.llama_get_memory(ctx)
        self._batch = llama_cpp.llama_batch_init(_BATCH * _CONTEXT, 0, _BATCH)

    def __call__(self, prompts: list[list[int]], new_tokens: int) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        sampled = self._decode(rows)
        for step in range(new_tokens - 1):
            sampled = self._decode(
                [
                    (token, len(prompts[sequence]) + step, sequence, True)
                    for sequence, token in enumerate(sampled)
                ]
            )

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Runs (token, position, sequence, whether to sample); returns the sampled tokens."""
        batch = self._batch
        for row, (token, position, sequence, samples) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = samples
        batch.n_tokens = len(rows)
        status = llama_cpp.llama_decode(self._ctx, batch)
        assert status == 0, f"llama_decode: {status}"
        return [self._best(row) for row, entry in enumerate(rows) if entry[3]]

    def _best(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._ctx, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    method.add_arguments(parser)
    args = parser.parse_args()
    ctx, vocab_size = context(args.model, args.threads)
    name = f"llama-cpp-python {llama_cpp.__version__}"
    method.report(name, Generator(ctx, vocab_size), vocab_size, args)


if __name__ == "__main__":
    main()
