"""Random mixes of features on a tiny model, against transformers and a reference for texts.

A seed makes an engine (drafter, back end, sizes that force chunks and preemption) and some requests
that arrive while others run. What users see has to be what transformers' model gives in a plain
loop, in float32. By hand, for more seeds than the suite runs:

    python -m tests.helpers.engine_fuzz 0 300
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import transformers

from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.drafter import Drafter
from hetero_llm.core.lora import LoRARequest
from hetero_llm.core.outputs import CompletionOutput, RequestOutput
from hetero_llm.core.prompt_adapter import PromptAdapterRequest
from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import RequestOutputKind, SamplingParams
from hetero_llm.core.structured_outputs import StructuredOutputsParams
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.engine.processes import messages
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.sampling.noise import gumbel_noise, signed_seed
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from hetero_llm.structured_output.compiler import GrammarCompiler
from tests.helpers.draft_traffic import MAX_LEN, VOCAB, build, make_model
from tests.helpers.drafters import Garbage, Oracle, Record, Siblings
from tests.helpers.text_reference import text_reference
from tests.models.tiny import reference_attention

EOS = 2
SPECIALS = ("<pad>", "<s>", "</s>")
SAMPLE = "abab é中😀\u200d"
TIE = 2e-4
"""Scores this close may change places: the engine adds in another order than transformers."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request that arrives after `arrives` steps; aborted when `aborts` tokens are seen.

    Attributes:
        lora, virtual: numbers of its adapters in `Reference.loras` and `Reference.virtual`.
        as_text: the prompt is sent as text, which has to have the same tokens.
        travels: it is sent as between the processes of a server.
    """

    name: str
    prompt: list[int]
    params: SamplingParams
    arrives: int
    aborts: int | None
    lora: int | None = None
    virtual: int | None = None
    as_text: bool = False
    travels: bool = False


@dataclass(slots=True)
class Expected:
    """One sample of a request.

    Attributes:
        unstopped: its tokens if no stop string ended it.
        scores: raw log-probabilities of each token's place.
        safe: tokens before the first near tie.
    """

    tokens: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    scores: list[torch.Tensor]
    safe: int
    unstopped: list[int]


class Reference:
    """Serves one request after the other with transformers' model.

    Args:
        folder: of a model with a byte-level tokenizer.
        tie: scores this close may change places.

    Attributes:
        model: transformers', in float32.
        loras: adapters, and `model` with each merged.
        virtual: prompt adapters.
    """

    def __init__(self, folder: Path, *, tie: float = TIE) -> None:
        self.loras: list[tuple[LoRARequest, Any]] = []
        self.virtual: list[tuple[PromptAdapterRequest, torch.Tensor]] = []
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=reference_attention(folder)
        ).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._tie = tie
        self._compiler = GrammarCompiler(Tokenizer(self.tokenizer).vocabulary(VOCAB, (EOS,)))
        backend = self.tokenizer.backend_tokenizer
        self._bytes = {}
        for token in range(VOCAB):
            piece = backend.id_to_token(token)
            assert piece is not None
            self._bytes[token] = b"" if piece in SPECIALS else bytes([_BYTE_OF[piece]])

    def bytes_of(self, token: int, params: SamplingParams) -> bytes:
        if token < len(SPECIALS):
            return b"" if params.skip_special_tokens else SPECIALS[token].encode()
        return self._bytes[token]

    def serve(self, case: Case) -> list[Expected]:
        params = case.params
        if params.use_beam_search:
            return []
        if params.greedy:
            return [self._sample(case, 0)] * params.width
        return [self._sample(case, index) for index in range(params.width)]

    def model_of(self, case: Case) -> Any:
        """transformers' model with the adapter of a request."""
        return self.model if case.lora is None else self.loras[case.lora][1]

    def num_virtual(self, case: Case) -> int:
        return 0 if case.virtual is None else len(self.virtual[case.virtual][1])

    @torch.inference_mode()
    def prompt_inputs(self, case: Case) -> dict[str, torch.Tensor]:
        """The prompt as transformers' model takes it: with virtual tokens, as embeddings."""
        ids = torch.tensor([case.prompt])
        if case.virtual is None:
            return {"input_ids": ids}
        given = self.model_of(case).get_input_embeddings()(ids)
        virtual = self.virtual[case.virtual][1].to(given.dtype)[None]
        return {"inputs_embeds": torch.cat((virtual, given), dim=1)}

    def text(
        self, prompt: list[int], tokens: list[int], params: SamplingParams, *, ended: bool
    ) -> tuple[str, int, str | None]:
        """See `text_reference`; `ended`: the last token is an end token."""
        pieces = [self.bytes_of(token, params) for token in tokens]
        if ended and not params.include_stop_str_in_output:
            pieces[-1] = b""
        return text_reference(
            b"".join(self.bytes_of(token, params) for token in prompt),
            pieces,
            params.stop,
            min_tokens=params.min_tokens,
            include=params.include_stop_str_in_output,
        )

    def _sample(self, case: Case, index: int) -> Expected:
        prompt, params = case.prompt, case.params
        tokens, scores, safe, ended = self._run(case, index)
        text, count, stop = self.text(prompt, tokens, params, ended=ended)
        reason: int | str | None = stop
        if stop is None and ended and tokens[-1] in params.stop_token_ids:
            reason = tokens[-1]
        finish = "stop" if ended or stop is not None else "length"
        return Expected(tokens[:count], text, finish, reason, scores[:count], safe, tokens)

    @torch.inference_mode()
    def _run(self, case: Case, index: int) -> tuple[list[int], list[torch.Tensor], int, bool]:
        """Tokens up to an end token or the length, raw log-probabilities, tokens before the first
        near tie, and whether an end token was the last one."""
        prompt, params = case.prompt, case.params
        model, inputs = self.model_of(case), self.prompt_inputs(case)
        ends = _end_tokens(params)
        begin = self.num_virtual(case) + len(prompt)
        most = min(params.max_tokens or MAX_LEN, MAX_LEN - begin)
        tokens: list[int] = []
        scores: list[torch.Tensor] = []
        safe: int | None = None
        cache = transformers.DynamicCache(config=self.model.config)
        bad_words = self._bad_words(params)
        while len(tokens) < most:
            if tokens:
                inputs = {"input_ids": torch.tensor([tokens[-1:]])}
            raw = model(**inputs, past_key_values=cache, use_cache=True).logits[0, -1]
            scores.append(raw.log_softmax(-1))
            logits = _processed(raw.clone(), prompt, tokens, params, ends)
            _forbid(logits, bad_words, tokens)
            if params.structured_outputs is not None:
                ending = logits
                if len(tokens) < params.min_tokens:
                    without = replace(params, min_tokens=0)
                    ending = _processed(raw.clone(), prompt, tokens, without, ends)
                    _forbid(ending, bad_words, tokens)
                logits = self._constrained(logits, ending, tokens, params, ends)
            if not params.greedy:
                seed = torch.tensor([signed_seed(params.seed or 0)])
                place = torch.tensor([begin + len(tokens)])
                noise = gumbel_noise(seed, place, torch.tensor([index]), VOCAB)[0]
                logits = logits / params.temperature
                kept = _supported(logits, params, 0.0)
                doubtful = (kept != _supported(logits, params, self._tie)) | (
                    kept != _supported(logits, params, -self._tie)
                )
                logits = logits + noise
                highest = logits.masked_fill(~kept, float("-inf")).max()
                if safe is None and doubtful.any() and (logits[doubtful] >= highest).any():
                    safe = len(tokens)  # a token at the threshold would be sampled, or is
                logits = logits.masked_fill(~kept, float("-inf"))
            best = logits.topk(2)
            if safe is None and best.values[0] - best.values[1] < self._tie:
                safe = len(tokens)
            tokens.append(int(best.indices[0]))
            if _ends(tokens, params):
                return tokens, scores, len(tokens) if safe is None else safe, True
        return tokens, scores, len(tokens) if safe is None else safe, False

    def _constrained(
        self,
        logits: torch.Tensor,
        ending: torch.Tensor,
        tokens: list[int],
        params: SamplingParams,
        ends: set[int],
    ) -> torch.Tensor:
        """The logits of tokens that lead to one of the choices, behind the token that they begin
        after; those of `ending`, without min_tokens, where only end tokens are left."""
        following = self._following(tokens, params.structured_outputs)
        if following is None:
            return logits
        allowed, complete = following
        early = EOS in ends and len(tokens) < params.min_tokens
        if complete and not (early and set(allowed) - ends):
            allowed.append(EOS)
        if not set(allowed) - ends:
            logits = ending
        kept = torch.full_like(logits, float("-inf"))
        kept[allowed] = logits[allowed]
        return kept

    def _following(
        self, tokens: list[int], constraint: StructuredOutputsParams | None
    ) -> tuple[list[int], bool] | None:
        """Tokens that may follow, EOS aside, and whether the output is complete; None: anything."""
        assert constraint is not None
        begin = 0
        if after := list(constraint.begins_after or ()):
            if after[0] not in tokens:
                return None
            begin = tokens.index(after[0]) + 1
        if constraint.choice is None:
            matcher = self._compiler.open(self._compiler.grammar(constraint), tokens)
            mask = np.zeros(-(-VOCAB // 32), np.int32)
            assert matcher.fill_mask(mask) and matcher.error is None
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            found = np.flatnonzero(bits).tolist()
            return [token for token in found if token != EOS], EOS in found
        so_far = b"".join(self._bytes[token] for token in tokens[begin:])
        choices = [text.encode() for text in constraint.choice]
        going_on = {
            text[len(so_far)] for text in choices if text.startswith(so_far) and text != so_far
        }
        allowed = [
            token for token in range(len(SPECIALS), VOCAB) if self._bytes[token][0] in going_on
        ]
        if EOS in tokens[begin:]:  # with ignore_eos nothing else follows
            allowed = []
        return allowed, so_far in choices

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Tokens of each bad word. A token is a byte here: of vLLM's two forms, with a space before
        the word and without, the bare one counts for a word without a space."""
        return [
            self.tokenizer.encode(
                " " + word.lstrip() if word.startswith(" ") else word, add_special_tokens=False
            )
            for word in params.bad_words or ()
        ]


def _forbid(logits: torch.Tensor, words: list[list[int]], tokens: list[int]) -> None:
    """Forbids the last token of each word whose other tokens are the end of the output."""
    for word in words:
        if [*tokens[len(tokens) - len(word) + 1 :]] == word[:-1] or len(word) == 1:
            logits[word[-1]] = float("-inf")


def _supported(logits: torch.Tensor, params: SamplingParams, shift: float) -> torch.Tensor:
    """[vocab] bool, the tokens that min-p, then top-k, then top-p leave, each by its definition.
    `shift` moves the thresholds of the first and the last."""
    kept = logits > float("-inf")
    probs = logits.double().softmax(-1)
    if params.min_p:
        kept &= probs >= params.min_p * probs.max() * (1 + shift)
    if params.top_k > 0:
        left = logits.masked_fill(~kept, float("-inf"))
        least = left.topk(params.top_k).values[-1]
        rivals = bool(((left < least) & (left >= least - abs(shift))).any())
        kept &= logits >= (least + shift if rivals else least)
    if params.top_p < 1.0:
        probs = logits.double().masked_fill(~kept, float("-inf")).softmax(-1)
        total = 0.0
        order = probs.sort(descending=True, stable=True).indices.tolist()
        for place, token in enumerate(order):
            if place and total >= params.top_p - shift:
                kept[token] = False
            total += float(probs[token])
    return kept


def _end_tokens(params: SamplingParams) -> set[int]:
    return set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})


def _ends(tokens: list[int], params: SamplingParams) -> bool:
    """Whether the last token ends a sample."""
    if tokens[-1] not in _end_tokens(params):
        return False
    complete = params.structured_outputs is not None and tokens[-1] == EOS
    return len(tokens) > params.min_tokens or (complete and EOS not in params.stop_token_ids)


def _processed(
    logits: torch.Tensor, prompt: list[int], tokens: list[int], params: SamplingParams, ends: set
) -> torch.Tensor:
    """Every processor, by its definition or as transformers has it."""
    never, seen = float("-inf"), torch.tensor([prompt + tokens])
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        logits[[token for token in range(VOCAB) if token not in allowed]] = never
    if params.no_repeat_ngram_size:
        process = transformers.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size)
        logits = process(seen, logits[None])[0]
    if len(tokens) < params.min_tokens:
        logits[list(ends)] = never
    for token, value in (params.logit_bias or {}).items():
        logits[token] += value
    if params.repetition_penalty != 1.0:
        process = transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        logits = process(seen, logits[None])[0]
    counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=VOCAB)
    logits = logits - params.frequency_penalty * counts
    return logits - params.presence_penalty * (counts > 0)


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level piece, as GPT-2 has it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


# -- what a seed makes ----------------------------------------------------------------------


def spoil(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A user's processor that changes its list and nothing else."""
    output_ids.append(EOS)
    return logits


def make_cases(rng: Random, tokenizer: Any) -> list[Case]:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def one() -> int:
        return rng.choice((*common, rng.randrange(VOCAB)))

    common = ids(SAMPLE)
    stems = [[rng.choice(common) for _ in range(40)] for _ in range(2)]
    cases = []
    for number in range(rng.randint(6, 12)):
        prompt = stems[number % 2][: rng.choice((0, 8, 17, 40))]
        prompt = prompt + [one() for _ in range(rng.randint(1, 6))]
        params = _params(rng, common, number)
        aborts = rng.randint(1, 8) if params.n == 1 and rng.random() < 0.15 else None
        arrives = rng.choice((0, 0, rng.randint(1, 12)))
        cases.append(Case(str(number), prompt, params, arrives, aborts))
    return [*cases, _beams(Random(sum(cases[0].prompt)), common, len(cases))]


def _beams(rng: Random, common: list[int], number: int) -> Case:
    """A request for beams that fits into the shortest memory."""
    while (params := _params(rng, common, number)).num_speculative_tokens is not None:
        pass
    most = rng.randint(1, 20)
    params = replace(
        params, n=2, use_beam_search=True, temperature=0.0, max_tokens=most,
        min_tokens=min(params.min_tokens, most), length_penalty=rng.choice((0.0, 1.0)),
        logits_processors=None,
    )  # fmt: skip
    prompt = [rng.choice(common) for _ in range(rng.randint(1, 6))]
    return Case(str(number), prompt, params, rng.randint(0, 6), None)


def _params(rng: Random, common: list[int], number: int) -> SamplingParams:
    def some(chance: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    def words(least: int) -> list[str]:
        return [
            "".join(rng.choice(SAMPLE + "\ufffd") for _ in range(rng.choice((1, 1, 2, 3, 9))))
            for _ in range(rng.randint(least, 3))
        ]

    ends = [rng.choice((*common, rng.randrange(3, VOCAB))) for _ in range(3)]
    most = rng.randint(1, 30)
    if rng.random() < 0.2:
        return _constrained_params(rng, common, number)
    bias = {token: rng.choice((4.0, 6.0, 7.0)) for token in common} | {EOS: rng.choice((0.0, 5.0))}
    return SamplingParams(
        n=rng.choice((1, 1, 1, 3)),
        temperature=rng.choice((0.0, 0.0, 0.8)),
        seed=number + rng.randrange(1000),
        max_tokens=some(0.95, most, None),
        min_tokens=some(0.3, rng.randint(0, most), 0),
        ignore_eos=rng.random() < 0.5,
        stop=some(0.6, words(1), None),
        stop_token_ids=some(0.2, ends, None),
        include_stop_str_in_output=rng.random() < 0.3,
        skip_special_tokens=rng.random() < 0.7,
        logprobs=some(0.3, rng.randint(0, 4), None),
        prompt_logprobs=some(0.15, rng.randint(0, 3), None),
        logit_bias=some(0.7, bias, None),
        repetition_penalty=some(0.2, rng.choice((0.8, 1.3)), 1.0),
        frequency_penalty=some(0.2, rng.choice((-0.5, 1.2)), 0.0),
        presence_penalty=some(0.2, rng.choice((-1.0, 0.7)), 0.0),
        no_repeat_ngram_size=some(0.1, rng.randint(1, 4), 0),
        allowed_token_ids=some(0.1, [*common, EOS], None),
        logits_processors=some(0.15, [spoil], None),
        num_speculative_tokens=some(0.2, rng.choice((0, 1, 3)), None),
        output_kind=rng.choice(list(RequestOutputKind)),
    )


def _constrained_params(rng: Random, common: list[int], number: int) -> SamplingParams:
    """One of some texts, at once or behind a token that is likely."""
    words = ["".join(rng.choice(SAMPLE) for _ in range(rng.randint(1, 8))) for _ in range(4)]
    after = [rng.choice(common)] if rng.random() < 0.4 else []
    most = rng.randint(1, 30)
    return SamplingParams(
        n=rng.choice((1, 1, 3)),
        temperature=rng.choice((0.0, 0.8, 2.0)),
        seed=number + rng.randrange(1000),
        max_tokens=most,
        min_tokens=rng.choice((0, 0, rng.randint(0, most))),
        ignore_eos=rng.random() < 0.2,
        stop=rng.choice((None, None, [rng.choice(SAMPLE)])),
        stop_token_ids=rng.choice((None, None, [rng.choice(common)])),
        logprobs=rng.choice((None, None, 2)),
        presence_penalty=rng.choice((0.0, 0.7)),
        logit_bias={token: 5.0 for token in after} or None,
        num_speculative_tokens=rng.choice((None, None, 3)),
        output_kind=rng.choice(list(RequestOutputKind)),
        structured_outputs=StructuredOutputsParams(choice=words, begins_after=after),
    )


def make_engine(rng: Random, folder: Path, record: Record) -> tuple[str, Engine]:
    """An engine with short memory and any drafter, and its description."""
    batch = rng.choice((3, 7))
    sizes: dict[str, Any] = {
        "max_num_batched_tokens": rng.choice((16, 50, 120)),
        "num_gpu_blocks_override": rng.choice((15, 20, 60)),
        "max_num_seqs": batch,
        "enable_prefix_caching": rng.random() < 0.7,
        "seed": rng.randrange(100),
    }
    if sizes["max_num_batched_tokens"] > MAX_LEN:
        sizes["enable_chunked_prefill"] = rng.random() < 0.6
    if rng.random() < 0.3:
        sizes |= rng.choice(({"batch_invariant": True}, {"cpu_backend": "torch"}))
    kind = rng.choice(("none", "oracle", "garbage", "siblings", "raw", "turbo", "hybrid", "merged"))
    drafter: Drafter | None = None
    if kind in _GUESSERS:
        drafter = _GUESSERS[kind](record, VOCAB, seed=rng.randrange(100))
    elif kind in _LOOKAHEAD:
        config = LookaheadConfig(
            cache_mode=_LOOKAHEAD.index(kind), voc_size=VOCAB, max_seq_len=MAX_LEN,
            eos_token_id=(EOS,), token_paths_top_k=3, num_threads=1,
        )  # fmt: skip
        drafter = HybridDrafter(config, width=MAX_LEN, capacity=1 << 14)
    return f"{kind} {sizes}", build(folder, 7, drafter, **sizes)


_GUESSERS: dict[str, Any] = {"oracle": Oracle, "garbage": Garbage, "siblings": Siblings}
_LOOKAHEAD = ("raw", "turbo", "hybrid", "merged")


# -- running and comparing ------------------------------------------------------------------


def serve(
    engine: Engine, cases: list[Case], reference: Reference, *, reset_at: int | None = None
) -> Iterator[tuple[Case, list[RequestOutput]]]:
    """All outputs of each request, of aborted ones too.

    Args:
        reset_at: the prefix cache is emptied before this step.
    """
    waiting = sorted(cases, key=lambda case: case.arrives)
    running: dict[str, tuple[Case, list[RequestOutput]]] = {}
    for now in range(2000):
        while waiting and (waiting[0].arrives <= now or not engine.has_unfinished):
            case = waiting.pop(0)
            engine.add_request(_request(engine, case, reference))
            running[case.name] = case, []
        if not engine.has_unfinished:
            break
        if now == reset_at:
            engine.reset_prefix_cache()
        for output in engine.step():
            case, seen = running[output.request_id]
            seen.append(output)
            known = sum(len(one.token_ids) for one in output.outputs)
            if case.params.output_kind is RequestOutputKind.DELTA:
                known = sum(len(one.token_ids) for each in seen for one in each.outputs)
            if not output.finished and case.aborts is not None and known >= case.aborts:
                last = engine.abort(case.name)
                assert last is not None
                seen.append(last)
    else:
        raise AssertionError("no end in sight")
    yield from running.values()


def _request(engine: Engine, case: Case, reference: Reference) -> Request:
    lora = None if case.lora is None else reference.loras[case.lora][0]
    virtual = None if case.virtual is None else reference.virtual[case.virtual][0]
    prompt = Prompt(None, case.prompt)
    if case.as_text:
        prompt = Prompt(reference.tokenizer.decode(case.prompt), None)
    request = engine.make_request(case.name, prompt, case.params, lora, virtual)
    if not case.travels:
        return request
    message = messages.decode_to_engine(
        messages.encode(messages.request_to_wire(case.name, request))
    )
    assert isinstance(message, messages.AddRequest)
    return messages.request_from_wire(message)


def check_beams(case: Case, output: RequestOutput, reference: Reference) -> None:
    """Checks that the texts of beams belong to their tokens."""
    for beam in output.outputs:
        ended = _ends(beam.token_ids, case.params)
        text, count, stop = reference.text(case.prompt, beam.token_ids, case.params, ended=ended)
        assert (beam.text, len(beam.token_ids)) == (text, count)
        assert beam.finish_reason == ("stop" if ended or stop else "length")
        if stop is not None:
            assert beam.stop_reason == stop


def check_outputs(case: Case, outputs: list[RequestOutput], expected: list[Expected]) -> str:
    """Compares what a user saw. Returns "aborted", "tie" or "equal"."""
    aborted = outputs[-1].outputs and outputs[-1].outputs[0].finish_reason == "abort"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for index, sample in enumerate(expected):
        parts = [one for output in outputs for one in output.outputs if one.index == index]
        last = _joined(case, parts)
        tie = sample.safe < len(sample.tokens) and last.token_ids != sample.tokens
        if tie and last.token_ids[: sample.safe] == sample.tokens[: sample.safe]:
            return "tie"
        if aborted:
            assert last.token_ids == sample.tokens[: len(last.token_ids)]
            continue
        assert last.token_ids == sample.tokens
        assert last.text == (sample.text if case.params.detokenize else "")
        assert (last.finish_reason, last.stop_reason) == (sample.finish_reason, sample.stop_reason)
        if case.params.logprobs is None:
            assert last.logprobs is None
            continue
        assert last.logprobs is not None
        for token, at, scores in zip(last.token_ids, last.logprobs, sample.scores, strict=True):
            assert next(iter(at)) == token
            for other, entry in at.items():
                assert abs(entry.logprob - float(scores[other])) < 1e-3
            count = VOCAB if case.params.logprobs == -1 else case.params.logprobs
            best = scores.topk(count).values.tolist() if count else []
            found = sorted((entry.logprob for entry in at.values()), reverse=True)[: len(best)]
            assert all(abs(a - b) < 1e-3 for a, b in zip(found, best, strict=True))
    return "aborted" if aborted else "equal"


def _joined(case: Case, parts: list[CompletionOutput]) -> CompletionOutput:
    """The last state of a sample; what came before has to be its beginning."""
    last = parts[-1]
    if case.params.output_kind is RequestOutputKind.DELTA:
        logprobs = [at for one in parts for at in one.logprobs or ()]
        return replace(
            last,
            text="".join(one.text for one in parts),
            token_ids=[token for one in parts for token in one.token_ids],
            logprobs=None if last.logprobs is None else logprobs,
        )
    for earlier in parts:
        assert last.text.startswith(earlier.text)
        assert last.token_ids[: len(earlier.token_ids)] == earlier.token_ids
    return last


def run_seed(seed: int, folder: Path, reference: Reference) -> Counter[str]:
    """Runs one seed; raises AssertionError with a description where something differs."""
    rng = Random(seed)
    cases = make_cases(rng, reference.tokenizer)
    expected = {case.name: reference.serve(case) for case in cases}
    record = {
        (name, index): sample.unstopped
        for name, samples in expected.items()
        for index, sample in enumerate(samples)
    }
    text, engine = make_engine(rng, folder, record)
    counts: Counter[str] = Counter()
    try:
        for case, outputs in serve(engine, cases, reference):
            try:
                if case.params.use_beam_search:
                    check_beams(case, outputs[-1], reference)
                    counts["beams"] += 1
                    continue
                counts[check_outputs(case, outputs, expected[case.name])] += 1
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {text}\n{case}\n{error}") from error
        metrics = engine.metrics()
        for name in ("num_preemptions", "spec_decode_num_accepted_tokens", "prefix_cache_hits"):
            counts[name] = int(metrics[name])
    finally:
        engine.shut_down()
    return counts


def main(first: int, last: int) -> None:
    torch.set_num_threads(1)
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        reference = Reference(model)
        for seed in range(first, last):
            try:
                total += run_seed(seed, model, reference)
            except Exception as error:
                total["failed"] += 1
                print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            if seed % 20 == 19:
                print(seed + 1, dict(total), flush=True)
    print(dict(total))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
