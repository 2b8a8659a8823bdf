"""Turns sampled token ids into `RequestOutput`s: text, stop strings, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from functools import partial

from hetero_llm.core.outputs import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    TokenLogprobs,
    shared_ranks,
)
from hetero_llm.core.request import FinishReason, Request, Sequence
from hetero_llm.core.sampling_params import RequestOutputKind, SamplingParams
from hetero_llm.core.step import SampleLogprobs
from hetero_llm.engine.text.detokenizer import TextStream
from hetero_llm.engine.text.stop_strings import find_stop, num_undecided
from hetero_llm.engine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Text:
    """Text of one sequence so far.

    Attributes:
        num_tokens: number of decoded tokens.
        complete: nothing will be added.
        after_special: the last decoded token is a special token.
        sent_chars: characters that a DELTA stream has delivered.
    """

    stream: TextStream
    text: str = ""
    num_tokens: int = 0
    complete: bool = False
    after_special: bool = False
    sent_chars: int = 0


class OutputProcessor:
    """Keeps the text state of every running sequence.

    Args:
        tokenizer: None if the engine was started without one.
        stop_sequence: ends a sequence in the scheduler. Its arguments: the sequence, the stop
            string, and the number of tokens (prompt included) up to the end of that string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop_sequence: Callable[[Sequence, int | str | None, int], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_sequence = stop_sequence
        self._texts: dict[Sequence, _Text] = {}
        self._sent: dict[Sequence, int] = {}
        # Request id -> log-probabilities of the prompt, as far as computed.
        self._prompts: dict[str, list[TokenLogprobs | None]] = {}

    def process(self, touched: Iterable[Sequence]) -> list[RequestOutput]:
        """Returns the outputs of a step, at most one a request, in the order of scheduling."""
        ready: dict[str, Request] = {}
        for sequence in touched:
            request = sequence.request
            params = request.params
            final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
            if final_only or params.use_beam_search or params.ranks_by_logprob:
                if params.stop and not params.use_beam_search:  # which looks for them itself
                    self._decode(sequence)
                if request.num_unfinished == 0:
                    ready[request.request_id] = request
            else:
                if self._wants_text(params):
                    self._decode(sequence)
                ready[request.request_id] = request
        return [self._output(request) for request in ready.values()]

    def abort(self, request: Request) -> RequestOutput:
        """The last output of an aborted request."""
        return self._output(request)

    # -- text -------------------------------------------------------------------------------

    def _wants_text(self, params: SamplingParams) -> bool:
        return params.detokenize and self._tokenizer is not None

    def _decode(self, sequence: Sequence) -> None:
        """Decodes new tokens; ends the sequence at a stop string (see `stop_strings`)."""
        params = sequence.request.params
        assert self._tokenizer is not None
        text = self._texts.get(sequence)
        if text is None:
            first = sequence.request.num_virtual_tokens
            prompt = sequence.token_ids[first : sequence.num_prompt_tokens]
            stream = self._tokenizer.decode_stream(
                prompt, skip_special_tokens=params.skip_special_tokens
            )
            text = self._texts[sequence] = _Text(stream)
        if text.complete:
            return
        tokens = sequence.token_ids
        end = len(tokens)
        if sequence.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output:
            end -= 1  # the token that ended it is not part of the text
        for position in range(sequence.num_prompt_tokens + text.num_tokens, end):
            new = self._push(text, tokens[position], params)
            text.num_tokens += 1
            self._add(sequence, text, new, position + 1)
            if text.complete:
                return
        if sequence.finished:
            self._add(sequence, text, text.stream.flush(), len(tokens))
            text.complete = True

    def _push(self, text: _Text, token: int, params: SamplingParams) -> str:
        assert self._tokenizer is not None
        new = text.stream.push(token)
        if not (params.skip_special_tokens or params.spaces_between_special_tokens):
            # Some tokenizers put a space between neighbouring special tokens: it is left out.
            special = self._tokenizer.added_tokens.get(token)
            if special is not None and text.after_special:
                new = special
            text.after_special = special is not None
        return new

    def _add(self, sequence: Sequence, text: _Text, new: str, num_tokens: int) -> None:
        """Adds text; ends the sequence at a stop string in it.

        Args:
            num_tokens: tokens of the sequence, prompt included, up to the one that brought it.
        """
        if not new:
            return
        text.text += new
        params = sequence.request.params
        if sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            return
        if not params.stop or not sequence.may_end(num_tokens):
            return
        found = find_stop(text.text, len(new), params)
        if found is not None:
            stop, cut = found
            text.text = text.text[:cut]
            text.complete = True
            self._stop_sequence(sequence, stop, num_tokens)

    def _visible(self, sequence: Sequence, text: _Text) -> str:
        """The text that can be delivered: all but, while the sequence runs, what may be the
        beginning of a stop string."""
        params = sequence.request.params
        if sequence.finished or not params.stop or params.include_stop_str_in_output:
            return text.text
        return text.text[: len(text.text) - num_undecided(text.text, params.stop)]

    # -- outputs ----------------------------------------------------------------------------

    def _output(self, request: Request) -> RequestOutput:
        finished = request.num_unfinished == 0
        sequences = request.sequences
        if finished and request.params.ranks_by_logprob:
            ranked = sorted(sequences, key=lambda s: -s.cumulative_logprob)
            sequences = ranked[: request.params.n]
        outputs = [
            self._completion(sequence, index)
            for index, sequence in enumerate(sequences)
            if not (sequence.finished and self._sent.get(sequence) == -1)
        ]
        if finished:
            for sequence in request.sequences:
                self._texts.pop(sequence, None)
                self._sent.pop(sequence, None)
        prompt_logprobs = self._prompt_logprobs(request)
        if finished:
            self._prompts.pop(request.request_id, None)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.shown_prompt_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=finished,
            metrics=request.metrics,
            lora_request=None if request.adapter is None else request.adapter.request,
            num_cached_tokens=max(request.num_cached_tokens - request.num_virtual_tokens, 0),
            error=request.error,
        )

    def _completion(self, sequence: Sequence, index: int) -> CompletionOutput:
        params = sequence.request.params
        shown = ""
        wants_text = self._wants_text(params)
        if wants_text:
            self._decode(sequence)
            shown = self._visible(sequence, self._texts[sequence])
        token_ids = sequence.output_ids
        first = 0
        if params.output_kind is RequestOutputKind.DELTA:
            first = self._sent.get(sequence, 0)
            self._sent[sequence] = -1 if sequence.finished else len(token_ids)
            if wants_text:
                text = self._texts[sequence]
                shown, text.sent_chars = shown[text.sent_chars :], len(shown)
        logprobs = None
        if sequence.logprobs is not None:
            start = sequence.num_prompt_tokens + first
            logprobs = self._token_logprobs(
                params, sequence.token_ids, start, sequence.logprobs[first:]
            )
        counted = sequence.request.num_logprobs is not None
        return CompletionOutput(
            index=index,
            text=shown,
            token_ids=token_ids[first:],
            cumulative_logprob=sequence.cumulative_logprob if counted else None,
            logprobs=logprobs,
            finish_reason=None if sequence.finish_reason is None else sequence.finish_reason.value,
            stop_reason=sequence.stop_reason,
        )

    def _prompt_logprobs(self, request: Request) -> list[TokenLogprobs | None] | None:
        entries = request.prompt_logprobs
        if entries is None:
            return None
        shown = self._prompts.get(request.request_id, [])
        if len(shown) < len(entries) - request.num_virtual_tokens:
            tokens, params = request.shown_prompt_ids, request.params
            known = [entry for entry in entries if entry is not None]
            shown = [None, *self._token_logprobs(params, tokens, 1, known)]
            self._prompts[request.request_id] = shown
        return shown

    def _token_logprobs(
        self,
        params: SamplingParams,
        token_ids: TokenIds[int],
        start: int,
        entries: Iterable[SampleLogprobs],
    ) -> list[TokenLogprobs]:
        """Those of the tokens from position `start` on: of each the token itself first, then the
        most likely ones."""
        result = []
        for position, entry in enumerate(entries, start):
            token, shown = token_ids[position], partial(self._shown, params, token_ids, position)
            found = {token: Logprob(entry.sampled, entry.rank, shown(token))}
            ranks = shared_ranks(value for _, value in entry.top)
            for (other, value), rank in zip(entry.top, ranks, strict=True):
                if other != token:
                    found[other] = Logprob(value, rank, shown(other))
            result.append(found)
        return result

    def _shown(
        self, params: SamplingParams, token_ids: TokenIds[int], position: int, token: int
    ) -> str | None:
        """The text of a token at a position of `token_ids`."""
        if self._tokenizer is None or not params.detokenize:
            return None
        return self._tokenizer.decode_token_at(token_ids, position, token)
