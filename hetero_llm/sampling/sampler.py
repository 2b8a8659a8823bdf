"""Samples the next tokens: greedy, or argmax of log-probabilities plus counter-based noise.

Slots are request slots: the state of a running sequence, 0 <= slot < max_num_seqs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import AdmittedSequence, SampleLogprobs, depends_on_history, has_penalties
from hetero_llm.sampling import processors
from hetero_llm.sampling.noise import gumbel_noise, signed_seed
from hetero_llm.sampling.token_masks import TokenMasks

SampleProcessed = Callable[[torch.Tensor, np.ndarray, np.ndarray, np.ndarray], torch.Tensor]
"""Processed logits [N, vocab] float32, request slots, positions and sample indices [N], to tokens
[N] int64."""

ReviseTokens = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Processed logits [N, vocab] float32 and sampled tokens [N] int64, to the tokens to emit."""

_NO_LOGPROBS = -1
_TIE_ROWS = 32
_TOP_P_OFF = 2.0  # above any cumulative probability, rounding included


@dataclass(slots=True)
class _History:
    """What processors that look back need; kept only for slots with such processors.

    Attributes:
        token_ids: prompt and output as observed so far, without virtual tokens.
        seen: [vocab] bool, token is in prompt or output; with penalties only.
        output_counts: [vocab] float32 occurrences in the output; with penalties only.
    """

    state: AdmittedSequence
    token_ids: list[int]
    seen: torch.Tensor | None = None
    output_counts: torch.Tensor | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return self.state.num_prompt_tokens - self.state.num_virtual_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def is_next(self, position: int) -> bool:
        """Whether the token at this position of the sequence follows those observed."""
        return position == len(self.token_ids) + self.state.num_virtual_tokens


@dataclass(slots=True)
class LogprobTensors:
    """Log-probabilities of R given tokens, on the device.

    Attributes:
        sampled: [R] float32 of the given tokens.
        rank: [R] int64 ranks of the given tokens, from 1.
        top_ids: [R, K] int64 the most likely tokens, best first; of equals the lower id first.
        top_values: [R, K] float32 theirs.
        counts: how many of the K each row wants.
    """

    sampled: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor
    counts: list[int]

    def start_download(self) -> LogprobTensors:
        """The same in host memory, valid once the stream has reached this point."""

        columns = (self.sampled, self.rank, self.top_ids, self.top_values)
        # A non-blocking copy to the host lands in page-locked memory.
        sampled, rank, ids, values = (c.to("cpu", non_blocking=True) for c in columns)
        return LogprobTensors(sampled, rank, ids, values, self.counts)

    def to_host(self) -> list[SampleLogprobs]:
        """One entry per row; waits for the device."""
        columns = (self.sampled, self.rank, self.top_ids, self.top_values)
        sampled, rank, ids, values = (column.tolist() for column in columns)
        return [
            SampleLogprobs(s, r, tuple(zip(i[:k], v[:k], strict=True)))
            for s, r, i, v, k in zip(sampled, rank, ids, values, self.counts, strict=True)
        ]


@dataclass(slots=True)
class SampleResult:
    """One step's samples, on the device.

    Attributes:
        token_ids: [N] int64.
        logprobs: of the samples listed in `logprob_rows`; None if none is.
        errors: request slot to why it could not be sampled: a user's processor raised, or its
            grammar cannot be followed.
    """

    token_ids: torch.Tensor
    logprobs: LogprobTensors | None
    logprob_rows: list[int]
    errors: dict[int, str]

    def logprob_entries(self) -> list[SampleLogprobs | None]:
        """One per sample, None where the slot wants none; waits for the device."""
        entries: list[SampleLogprobs | None] = [None] * len(self.token_ids)
        if self.logprobs is not None:
            for row, entry in zip(self.logprob_rows, self.logprobs.to_host(), strict=True):
                entries[row] = entry
        return entries


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: list[int]
) -> LogprobTensors:
    """Log-probabilities of given tokens and of the most likely ones.

    Args:
        logits: [R, vocab] float32.
        token_ids: [R] int64.
        counts: how many of the most likely tokens each row wants.
    """
    logprobs = logits.log_softmax(dim=-1)
    sampled = logprobs.gather(1, token_ids.unsqueeze(1))
    rank = (logprobs > sampled).sum(dim=-1) + 1
    ids, values = most_likely(logprobs, max(counts))
    return LogprobTensors(sampled.squeeze(1), rank, ids, values, counts)


