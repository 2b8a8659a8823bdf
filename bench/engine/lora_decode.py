"""Decoding with LoRA adapters on a CPU: the demo target, native executor and torch.

    python -m bench.engine.lora_decode [--backends native,torch] [--batches 1,8] [--rank 16]

tokens/s = batch * STEPS / (T(1 + STEPS tokens) - T(1 token)) through `LLM.generate`, greedy. The
random adapters change all linear layers. All engines live in one process and all arms take turns;
the figures are the median and the best of the rounds. Arms:

- off: an engine without `enable_lora`.
- none: `enable_lora`, no request has an adapter.
- one: all requests have the same adapter.
- three: the requests have three adapters by turns.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.common import bench_parser, names_of, numbers, print_table, write_results
from bench.generation import greedy
from bench.shapes import Prompts
from hetero_llm import LLM, LoRARequest
from hetero_llm.demo_models import demo_folder
from hetero_llm.lora.targets import adapter_targets
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config

PROMPT, STEPS = 32, 64
BACKENDS = ("native", "torch")
ADAPTERS = {"off": 0, "none": 0, "one": 1, "three": 3}
"""Adapters in a step, by arm."""


def write_adapter(folder: Path, rank: int, seed: int) -> LoRARequest:
    """A random adapter of all linear layers of the demo target, in PEFT's form."""
    config = load_model_config(demo_folder("demo"))
    model = load_model(
        demo_folder("demo"), config, dtype=torch.bfloat16, device="cpu", show_progress=False
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, target in adapter_targets(model, config).targets.items():
        a = torch.randn(rank, target.columns, generator=generator) * target.columns**-0.5
        b = torch.randn(target.rows, rank, generator=generator) * 0.02
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.bfloat16()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    options = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    return LoRARequest(folder.name, seed, str(folder))


def seconds(llm: LLM, prompts: list[list[int]], count: int, adapters: list[Any]) -> float:
    """Of `count` tokens for each prompt."""
    given = {"lora_request": adapters} if any(adapters) else {}
    begin = time.perf_counter()
    outputs = llm.generate(
        prompt_token_ids=prompts, sampling_params=greedy(count), use_tqdm=False, **given
    )
    elapsed = time.perf_counter() - begin
    assert all(len(output.outputs[0].token_ids) == count for output in outputs)
    return elapsed


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--backends", type=names_of(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rates: dict[tuple[str, int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        requests = [write_adapter(Path(name) / f"a{i}", args.rank, i) for i in (1, 2, 3)]

        def start(backend: str, **lora: Any) -> LLM:
            return stack.enter_context(LLM(
                "demo", device="cpu", cpu_backend=backend, max_num_seqs=max(args.batches),
                max_model_len=256, enable_prefix_caching=False, disable_log_stats=True, **lora,
            ))  # fmt: skip

        lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": args.rank}
        engines = {b: (start(b), start(b, **lora)) for b in args.backends}
        prompts = Prompts(4096)
        for round_number in range(args.rounds + 1):  # the first one warms up
            for backend, (plain, adapted) in engines.items():
                for batch in args.batches:
                    turn = round_number % len(ADAPTERS)  # what ran before may still use cores
                    arms = list(ADAPTERS.items())
                    for arm, count in arms[turn:] + arms[:turn]:
                        if count > batch:
                            continue
                        llm = plain if arm == "off" else adapted
                        own = [requests[i % count] if count else None for i in range(batch)]
                        drawn = prompts.draw(batch, PROMPT)
                        long = seconds(llm, drawn, 1 + STEPS, own)
                        short = seconds(llm, drawn, 1, own)
                        if round_number:
                            rate = batch * STEPS / (long - short)
                            rates.setdefault((backend, batch, arm), []).append(rate)
    rows = []
    order = list(ADAPTERS)
    for (backend, batch, arm), found in sorted(
        rates.items(), key=lambda item: (*item[0][:2], order.index(item[0][2]))
    ):
        median, best = statistics.median(found), max(found)
        off = rates[backend, batch, "off"]
        rows.append({
            "backend": backend, "batch": batch, "adapters": arm, "tokens/s": median,
            "of off": median / statistics.median(off), "best": best, "best of off": best / max(off),
        })  # fmt: skip
    results = {"rank": args.rank, "rounds": args.rounds, "rows": rows}
    write_results("lora_decode.c", results, args.out)
    print_table(rows)


if __name__ == "__main__":
    main()
