"""Random mixes of features on tiny models of all families, against transformers.

Beyond `engine_fuzz`: families, weights that are quantized while they load (transformers gets what
they stand for), block sizes, prompt lookup and a draft worker, regular expressions and schemas,
thresholds, bad words, samples ranked by their probability, cut prompts, beams that equal those of
transformers' `generate`, adapters of both kinds, more of them than the engine holds, requests as
they travel between processes, prompts as text or as long as the context. By hand, for more seeds
than the suite runs:

    python -m tests.helpers.feature_fuzz 0 1000
    python -m tests.helpers.feature_fuzz --guided 0 1000  # constraints, drafts, aborts
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
import transformers

from hetero_llm.config.draft_model_config import DraftModelConfig
from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.drafter import Drafter
from hetero_llm.core.lora import LoRARequest
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.prompt_adapter import PromptAdapterRequest
from hetero_llm.core.sampling_params import RequestOutputKind, SamplingParams
from hetero_llm.core.step_times import StepTimes
from hetero_llm.core.structured_outputs import StructuredOutputsParams
from hetero_llm.cpu.draft_worker.draft_model import DraftModel
from hetero_llm.engine.engine import Engine
from hetero_llm.quantization.matrix import dequantize
from hetero_llm.quantization.names import OnlineName
from hetero_llm.quantization.online import OnlineFormat
from hetero_llm.spec_decode.draft_model.proposer import DraftModelProposer
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from hetero_llm.spec_decode.proposal_account import ProposalAccount
from tests.helpers.adapters import merge, write_adapter
from tests.helpers.draft_traffic import MAX_LEN, VOCAB, build, make_draft, make_model
from tests.helpers.drafters import Garbage, Oracle, Record, Siblings
from tests.helpers.engine_fuzz import (
    EOS,
    TIE,
    Case,
    Expected,
    Reference,
    check_beams,
    check_outputs,
    make_cases,
    serve,
)
from tests.helpers.prompt_adapters import write_prompt_adapter
from tests.models import tiny_moe
from tests.models.tiny import VARIANTS, make_tiny_checkpoint
from tests.spec_decode.draft_model.local_worker import LocalWorker, Setting, as_any, load_model

END = 77
"""The end token of the beams that are compared with transformers."""
_BLOCK = 8
_LENGTH_KEYS = ("n_positions", "max_position_embeddings", "max_sequence_length")
# Those left out change with the length: MAX_LEN tokens are beyond their original context.
_FAMILIES = [
    pair for pair in VARIANTS if pair[1] not in ("dynamic", "longrope", "yarn", "yarn_mscale")
]
_QUANTIZED: tuple[OnlineName, ...] = ("fp8", "fp8_block", "ifq", "ifq_nf4", "int4")
_SLOTS = 6
_OF_OTHERS = r"(?!.*project_).*"
"""OPT's projections of embeddings take no adapters."""
_OF_MIXTURES = r".*(attn|shared_expert).*"
"""transformers' experts and routers are no linear layers."""
_REGEXES = ("[ab é]{2,6}", "(ab|ba)+c?", r"\d{1,3}(\.\d)?", "a*b", "(😀|中)+", "é?", "(a|b){3}")
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"enum": ["ab", 1, None, [True]]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "é": {"enum": ["b", "中"]}},
        "required": ["é"],
        "additionalProperties": False,
    },
)


class Worlds:
    """Models of the families and what quantization makes of them, with their references.

    Args:
        folder: for the models.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, Path] = {}
        self._references: dict[str, Reference] = {}
        self._draft: DraftModel | None = None

    def open(
        self, family: str, variant: str, quantized: OnlineName | None
    ) -> tuple[Path, Reference]:
        """A model's folder and its reference, quantized or not."""
        model = f"{family}-{variant}"
        name = f"{model} {quantized}"
        path = self._folder / model
        if model not in self._models:
            self._models[model] = _make_model(path, family, variant)
        if name not in self._references:
            tie = 2e-3 if family in tiny_moe.FAMILIES else TIE
            reference = Reference(self._models[model], tie=tie)
            if quantized is not None:
                quantize_reference(reference.model, quantized)
            modules = _OF_MIXTURES if family in tiny_moe.FAMILIES else _OF_OTHERS
            add_adapters(reference, self._folder / f"adapters of {name}", modules)
            self._references[name] = reference
        return self._models[model], self._references[name]

    def draft_model(self) -> DraftModel:
        """For every target: the byte vocabulary is the same."""
        if self._draft is None:
            target, _ = self.open("llama", "gqa", None)
            folder = make_draft(target, self._folder / "draft")
            setting = Setting(slots=_SLOTS, max_model_len=MAX_LEN, window=48)
            self._draft = load_model(folder, setting)
        return self._draft


