"""A decoded token where all rows follow a JSON schema, beside one without any grammar.

    python -m bench.engine.guided_decode --shape S --device cpu [--vocab 128256] [--threads 2]
    python -m bench.engine.guided_decode --shape llama-3.1-8b --device cuda --batches 1,32,128

ms/token = (T(1 + STEPS tokens) - T(1 token)) / STEPS through `LLM.generate`, greedy, no
detokenization; the arms take turns and each figure is the least of the rounds, since what else runs
on the machine only adds to it. Random weights, and a byte-level tokenizer of made-up words of the
model's vocabulary size, over which the grammar's masks are computed. Arms:

- unguided: no grammar.
- guided: the masks reach sampling in the native executor, or the GPU's sampling kernel.
- noise, guided noise: the same at temperature 1.
- torch sampler: the same grammar beside a processor that looks back (a bias of 0), so the torch
  sampler applies the mask to full logits, as for every guided row before.
- forced drafts: as guided, with the drafts of forced tokens that all other arms forgo: a step
  yields several tokens, and the figure is for each.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.common import bench_parser, machine_of, names_of, numbers, report, say
from bench.generation import greedy, seconds
from bench.shapes import CPU_SHAPES, SHAPES, Prompts, write_config
from hetero_llm import LLM, StructuredOutputsParams

PROMPT = 32
STEPS = 64
ARMS = ("unguided", "guided", "noise", "guided noise", "torch sampler", "forced drafts")
SCHEMA = {
    "type": "array",
    "minItems": 64,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "name": {"type": "string", "maxLength": 24},
            "kind": {"enum": ["person", "place", "thing"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        },
        "required": ["id", "name", "kind", "tags"],
        "additionalProperties": False,
    },
}
_SYLLABLES = [a + b for a in ("b", "d", "f", "k", "l", "m", "n", "p", "r", "s", "t", "st", "tr", "")
              for b in ("a", "e", "i", "o", "u", "an", "er", "in", "on", "al")]  # fmt: skip


def write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level tokenizer of `size` tokens: specials, bytes, punctuation, numbers, words of one
    to three syllables with and without a space before."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ['":', '",', '":"', '","', '{"', '"}', "},", "[{", "]}", '["', '"]', "},{", "\u0120{"]
    pieces += [str(number) for number in range(10, 1000)]
    for count in (1, 2, 3):
        words = ("".join(parts) for parts in itertools.product(_SYLLABLES, repeat=count))
        pieces += [
            space + word for word in itertools.islice(words, size) for space in ("", "\u0120")
        ]
    tokens = dict.fromkeys(["<pad>", "<s>", "</s>", *alphabet, *pieces])
    vocab = {token: number for number, token in enumerate(list(tokens)[:size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def parameters(arm: str, count: int) -> Any:
    more: dict[str, Any] = {"temperature": 1.0, "seed": 1} if "noise" in arm else {}
    if arm not in ("unguided", "noise"):
        more["structured_outputs"] = StructuredOutputsParams(
            json=SCHEMA, disable_any_whitespace=True
        )
    if arm == "torch sampler":
        more["logit_bias"] = {5: 0.0}
    if arm != "forced drafts":
        more["num_speculative_tokens"] = 0
    return greedy(count, **more)


def measure(llm: LLM, vocab: int, batch: int, arms: list[str], rounds: int) -> dict[str, float]:
    """Arm -> ms of a token of all sequences at this batch."""
    prompts = Prompts(vocab)
    best = dict.fromkeys(arms, float("inf"))
    for arm in arms:
        before = llm.engine.metrics()["spec_decode_num_draft_tokens"]
        seconds(llm, prompts.draw(batch, PROMPT), parameters(arm, 1 + STEPS))
        drafted = llm.engine.metrics()["spec_decode_num_draft_tokens"] - before
        assert arm == "forced drafts" or not drafted, "a token is not a step"
    for _ in range(rounds):
        for arm in arms:
            short = seconds(llm, prompts.draw(batch, PROMPT), parameters(arm, 1))
            long = seconds(llm, prompts.draw(batch, PROMPT), parameters(arm, 1 + STEPS))
            best[arm] = min(best[arm], (long - short) / STEPS * 1e3)
    return best


def main() -> None:
    parser = bench_parser(__doc__)
    shapes = SHAPES | CPU_SHAPES
    parser.add_argument("--shape", choices=list(shapes), default="S")
    parser.add_argument("--vocab", type=int, help="instead of the shape's own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="of the native executor")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--arms", type=names_of(ARMS), default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = {**shapes[args.shape], "bos_token_id": 1, "eos_token_id": 2}
    vocab = config["vocab_size"] = args.vocab or config["vocab_size"]
    on_cpu = {"cpu_threads": args.threads} if args.device == "cpu" else {}
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(config, Path(name))
        write_tokenizer(folder, vocab)
        llm = LLM(
            str(folder), load_format="dummy", device=args.device, max_num_seqs=max(args.batches),
            max_model_len=256, enable_prefix_caching=False, disable_log_stats=True, **on_cpu,
        )  # fmt: skip
    rows = []
    with llm:
        for batch in args.batches:
            ms = measure(llm, vocab, batch, args.arms, args.rounds)
            row: dict[str, Any] = {"batch": batch, **{f"{arm} ms": ms[arm] for arm in args.arms}}
            for ours, base in (("guided", "unguided"), ("guided noise", "noise")):
                if ours in ms and base in ms:
                    row[f"{ours}/{base}"] = ms[ours] / ms[base]
            rows.append(row)
            say(row)
    about = {"shape": args.shape, "vocab": vocab, "device": args.device}
    name = f"guided_decode.{args.shape}.{vocab}.{machine_of(args.device)}"
    report(name, about, rows, args.out)


if __name__ == "__main__":
    main()
