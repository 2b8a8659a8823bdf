"""Train the demo pair: a small Llama target and a draft distilled from it.

Everything happens on one machine in under ten minutes: collect permissively licensed Python
source (`demo_corpus`), train a byte-level BPE tokenizer, train the target, distil the draft, and
measure both on held-out files. The result is two Hugging Face folders, held-out prompts, a model
card and a training log:

    python tools/train_demo_pair.py OUT_DIR
    python tools/train_demo_pair.py OUT_DIR --smoke      # seconds, on a CPU, useless models
    python tools/train_demo_pair.py OUT_DIR --evaluate   # measure a pair trained before

Learning rates follow the wall clock, so the run fits its budget on any device. Seeds are fixed;
what differs between runs is the number of steps and the order of floating-point sums.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_corpus import (
    EOT,
    HELD_OUT_OVERLAP,
    PAD,
    SHINGLE_LINES,
    Corpus,
    SourceFile,
    load_corpus,
    path_hash,
    spread,
)
from demo_model import CONTEXT, Llama, Optimiser, Shape, export, rate_scale, write_json
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

PROMPT = 1024
CONTINUATION = 300


# large: one value for each choice of the training.
@dataclass(frozen=True)
class Recipe:
    """What to train and for how long (minutes)."""

    target: Shape = Shape(320, 6, 768, 4, 1)
    draft: Shape = Shape(256, 2, 640, 2, 1)
    target_minutes: float = 4.4
    draft_minutes: float = 1.8
    deadline_minutes: float = 9.2
    batch: int = 64
    seq_len: int = CONTEXT
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    holdout_modulus: int = 16
    package_cap: int = 20_000_000
    max_files: int = 0
    tokenizer_chars: int = 48_000_000
    prompts: int = 288
    greedy_tokens: int = 128
    seed: int = 0


SMOKE = Recipe(
    target=Shape(64, 2, 128, 4, 1),
    draft=Shape(64, 1, 64, 2, 1),
    target_minutes=0.03,
    draft_minutes=0.02,
    batch=2,
    seq_len=128,
    holdout_modulus=3,
    max_files=150,
    tokenizer_chars=1_000_000,
    prompts=3,
    greedy_tokens=8,
)


@dataclass
class Log:
    """Timed record of the run, also printed."""

    start: float = field(default_factory=time.perf_counter)
    phases: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    results: dict[str, object] = field(default_factory=dict)
    mark: float = field(default_factory=time.perf_counter)

    def elapsed(self) -> float:
        """Seconds since the script started."""
        return time.perf_counter() - self.start

    def say(self, text: str) -> None:
        """Print with the elapsed time."""
        print(f"[{self.elapsed():6.1f}s] {text}", flush=True)

    def phase(self, name: str) -> None:
        """Close the phase `name`: everything since the last call."""
        self.phases[name] = round(time.perf_counter() - self.mark, 2)
        self.mark = time.perf_counter()
        self.say(f"{name}: {self.phases[name]:.1f} s")


# --- tokenizer -----------------------------------------------------------------------------


def train_tokenizer(files: Sequence[SourceFile], chars: int, vocab: int) -> Tokenizer:
    """Train a byte-level BPE on about `chars` characters; runs of spaces are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    total = np.cumsum([len(f.text) for f in files])
    tokenizer.train_from_iterator(
        (f.text for f in files[: int(np.searchsorted(total, chars)) + 1]), trainer
    )
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {vocab}")
    return tokenizer


def encode(tokenizer: Tokenizer, files: Sequence[SourceFile]) -> list[np.ndarray]:
    """Encode every file; int16 [n] each."""
    out: list[np.ndarray] = []
    for i in range(0, len(files), 1000):
        batch = tokenizer.encode_batch_fast([f.text for f in files[i : i + 1000]])
        out.extend(np.array(encoding.ids, dtype=np.int16) for encoding in batch)
    return out


def pack(documents: Sequence[np.ndarray]) -> Tensor:
    """Join documents, each followed by the end-of-text token (id 0); int16 [n]."""
    return torch.from_numpy(np.concatenate([np.append(d, np.int16(0)) for d in documents]))


# --- training ------------------------------------------------------------------------------

LossFn = Callable[[Tensor], tuple[Tensor, Tensor]]