def _make_model(folder: Path, family: str, variant: str) -> Path:
    """A model with a byte-level tokenizer and room for `MAX_LEN` tokens."""
    if (family, variant) == ("llama", "gqa"):
        return make_model(folder)
    make_tiny_checkpoint(folder / "short", family, variant)
    config = transformers.AutoConfig.from_pretrained(folder / "short").to_dict()
    changes = {key: MAX_LEN for key in _LENGTH_KEYS if key in config}
    return make_tiny_checkpoint(
        folder / "model", family, variant, with_tokenizer=True, changes=changes
    )


def quantize_reference(model: Any, name: OnlineName) -> None:
    """Replaces the weights of linear layers, but for the head, by those that quantized ones stand
    for."""
    for path, module in model.named_modules():
        transposed = isinstance(module, transformers.pytorch_utils.Conv1D)
        is_head = path.endswith(("lm_head", "embed_out"))
        if is_head or not (transposed or isinstance(module, torch.nn.Linear)):
            continue
        weight = module.weight.data.T.contiguous() if transposed else module.weight.data
        scheme = OnlineFormat(name).scheme(path)
        scheme.parts(*weight.shape)  # which groups may not divide
        matrix = scheme.convert({"weight": weight}, *weight.shape)
        plain = dequantize(matrix, torch.float32)
        module.weight.data = plain.T.contiguous() if transposed else plain


def add_adapters(reference: Reference, folder: Path, modules: str) -> None:
    """Writes adapters of both kinds for a reference.

    Args:
        modules: that LoRA adapters adapt, as a regular expression.
    """
    for number, rank in enumerate((1, 8, 3), 1):
        model = copy.deepcopy(reference.model)
        adapter = write_adapter(
            folder / f"lora {number}", model, modules=modules, rank=rank, rslora=rank == 8,
            strength=0.1, seed=number,
        )  # fmt: skip
        merge(model, adapter)
        request = LoRARequest(f"lora {number}", number, str(adapter.folder))
        reference.loras.append((request, model))
    size = reference.model.get_input_embeddings().weight.shape[1]
    for number, length in enumerate((5, 11, 1), 1):
        virtual = write_prompt_adapter(folder / f"virtual {number}", length, size, seed=number)
        name, path = f"virtual {number}", str(virtual.folder)
        wanted = PromptAdapterRequest(name, number, path, length)
        reference.virtual.append((wanted, virtual.embeddings))


# -- what a seed makes ----------------------------------------------------------------------


def richer(rng: Random, case: Case, *, guided: bool) -> Case:
    """The request with more features; `guided`: with a constraint for certain."""
    params, prompt = case.params, case.prompt
    if params.use_beam_search or params.structured_outputs is not None:
        return case
    if guided or rng.random() < 0.2:
        kind = rng.choice(("regex", "json"))
        value: Any = rng.choice(_REGEXES if kind == "regex" else _SCHEMAS)
        after = sorted(params.logit_bias or {})[:1] if rng.random() < 0.3 else []
        constraint = StructuredOutputsParams(
            **{kind: value}, begins_after=after, disable_any_whitespace=rng.random() < 0.5
        )
        params = replace(
            params, structured_outputs=constraint, allowed_token_ids=None, no_repeat_ngram_size=0
        )
    else:
        if rng.random() < 0.25:
            words = ("a", "ab", " b", "é", "中😀", "b a", " ")
            params = replace(params, bad_words=rng.sample(words, rng.randint(1, 3)))
        if not params.greedy and params.n < 3 and rng.random() < 0.2:
            params = replace(params, best_of=params.n + rng.randint(1, 2))
    if not params.greedy:
        params = replace(params, temperature=rng.choice((0.3, 0.8, 1.0, 1.7)))
        if rng.random() < 0.5:
            params = replace(
                params,
                top_k=rng.choice((-1, 1, 3, 40)),
                top_p=rng.choice((1.0, 0.5, 0.9)),
                min_p=rng.choice((0.0, 0.02, 0.2)),
            )
    if rng.random() < 0.1:
        keep, side = rng.randint(1, 12), rng.choice(("left", "right"))
        params = replace(params, truncate_prompt_tokens=keep, truncation_side=side)
        prompt = prompt[-keep:] if side == "left" else prompt[:keep]
    return replace(case, params=params, prompt=prompt)