def most_likely(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest values of each row, best first; of equal ones the lower id comes first.

    `torch.topk` takes any of the values that are equal to the last one, and orders equal values
    by chance: which ones is corrected here.

    Args:
        logprobs: [R, vocab] float32.

    Returns:
        [R, count] int64 ids; [R, count] float32 values.
    """
    vocab = logprobs.shape[-1]
    if count == 0:
        return torch.empty_like(logprobs[:, :0], dtype=torch.int64), logprobs[:, :0]
    values, ids = logprobs.topk(min(count + 1, vocab), dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, by_value)
    if count == vocab:
        return ids, values
    last = values[:, count - 1 : count]
    is_cut = values[:, count:] == last  # [R, 1]: more tokens have the last value than fit
    ids, values = ids[:, :count], values[:, :count]
    if logprobs.device.type == "cpu" and not is_cut.any():  # on a GPU asking would wait for it
        return ids, values
    place = torch.arange(count, device=logprobs.device) - (values > last).sum(-1, keepdim=True)
    tied = _lowest_ids(logprobs, last, count).gather(1, place.clamp(min=0))
    return torch.where(is_cut & (place >= 0), tied, ids), values


def _lowest_ids(logprobs: torch.Tensor, wanted: torch.Tensor, count: int) -> torch.Tensor:
    """[R, count] int64, in ascending order: the lowest ids whose value is `wanted` [R, 1], then the
    size of the vocabulary. A few rows at a time, for the sake of memory."""
    vocab = logprobs.shape[-1]
    everything = torch.arange(vocab, device=logprobs.device, dtype=torch.int32)
    found = [
        torch.where(rows == value, everything, vocab).topk(count, dim=-1, largest=False).values
        for rows, value in zip(logprobs.split(_TIE_ROWS), wanted.split(_TIE_ROWS), strict=True)
    ]
    return torch.cat(found).long()


def restricts_support(params: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p leaves tokens out."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def expand_samples(
    samples: np.ndarray, sample_indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Repeats rows that are sampled several times: the end of a prompt that forks.

    Args:
        samples: [R] samples from each row.
        sample_indices: [R] the slot's own index, used where there is one sample.

    Returns:
        [N] row of each sample; [N] its sample index, 0, 1, ... where a row has several.
    """
    source = np.repeat(np.arange(len(samples)), samples)
    within = np.arange(len(source)) - (np.cumsum(samples) - samples)[source]
    return source, np.where(samples[source] > 1, within, sample_indices[source])


# large: an array for each sampling parameter of request slots.
class Sampler:
    """Sampling state of every request slot, and the sampling itself.

    Args:
        max_num_seqs: request slots.
        vocab_size: width of the logits.
        device: of the logits.
        sample_processed: a faster way to sample from processed logits; None: plain torch.

    Attributes:
        masks: the grammars of slots.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        sample_processed: SampleProcessed | None = None,
    ) -> None:
        self.masks = TokenMasks(vocab_size)
        self._sample_processed = sample_processed or self._sample_by_sorting
        self._vocab_size = vocab_size
        self._device = device
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.full(max_num_seqs, vocab_size, np.int64)
        self._top_p = np.full(max_num_seqs, _TOP_P_OFF, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._restricts = np.zeros(max_num_seqs, bool)
        self._seed = np.zeros(max_num_seqs, np.int64)
        self._sample_index = np.zeros(max_num_seqs, np.int64)
        self._num_logprobs = np.full(max_num_seqs, _NO_LOGPROBS, np.int64)
        self._processed_logprobs = np.zeros(max_num_seqs, bool)
        self._history: dict[int, _History] = {}
        self._errors: dict[int, str] = {}  # why slots cannot be sampled any further
        self._observed: set[int] = set()  # slots with history or a grammar
        self._special: set[int] = set()  # slots with history or log-probabilities

    def admit(self, state: AdmittedSequence) -> None:
        """Sets the slot of a sequence that enters it; replaces what the slot held."""
        slot, params = state.request_slot, state.params
        self._temperature[slot] = 0.0 if params.greedy else params.temperature
        self._top_k[slot] = min(
            params.top_k if params.top_k > 0 else self._vocab_size, self._vocab_size
        )
        self._top_p[slot] = params.top_p if params.top_p < 1.0 else _TOP_P_OFF
        self._min_p[slot] = params.min_p
        self._restricts[slot] = restricts_support(params)
        self._seed[slot] = signed_seed(state.seed)
        self._sample_index[slot] = state.sample_index
        wanted = state.num_logprobs
        self._num_logprobs[slot] = _NO_LOGPROBS if wanted is None else wanted
        self._processed_logprobs[slot] = params.use_beam_search
        self._errors.pop(slot, None)
        self.masks.admit(state)
        self._history.pop(slot, None)
        if depends_on_history(params, state.end_ids, state.bad_word_ids):
            self._history[slot] = self._new_history(state)
        self._special.discard(slot)
        if slot in self._history or wanted is not None:
            self._special.add(slot)
        self._observed.discard(slot)
        if slot in self._history or state.grammar is not None:
            self._observed.add(slot)

    def observe(self, slot: int, position: int, token_id: int) -> None:
        """Appends the token at a position to the slot's history if the position is the next one.
        So a token may be observed twice: as an accepted node and as the next step's input."""
        self.masks.observe(slot, position, token_id)
        history = self._history.get(slot)
        if history is not None and history.is_next(position):
            history.token_ids.append(token_id)
            if history.seen is not None:
                assert history.output_counts is not None
                history.seen[token_id] = True
                history.output_counts[token_id] += 1

    def ends_at(self, slot: int, token_id: int) -> bool:
        """Whether verification stops after this token: it ends the sequence, and neither a user's
        processor nor a grammar sees tokens that are never emitted."""
        if self.masks.ends_at(slot, token_id):
            return True
        history = self._history.get(slot)
        if history is None or not history.state.params.logits_processors:
            return False
        return token_id in history.state.end_ids

    def is_plain(self, slots: np.ndarray) -> bool:
        """Whether these slots need masks, temperature, thresholds and noise only."""
        return not self._special or self._special.isdisjoint(slots.tolist())

    @property
    def all_plain(self) -> bool:
        """Whether all slots need masks, temperature, thresholds and noise only."""
        return not self._special

    @property
    def has_history(self) -> bool:
        """Whether any slot has a grammar or processors that look back."""
        return bool(self._observed)

    @property
    def has_processors(self) -> bool:
        """Whether any slot has processors that look back, grammars aside."""
        return bool(self._history)

    def is_random(self, slots: np.ndarray) -> np.ndarray:
        """[R] bool, whether each slot samples by chance: all but greedy ones."""
        random: np.ndarray = self._temperature[slots] > 0.0
        return random

    def probabilities(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """[R, vocab] float32 distributions that slots which are not greedy sample from.

        Args:
            logits: [R, vocab] float32, processed.
        """
        return self._scaled(logits, slots).softmax(dim=-1)

    def sample(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        samples: np.ndarray,
        revise: ReviseTokens | None = None,
        *,
        masked_later: bool = False,
    ) -> SampleResult:
        """Samples `samples[r]` tokens from row r.

        Args:
            logits: [R, vocab], any float dtype.
            slots: [R] request slot of each row.
            positions: [R] absolute position of the token to be sampled.
            samples: [R] samples from the row; of more than one the sample indices are 0, 1, ...
            revise: may replace the sampled tokens.
            masked_later: `sample_processed` applies the masks of slots without other processors
                (`is_masked_later`).
        """
        logits = logits.float()
        raw = logits
        errors: dict[int, str] = {}
        if self._observed:
            logits = self._process(raw, slots, errors, masked_later=masked_later)
        indices = self._sample_index[slots]
        if samples.max() > 1:
            source, indices = expand_samples(samples, indices)
            slots, positions = slots[source], positions[source]
            gather = torch.from_numpy(source).to(self._device)
            untouched = raw is logits
            logits = logits[gather]
            raw = logits if untouched else raw[gather]
        tokens = self._sample_processed(logits, slots, positions, indices)
        if revise is not None:
            tokens = revise(logits, tokens)
        wanted = np.flatnonzero(self._num_logprobs[slots] != _NO_LOGPROBS)
        logprobs = None
        if len(wanted):
            rows = torch.from_numpy(wanted).to(self._device)
            base = raw[rows]
            processed = self._processed_logprobs[slots[wanted]]
            if logits is not raw and processed.any():
                choose = torch.from_numpy(processed).to(self._device).unsqueeze(1)
                base = torch.where(choose, logits[rows], base)
            counts = self._num_logprobs[slots[wanted]].tolist()
            logprobs = token_logprobs(base, tokens[rows], counts)
        return SampleResult(tokens, logprobs, wanted.tolist(), errors)

    def _sample_by_sorting(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, indices: np.ndarray
    ) -> torch.Tensor:
        random = np.flatnonzero(self._temperature[slots] > 0.0)
        if len(random) == 0:
            return logits.argmax(dim=-1)
        rows = torch.from_numpy(random).to(self._device)
        chosen = slots[random]
        scaled = self._scaled(logits[rows], chosen)
        noise = gumbel_noise(
            self._put(self._seed[chosen]),
            self._put(positions[random].astype(np.int64)),
            self._put(indices[random]),
            self._vocab_size,
        )
        sampled = (scaled + noise).argmax(dim=-1)
        if len(random) == len(slots):
            return sampled
        return logits.argmax(dim=-1).index_copy_(0, rows, sampled)

    def _scaled(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """Logits [R, vocab] with temperature and thresholds applied; no slot is greedy."""
        scaled = logits / self._put(self._temperature[slots]).unsqueeze(1)
        if not self._restricts[slots].any():
            return scaled
        return processors.restrict_support(
            scaled,
            self._put(self._top_k[slots]),
            self._put(self._top_p[slots]),
            self._put(self._min_p[slots]),
        )

    def _put(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def is_masked_later(self, slot: int) -> bool:
        """Whether a slot follows a grammar and has no other processor, so that its mask may come as
        late as sampling itself. Beams are continued by their processed log-probabilities."""
        return (
            slot in self.masks and slot not in self._history and not self._processed_logprobs[slot]
        )

    def _process(
        self,
        raw: torch.Tensor,
        slots: np.ndarray,
        errors: dict[int, str],
        *,
        masked_later: bool,
    ) -> torch.Tensor:
        """Applies masks and processors to every row with some, on a copy of the logits.

        Args:
            errors: written, see `SampleResult`.
            masked_later: see `sample`.
        """
        logits = raw.clone()
        for row, slot in enumerate(slots.tolist()):
            if slot not in self._observed:
                continue
            if masked_later and self.is_masked_later(slot):
                continue
            if slot not in self._errors:
                try:
                    logits[row] = self._process_row(logits[row], slot)
                except processors.ProcessorError as error:
                    self._errors[slot] = str(error)
                    logits[row] = raw[row]
            if slot in self._errors:
                errors[slot] = self._errors[slot]
        return logits

    def _process_row(self, logits: torch.Tensor, slot: int) -> torch.Tensor:
        """Mask and processors of one row; returns new logits [vocab].

        Raises:
            ProcessorError: no token can follow, or a user's processor failed.
        """
        if slot not in self.masks:
            return _process_row(logits, self._history[slot], guided=False)
        mask, error = self.masks.mask(slot)
        if error is not None:
            raise processors.GrammarError(error)
        if mask is not None:
            processors.keep_allowed(logits, mask)
        history = self._history.get(slot)
        if history is not None:
            logits = _process_row(logits, history, guided=mask is not None)
        if mask is not None and not _any_allowed(logits):
            raise processors.GrammarError(
                "no token can follow: other parameters forbid what the grammar allows"
            )
        return logits

    def _new_history(self, state: AdmittedSequence) -> _History:
        history = _History(state, list(state.token_ids[state.num_virtual_tokens :]))
        if has_penalties(state.params):
            everything = torch.tensor(history.token_ids, device=self._device)
            history.seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            history.seen[everything] = True
            outputs = everything[history.num_prompt_tokens :]
            history.output_counts = torch.bincount(outputs, minlength=self._vocab_size).float()
        return history


def _process_row(logits: torch.Tensor, history: _History, *, guided: bool) -> torch.Tensor:
    """All processors of one row, in vLLM's order; returns new logits [vocab].

    Args:
        guided: a mask has been applied.

    Raises:
        UserProcessorError: a user's processor failed.
    """
    state, params = history.state, history.state.params
    output_ids = history.output_ids
    if params.logits_processors:
        prompt_ids = history.token_ids[: history.num_prompt_tokens]
        logits = processors.apply_user_processors(
            logits.clone(), params.logits_processors, prompt_ids, output_ids
        )
    if params.allowed_token_ids is not None:
        processors.keep_only(logits, params.allowed_token_ids)
    if state.bad_word_ids:
        processors.forbid_bad_words(logits, state.bad_word_ids, output_ids)
    if params.no_repeat_ngram_size:
        size = params.no_repeat_ngram_size
        processors.forbid_repeated_ngrams(logits, size, history.token_ids)
    if len(output_ids) < params.min_tokens:
        ends = logits[list(state.end_ids)]
        processors.forbid_tokens(logits, state.end_ids)
        if guided and not _any_allowed(logits):  # the output is complete
            logits[list(state.end_ids)] = ends
    if params.logit_bias:
        processors.add_bias(logits, dict(params.logit_bias))
    if history.seen is not None:
        assert history.output_counts is not None
        processors.apply_penalties(logits, params, history.seen, history.output_counts)
    return logits


def _any_allowed(logits: torch.Tensor) -> bool:
    return bool((logits > processors.NEVER).any())