def windows(tokens: Tensor, batch: int, seq_len: int, seed: int) -> Iterator[Tensor]:
    """Yield int64 [batch, seq_len + 1] windows; each pass covers the text at a new offset."""
    generator = torch.Generator(device=tokens.device).manual_seed(seed)
    column = torch.arange(seq_len + 1, device=tokens.device)
    count = (len(tokens) - seq_len - 1) // seq_len
    while True:
        starts = torch.randperm(count, generator=generator, device=tokens.device) * seq_len
        starts += torch.randint(seq_len, (1,), generator=generator, device=tokens.device)
        for i in range(0, count - batch + 1, batch):
            yield tokens[starts[i : i + batch, None] + column].long()


def language_loss(model: Llama, dtype: torch.dtype) -> LossFn:
    """Next-token cross entropy (nats) of a [batch, tokens + 1] window, twice."""

    def loss(ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(ids[:, :-1], dtype).float()
        value = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return value, value.detach()

    return loss


def distillation_loss(draft: Llama, target: Llama, dtype: torch.dtype) -> LossFn:
    """0.9 KL(target || draft) + 0.1 cross entropy, and the rate of equal argmax."""

    def loss(ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = target(ids[:, :-1], dtype).float().log_softmax(-1)
        student = draft(ids[:, :-1], dtype).float().log_softmax(-1)
        kl = (teacher.exp() * (teacher - student)).sum(-1).mean()
        ce = F.nll_loss(student.flatten(0, 1), ids[:, 1:].flatten())
        same = (teacher.argmax(-1) == student.argmax(-1)).float().mean()
        return 0.9 * kl + 0.1 * ce, same

    return loss


def compiled(loss: LossFn, sample: Tensor, log: Log) -> LossFn:
    """Compile `loss` on CUDA, warmed up forward and backward; fall back to eager."""
    if not sample.is_cuda:
        return loss
    try:
        fast = torch.compile(loss)
        fast(sample)[0].backward()
        torch.cuda.synchronize()
        return fast
    except Exception as error:  # any compiler failure: eager is slower but right
        log.say(f"torch.compile failed, running eagerly: {str(error)[:300]}")
        return loss


def train(
    name: str,
    model: Llama,
    loss: LossFn,
    tokens: Tensor,
    seconds: float,
    latest: float,
    recipe: Recipe,
    log: Log,
) -> None:
    """Train one model; the loss curve goes to the log.

    Args:
        name: "target" or "draft".
        model: the model to train.
        loss: its loss, of one window batch.
        tokens: int16 [n], the packed text, on the model's device.
        seconds: training time after compilation.
        latest: time since the script's start (seconds) at which to stop at the latest.
        recipe: batch, rates and seed.
        log: where the curve goes.
    """
    batches = windows(tokens, recipe.batch, recipe.seq_len, recipe.seed)
    optimiser = Optimiser(model, recipe.muon_lr, recipe.adam_lr)
    loss = compiled(loss, next(batches), log)
    for parameter in model.parameters():
        parameter.grad = None
    log.phase(f"{name}: compile")
    seconds = max(1.0, min(seconds, latest - log.elapsed()))
    curve: list[dict[str, float]] = []
    begin = time.perf_counter()
    step = 0
    while (progress := (time.perf_counter() - begin) / seconds) < 1:
        value, metric = loss(next(batches))
        value.backward()
        optimiser.step(rate_scale(progress))
        step += 1
        if step % 4 == 0 and tokens.is_cuda:
            torch.cuda.synchronize()
        if step % 50 == 0 or step <= 2:
            point = {"step": step, "seconds": round(time.perf_counter() - begin, 1)}
            point |= {"loss": round(value.item(), 4), "metric": round(metric.item(), 4)}
            curve.append(point)
            if step % 200 == 0 or step <= 2:
                log.say(f"{name} {point}")
    log.curves[name] = curve
    log.results[f"{name}_steps"] = step
    log.results[f"{name}_tokens_seen"] = step * recipe.batch * recipe.seq_len
    log.phase(f"{name}: training")


# --- held-out prompts ----------------------------------------------------------------------


def held_out_prompts(
    tokenizer: Tokenizer, corpus: Corpus, count: int
) -> tuple[list[SourceFile], np.ndarray]:
    """Choose held-out files of enough tokens from many packages.

    Returns:
        The files, and their first tokens, int64 [n, PROMPT + CONTINUATION].
    """
    ids = dict(
        zip([f.key for f in corpus.held_out], encode(tokenizer, corpus.held_out), strict=True)
    )
    need = PROMPT + CONTINUATION
    files = spread([f for f in corpus.held_out if len(ids[f.key]) >= need], count)
    files.sort(key=lambda f: path_hash(f.key))
    return files, np.stack([ids[f.key][:need] for f in files]).astype(np.int64)


def save_prompts(path: Path, files: Sequence[SourceFile], ids: np.ndarray) -> None:
    """Write uint16 `prompts` and `continuations`, and the files' and packages' names."""
    np.savez_compressed(
        path,
        prompts=ids[:, :PROMPT].astype(np.uint16),
        continuations=ids[:, PROMPT:].astype(np.uint16),
        names=np.array([f.key for f in files]),
        packages=np.array([f.package for f in files]),
    )


# --- evaluation ----------------------------------------------------------------------------


@torch.no_grad()
def held_out_scores(
    target: Llama, draft: Llama, ids: Tensor, dtype: torch.dtype
) -> dict[str, float]:
    """Loss of both models (nats per token) and top-1 agreement on held-out text.

    Args:
        target: the target.
        draft: the draft.
        ids: int64 [n, tokens].
        dtype: computing dtype.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for chunk in ids.split(16):
        teacher = target(chunk[:, :-1], dtype).float().flatten(0, 1)
        student = draft(chunk[:, :-1], dtype).float().flatten(0, 1)
        labels = chunk[:, 1:].flatten()
        parts = [F.cross_entropy(x, labels, reduction="sum") for x in (teacher, student)]
        same = (teacher.argmax(-1) == student.argmax(-1)).sum()
        sums += torch.stack([*parts, same]).double().cpu()
    mean = (sums / (ids.shape[0] * (ids.shape[1] - 1))).tolist()
    names = ("target_held_out_loss", "draft_held_out_loss", "held_out_agreement")
    return {name: round(value, 4) for name, value in zip(names, mean, strict=True)}


@torch.no_grad()
def greedy(folder: Path, prompts: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The exported model's greedy continuation through transformers, int64 [n, count]."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder)
    model = model.to(prompts.device, dtype).eval()
    rows = []
    for chunk in prompts.split(96):
        out = model(input_ids=chunk, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        tokens = [token]
        for _ in range(count - 1):
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            tokens.append(token)
        rows.append(torch.cat(tokens, 1))
    return torch.cat(rows)


def repeats(tokens: Tensor, length: int = 8) -> Tensor:
    """Tokens [n, count] that end a run of `length` seen before in their row, bool [n, count]."""
    out = torch.zeros_like(tokens, dtype=torch.bool)
    for i, row in enumerate(tokens.tolist()):
        seen: set[tuple[int, ...]] = set()
        for j in range(length, len(row) + 1):
            run = tuple(row[j - length : j])
            out[i, j - 1] = run in seen
            seen.add(run)
    return out


@torch.no_grad()
def first_token_acceptance(
    draft: Llama, prompts: Tensor, continuation: Tensor, dtype: torch.dtype
) -> dict[str, float]:
    """How often the draft's argmax is the target's next greedy token (a1).

    Args:
        draft: the draft.
        prompts: int64 [n, PROMPT].
        continuation: int64 [n, count], the target's own; tokens after an end of text don't count.
        dtype: computing dtype.

    Returns:
        `a1`; `loop_share`, the share of tokens that repeat (see `repeats`); `a1_outside_loops`.
    """
    guesses = []
    for chunk in torch.cat([prompts, continuation], 1).split(32):
        logits = draft(chunk[:, :-1], dtype)[:, prompts.shape[1] - 1 :]
        guesses.append(logits.argmax(-1))
    hits = torch.cat(guesses) == continuation
    end = (continuation == 0).long()
    counted = end.cumsum(1) - end == 0
    loops = repeats(continuation) & counted
    fresh = counted & ~loops
    rates = {"a1": hits[counted], "a1_outside_loops": hits[fresh], "loop_share": loops[counted]}
    return {name: round(values.float().mean().item(), 4) for name, values in rates.items()}


def evaluate(
    out: Path, target: Llama, draft: Llama, ids: Tensor, count: int, dtype: torch.dtype
) -> dict[str, float]:
    """All figures of the pair exported to `out`; ids int64 [n, tokens] are the held-out texts."""
    scores = held_out_scores(target, draft, ids, dtype)
    continuation = greedy(out / "demo", ids[:, :PROMPT], count, dtype)
    return scores | first_token_acceptance(draft, ids[:, :PROMPT], continuation, dtype)


def evaluate_folder(out: Path, device: torch.device, recipe: Recipe) -> dict[str, object]:
    """Evaluate a pair that was trained before, in float32."""
    pair = []
    for name, shape in (("demo", recipe.target), ("demo-draft", recipe.draft)):
        weights = load_file(out / name / "model.safetensors")
        pair.append(Llama(shape).to(device))
        pair[-1].load_state_dict({k.removeprefix("model."): w for k, w in weights.items()})
    saved = np.load(out / "heldout_prompts.npz", allow_pickle=False)
    ids = np.concatenate([saved["prompts"], saved["continuations"]], 1).astype(np.int64)
    tokens = torch.from_numpy(ids).to(device)
    scores = evaluate(out, pair[0], pair[1], tokens, recipe.greedy_tokens, torch.float32)
    return {"device": device.type, "dtype": "float32", "torch": torch.__version__, **scores}


# --- the whole run -------------------------------------------------------------------------

CARD = """# Demo pair

A Llama-shaped target (`demo`) and a draft distilled from it (`demo-draft`), trained by
`tools/train_demo_pair.py` on Python source. They exist to show and test speculative decoding
with a real model's behaviour in a package of a few megabytes.

{sizes}

## Measured on held-out files

{scores}

The figures are those of the exported bf16 weights, over the first {tokens} tokens of {files}
held-out files from {held_packages} packages (`heldout_prompts.npz`: `prompts` uint16
[{files}, {prompt}], `continuations` uint16 [{files}, {continuation}], `names`, `packages`).
Agreement: the rate at which both models' argmax is the same on that text. a1: the rate at which
the draft's argmax is the target's next token along the target's own greedy continuation
({greedy} tokens) of the prompts. Greedy text of so small a model repeats itself; a token counts
as in a loop when it ends a run of eight that came before in the same continuation.

## Training

Device: {device}; torch {torch}; Python {python}. {wall:.0f} s in all: {phases}.
The target saw {target_tokens:,} tokens in {target_steps:,} steps, the draft {draft_tokens:,} in
{draft_steps:,} (0.9 KL to the target's distribution + 0.1 cross entropy). Muon for the layers'
matrices, AdamW for embeddings and norms, sequences of {seq_len}. Loss curves:
`training_log.json`.

## Data

{train_files:,} files, {megabytes:.0f} MB of text, {train_tokens:,} tokens: the Python files of the
standard library and of installed packages whose metadata states a permissive licence, at most
{cap:.0f} MB from one package. Vendored, generated, huge, table-like and mostly non-ASCII files are
left out, as are leading licence comments. Held out: one long file in {modulus} by a hash of its
path; training files with more than {overlap:.0%} of their {lines}-line runs in a held-out file
were dropped, and held-out files the other way round. Dropped: {dropped}.

| package | version | licence |
|---|---|---|
{packages}

## Limits

The models complete Python-looking text and nothing else: no instruction following, no facts, no
reliable code. The chat template (`# role: content` lines) only lets chat interfaces run. Contexts
beyond {context} tokens were not trained. The held-out files come from the same packages as the
training files, so the loss on code of other origin is higher. Speeds of these models say nothing
of large models.
"""


def model_card(log: Log, corpus: Corpus, files: Sequence[SourceFile], recipe: Recipe) -> str:
    """Fill in the model card."""
    results = log.results
    rows = ["| model | parameters | hidden | layers | heads / kv | intermediate | bytes |"]
    rows.append("|---|---|---|---|---|---|---|")
    for name, shape in (("target", recipe.target), ("draft", recipe.draft)):
        rows.append(
            f"| {name} | {results[f'{name}_parameters']:,} | {shape.hidden} | {shape.layers} "
            f"| {shape.heads} / {shape.kv_heads} of {shape.head_dim} | {shape.intermediate} "
            f"| {results[f'{name}_bytes']:,} |"
        )
    scores = [
        f"- target loss: {results['target_held_out_loss']:.3f} nats per token",
        f"- draft loss: {results['draft_held_out_loss']:.3f} nats per token",
        f"- top-1 agreement of the draft with the target: {results['held_out_agreement']:.3f}",
        f"- a1: {results['a1']:.3f}; {results['a1_outside_loops']:.3f} outside loops",
        f"- tokens of the greedy continuations in loops: {results['loop_share']:.0%}",
    ]
    return CARD.format(
        sizes="\n".join(rows),
        scores="\n".join(scores),
        tokens=PROMPT + CONTINUATION,
        files=len(files),
        held_packages=len({f.package for f in files}),
        prompt=PROMPT,
        continuation=CONTINUATION,
        greedy=recipe.greedy_tokens,
        device=results["device"],
        torch=results["torch"],
        python=platform.python_version(),
        wall=log.elapsed(),
        phases=", ".join(f"{name} {seconds:.0f} s" for name, seconds in log.phases.items()),
        target_tokens=results["target_tokens_seen"],
        target_steps=results["target_steps"],
        draft_tokens=results["draft_tokens_seen"],
        draft_steps=results["draft_steps"],
        seq_len=recipe.seq_len,
        train_files=len(corpus.train),
        megabytes=sum(len(f.text) for f in corpus.train) / 1e6,
        train_tokens=results["train_tokens"],
        cap=recipe.package_cap / 1e6,
        modulus=recipe.holdout_modulus,
        overlap=HELD_OUT_OVERLAP,
        lines=SHINGLE_LINES,
        dropped=", ".join(f"{count:,} ({why})" for why, count in corpus.dropped.items()),
        packages="\n".join(f"| {p.name} | {p.version} | {p.licence} |" for p in corpus.packages),
        context=CONTEXT,
    )


def run(out: Path, recipe: Recipe, device: torch.device) -> dict[str, object]:
    """Train, evaluate and write everything to `out`; returns the figures."""
    log = Log()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    corpus = load_corpus(
        recipe.holdout_modulus, recipe.package_cap, recipe.max_files, os.cpu_count() or 1
    )
    log.say(f"{len(corpus.train)} files, {len(corpus.held_out)} held out, {corpus.dropped}")
    log.phase("corpus")
    tokenizer = train_tokenizer(corpus.train, recipe.tokenizer_chars, recipe.target.vocab)
    log.phase("tokenizer")
    tokens = pack(encode(tokenizer, corpus.train)).to(device)
    files, held_ids = held_out_prompts(tokenizer, corpus, recipe.prompts)
    ids = torch.from_numpy(held_ids).to(device)
    log.results |= {"train_tokens": len(tokens), "held_out_files": len(files)}
    log.results |= {"packages": len(corpus.packages), "torch": torch.__version__}
    log.results["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    log.say(f"{len(tokens):,} tokens, {len(files)} prompts")
    out.mkdir(parents=True, exist_ok=True)
    save_prompts(out / "heldout_prompts.npz", files, held_ids)
    log.phase("encoding")

    torch.manual_seed(recipe.seed)
    target, draft = Llama(recipe.target).to(device), Llama(recipe.draft).to(device)
    last = recipe.deadline_minutes * 60 - 45
    seconds = (recipe.target_minutes * 60, recipe.draft_minutes * 60)
    loss = language_loss(target, dtype)
    train("target", target, loss, tokens, seconds[0], last - seconds[1] - 40, recipe, log)
    export(target, tokenizer, out / "demo")
    target.requires_grad_(False)
    log.say("target saved")
    loss = distillation_loss(draft, target, dtype)
    train("draft", draft, loss, tokens, seconds[1], last, recipe, log)
    export(draft, tokenizer, out / "demo-draft")

    for name, model, folder in (("target", target, "demo"), ("draft", draft, "demo-draft")):
        log.results[f"{name}_parameters"] = model.parameter_count()
        log.results[f"{name}_bytes"] = (out / folder / "model.safetensors").stat().st_size
    log.results |= evaluate(out, target, draft, ids, recipe.greedy_tokens, dtype)
    log.phase("evaluation")
    (out / "MODEL_CARD.md").write_text(model_card(log, corpus, files, recipe), encoding="utf-8")
    record = {"results": log.results, "wall_seconds": round(log.elapsed(), 1)}
    record |= {"phase_seconds": log.phases, "recipe": dataclasses.asdict(recipe)}
    record |= {"packages": [dataclasses.asdict(p) for p in corpus.packages], "curves": log.curves}
    write_json(out / "training_log.json", record)
    log.say(json.dumps(log.results))
    return log.results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--smoke", action="store_true", help="tiny models, seconds of training")
    parser.add_argument("--evaluate", action="store_true", help="only measure the pair in OUT")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("target_minutes", "draft_minutes", "deadline_minutes"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, dest=name)
    args = parser.parse_args()
    given = {k: v for k, v in vars(args).items() if k.endswith("_minutes") and v is not None}
    recipe = dataclasses.replace(SMOKE if args.smoke else Recipe(), **given)
    if args.evaluate:
        print(json.dumps(evaluate_folder(args.out, torch.device(args.device), recipe), indent=2))
        return
    torch.set_float32_matmul_precision("high")
    run(args.out, recipe, torch.device(args.device))


if __name__ == "__main__":
    main()