def odder(rng: Random, case: Case, reference: Reference, kind: str | None) -> Case:
    """The request with adapters, extreme values, and other ways to the engine.

    Args:
        kind: of adapters that the engine serves; None: it serves none.
    """
    params, prompt = case.params, case.prompt
    if kind == "lora" and rng.random() < 0.7:
        case = replace(case, lora=rng.randrange(len(reference.loras)))
    elif kind == "virtual" and rng.random() < 0.7:
        case = replace(case, virtual=rng.randrange(len(reference.virtual)))
    if params.use_beam_search:
        return replace(case, virtual=None) if case.name == "clean beams" else case
    room = MAX_LEN - 1 - reference.num_virtual(case)
    if rng.random() < 0.05 and params.truncate_prompt_tokens is None and params.width == 1:
        prompt = (prompt * MAX_LEN)[: room - rng.choice((0, 0, 1, 7))]
    if not params.greedy:
        seeds = (0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1)
        if rng.random() < 0.2:
            params = replace(params, seed=rng.choice(seeds))
        if rng.random() < 0.1:
            params = replace(params, temperature=rng.choice((1e-4, 0.01, 5.0, 100.0)))
    if rng.random() < 0.03:
        params = replace(params, logprobs=-1)
    if rng.random() < 0.03:
        params = replace(params, prompt_logprobs=-1)
    if rng.random() < 0.1:
        params = replace(
            params, detokenize=False, stop=None, include_stop_str_in_output=False, bad_words=None
        )
    elif rng.random() < 0.1:
        params = replace(params, stop=["</s>", "<s>"], skip_special_tokens=False, ignore_eos=True)
    decode, encode = reference.tokenizer.decode, reference.tokenizer.encode
    returns = encode(decode(prompt), add_special_tokens=False) == prompt
    as_text = params.truncate_prompt_tokens is None and returns and rng.random() < 0.5
    cumulative = params.output_kind is RequestOutputKind.CUMULATIVE  # these travel as deltas
    travels = not (cumulative or params.logits_processors) and rng.random() < 0.5
    return replace(case, params=params, prompt=prompt, as_text=as_text, travels=travels)


def adapter_sizes(rng: Random, kind: str | None) -> dict[str, Any]:
    """Engine arguments: adapters of a kind, fewer of them at once than there are."""
    if kind == "lora":
        on_device = rng.randint(1, 2)
        return {
            "enable_lora": True, "max_loras": on_device, "max_lora_rank": 8,
            "max_cpu_loras": rng.randint(on_device, 3),
        }  # fmt: skip
    if kind == "virtual":
        number = rng.randint(1, 2)
        return {
            "enable_prompt_adapter": True, "max_prompt_adapter_token": 11,
            "max_prompt_adapters": number,
        }  # fmt: skip
    return {}


def clean_beams(rng: Random, prompt: list[int]) -> Case:
    """A request for beams that transformers' `generate` can answer, too."""
    width = rng.randint(2, 3)
    params = SamplingParams(
        use_beam_search=True, n=width, best_of=width, temperature=0.0,
        max_tokens=rng.randint(2, 14), length_penalty=rng.choice((-1.5, 0.0, 1.0, 2.0)),
        early_stopping=rng.choice((False, True, "never")), stop_token_ids=[END], ignore_eos=True,
        logit_bias={END: 3.0},
    )  # fmt: skip
    return Case("clean beams", prompt[:6], params, rng.randint(0, 6), None)


def _constrained_alone(rng: Random, case: Case) -> Case:
    """A request that is aborted more often than not, and samples among all that is allowed."""
    aborts = rng.randint(1, 12) if case.params.n == 1 and rng.random() < 0.5 else None
    most = rng.randint(1, 40)
    least = min(case.params.min_tokens, most)
    params = replace(case.params, max_tokens=most, min_tokens=least, num_speculative_tokens=None)
    return replace(case, params=params, aborts=aborts)


def make_engine(
    rng: Random,
    folder: Path,
    quantized: OnlineName | None,
    record: Record,
    worlds: Worlds,
    *,
    guided: bool,
    more: dict[str, Any],
) -> tuple[str, Engine]:
    """An engine with short memory, any drafter and `more` arguments, and its description."""
    block = rng.choice((8, 8, 16, 32))
    blocks = rng.choice((15, 16) if guided else (15, 20, 60))
    sizes: dict[str, Any] = {
        "max_num_batched_tokens": rng.choice((16, 33, 50, 120)),
        "block_size": block,
        "num_gpu_blocks_override": -(-blocks * _BLOCK // block),
        "max_num_seqs": rng.choice((3, 7)),
        "enable_prefix_caching": rng.random() < 0.7,
        "seed": rng.randrange(100),
    }
    if quantized is not None:
        sizes["quantization"] = quantized
    if sizes["max_num_batched_tokens"] > MAX_LEN:
        sizes["enable_chunked_prefill"] = rng.random() < 0.6
    # The native executor rounds the inputs of integer weights, too, which transformers does not.
    if rng.random() < 0.3 or quantized in ("ifq", "int4"):
        sizes |= rng.choice(({"batch_invariant": True}, {"cpu_backend": "torch"}))
    kind = rng.choice(_KINDS[1:] if guided else _KINDS)
    drafter: Drafter | None = None
    if kind in _GUESSERS:
        drafter = _GUESSERS[kind](record, VOCAB, seed=rng.randrange(100))
    elif kind == "prompt lookup":
        sizes |= {
            "speculative_model": "[ngram]", "num_speculative_tokens": rng.randint(1, 7),
            "ngram_prompt_lookup_max": rng.randint(2, 4), "ngram_prompt_lookup_min": 1,
        }  # fmt: skip
    elif kind in _CACHES:
        drafter = HybridDrafter(_lookahead(_CACHES.index(kind)), width=MAX_LEN, capacity=1 << 14)
    elif kind != "none":
        drafter = _with_worker(rng, worlds.draft_model(), uses_cache=kind == "worker and cache")
    sizes |= more
    return f"{kind} {sizes}", build(folder, 7, drafter, **sizes)


_GUESSERS: dict[str, Any] = {"oracle": Oracle, "garbage": Garbage, "siblings": Siblings}
_CACHES = ("raw", "turbo", "hybrid", "merged")
_KINDS = ("none", *_GUESSERS, *_CACHES, "prompt lookup", "worker", "worker and cache")


def _lookahead(mode: int) -> LookaheadConfig:
    return LookaheadConfig(
        cache_mode=mode, voc_size=VOCAB, max_seq_len=MAX_LEN, eos_token_id=(EOS,),
        token_paths_top_k=3, num_threads=1,
    )  # fmt: skip


def _with_worker(rng: Random, model: DraftModel, *, uses_cache: bool) -> HybridDrafter:
    """Drafts of a worker in this process, which crashes now and then."""
    often = rng.choice((0.0, 0.03))

    def before_poll(worker: LocalWorker) -> None:
        if rng.random() < often:
            worker.crash(rng.randrange(1, 6))

    worker = LocalWorker(
        model, Setting(slots=_SLOTS, max_model_len=MAX_LEN, window=48),
        turns=rng.randint(1, 3), before_poll=before_poll,
    )  # fmt: skip
    config = DraftModelConfig(
        model="draft", revision=None, num_tokens=rng.randint(1, 6), max_model_len=None, threads=1,
        weight_dtype="float32", overlap=rng.choice(("auto", "enumerate", "off")), timeout=None,
        optional=False,
    )  # fmt: skip
    proposer = DraftModelProposer(
        as_any(worker), config, slots=_SLOTS, vocab_size=VOCAB, max_positions=MAX_LEN
    )
    return HybridDrafter(
        _lookahead(3), width=MAX_LEN, capacity=1 << 14 if uses_cache else 0, uses_cache=uses_cache,
        model=proposer,
    )  # fmt: skip


# -- comparing ------------------------------------------------------------------------------


def check_ranked(case: Case, output: RequestOutput, expected: list[Expected], tie: float) -> str:
    """Checks the samples with the highest log-probability of several."""
    if output.outputs[0].finish_reason == "abort":
        return "aborted"
    if any(one.safe < len(one.tokens) for one in expected):
        return "tie"
    sums = [
        sum(float(s[t]) for s, t in zip(one.scores, one.tokens, strict=True)) for one in expected
    ]
    order = sorted(range(len(sums)), key=lambda index: -sums[index])
    if any(abs(sums[a] - sums[b]) < 50 * tie for a, b in zip(order, order[1:], strict=False)):
        return "tie"
    assert len(output.outputs) == case.params.n
    for one, index in zip(output.outputs, order, strict=False):
        text = expected[index].text if case.params.detokenize else ""
        assert (one.token_ids, one.text) == (expected[index].tokens, text)
        assert abs((one.cumulative_logprob or 0.0) - sums[index]) < 2e-2
    return "equal"


def check_prompt(case: Case, outputs: list[RequestOutput], reference: Reference) -> None:
    """Checks the prompt's tokens and log-probabilities."""
    wanted = VOCAB if case.params.prompt_logprobs == -1 else case.params.prompt_logprobs
    last = outputs[-1]
    assert last.prompt_token_ids == case.prompt
    if wanted is None:
        assert not last.prompt_logprobs
        return
    if last.outputs and last.outputs[0].finish_reason == "abort" and not last.prompt_logprobs:
        return
    assert last.prompt_logprobs is not None and len(last.prompt_logprobs) == len(case.prompt)
    assert last.prompt_logprobs[0] is None
    with torch.inference_mode():
        logits = reference.model_of(case)(**reference.prompt_inputs(case)).logits[0]
        scores = logits[reference.num_virtual(case) :].log_softmax(-1)
    for place, entries in enumerate(last.prompt_logprobs[1:], 1):
        assert entries is not None and case.prompt[place] in entries
        assert wanted <= len(entries) <= min(wanted + 1, VOCAB)
        for token, entry in entries.items():
            assert abs(entry.logprob - float(scores[place - 1, token])) < 2e-3


@torch.inference_mode()
def check_clean_beams(case: Case, output: RequestOutput, reference: Reference) -> str:
    """Compares beams with those of transformers' `generate`."""
    params = case.params
    prompt = torch.tensor([case.prompt])
    expected = reference.model_of(case).generate(
        prompt, attention_mask=torch.ones_like(prompt),
        num_beams=params.width, num_return_sequences=params.n,
        do_sample=False, max_new_tokens=params.max_tokens, early_stopping=params.early_stopping,
        length_penalty=params.length_penalty, eos_token_id=END, pad_token_id=0,
        sequence_bias=[[[END], 3.0]], renormalize_logits=True, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    assert len(output.outputs) == params.n
    for one, row, theirs in zip(
        output.outputs, expected.sequences, expected.sequences_scores.tolist(), strict=True
    ):
        ours = (one.cumulative_logprob or 0.0) / len(one.token_ids) ** params.length_penalty
        assert abs(ours - theirs) < 2e-3 * max(1.0, abs(theirs)), (ours, theirs)
        tokens = row[len(case.prompt) :].tolist()
        if END in tokens:
            tokens = tokens[: tokens.index(END) + 1]
        if one.token_ids != tokens:
            return "tie of beams"  # the scores are equal
        assert one.finish_reason == ("stop" if tokens[-1] == END else "length")
    return "equal beams"


def run_seed(seed: int, worlds: Worlds, *, guided: bool = False) -> Counter[str]:
    """Runs one seed; raises AssertionError with a description where something differs.

    Args:
        guided: every request has a constraint, every engine a drafter, and half of the requests are
            aborted.
    """
    rng = Random(f"{'guided' if guided else 'features'} {seed}")
    family, variant = rng.choice(_FAMILIES)
    quantized = rng.choice((None, None, None, *_QUANTIZED))
    if family in tiny_moe.FAMILIES:
        quantized = None  # experts are refused
    try:
        folder, reference = worlds.open(family, variant, quantized)
    except ValueError as error:  # a group that does not divide the columns
        assert quantized is not None, error
        quantized = None
        folder, reference = worlds.open(family, variant, None)
    cases = [richer(rng, case, guided=guided) for case in make_cases(rng, reference.tokenizer)]
    if guided:
        cases = [_constrained_alone(rng, case) for case in cases[:-1]]
    elif rng.random() < 0.5:
        cases.append(clean_beams(rng, cases[0].prompt))
    other = Random(f"{'guided' if guided else 'features'} {seed}, adapters")
    kind = other.choice((None, "lora", "virtual"))
    more = {**adapter_sizes(other, kind), "max_logprobs": -1}
    cases = [odder(other, case, reference, kind) for case in cases]
    reset_at = other.choice((None, other.randint(5, 60)))
    expected = {case.name: reference.serve(case) for case in cases}
    record = {
        (name, index): sample.unstopped
        for name, samples in expected.items()
        for index, sample in enumerate(samples)
    }
    text, engine = make_engine(rng, folder, quantized, record, worlds, guided=guided, more=more)
    counts: Counter[str] = Counter([family, f"weights {quantized}", text.partition(" {")[0]])
    counts[f"adapters {kind}"] += 1
    failures = []
    try:
        for case, outputs in serve(engine, cases, reference, reset_at=reset_at):
            try:
                counts[_check(case, outputs, expected[case.name], reference)] += 1
            except AssertionError as error:
                failures.append(f"{case}\n{error!r:.2000}")
        engine.scheduler.check_integrity()
        metrics = engine.metrics()
        assert metrics["kv_cache_usage_perc"] == 0 and metrics["num_requests_running"] == 0
        for name in ("num_preemptions", "spec_decode_num_accepted_tokens", "prefix_cache_hits"):
            counts[name] = int(metrics[name])
    finally:
        engine.shut_down()
    if failures:
        head = f"seed {seed}, {family}-{variant}, {text}"
        raise AssertionError("\n".join([head, *failures]))
    return counts


def _check(
    case: Case, outputs: list[RequestOutput], expected: list[Expected], reference: Reference
) -> str:
    last = outputs[-1]
    assert all(output.error is None for output in outputs), last.error
    check_prompt(case, outputs, reference)
    if case.name == "clean beams":
        return check_clean_beams(case, last, reference)
    if case.params.use_beam_search:
        check_beams(case, last, reference)
        return "beams"
    if case.params.ranks_by_logprob:
        return check_ranked(case, last, expected, TIE)
    return check_outputs(case, outputs, expected)


def without_times() -> ExitStack:
    """Drafts at no price: what is drafted would depend on how loaded the machine is."""
    stack = ExitStack()
    ignored: Callable[..., None] = lambda *_: None  # noqa: E731
    stack.enter_context(mock.patch.object(StepTimes, "observe", ignored))
    stack.enter_context(mock.patch.object(ProposalAccount, "set_step_times", ignored))
    return stack


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--guided", action="store_true", help="see `run_seed`")
    parser.add_argument("seeds", nargs=2, type=int, help="the first, and the one behind the last")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, without_times():
        worlds = Worlds(Path(folder))
        for seed in range(*given.seeds):
            try:
                total += run_seed(seed, worlds, guided=given.guided)
            except Exception as error:
                total["failed"] += 1
                print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            if seed % 20 == 19:
                print(seed + 1, dict(total), flush=True)
    print(dict(total))


if __name__ == "__main__":
    main()
