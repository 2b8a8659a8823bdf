"""Turns sampled token ids into `RequestOutput`s: text, stop strings, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hetero_llm.core.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from hetero_llm.core.request import FinishReason, Request, Sequence
from hetero_llm.core.sampling_params import RequestOutputKind, SamplingParams
from hetero_llm.core.step import SampleLogprobs
from hetero_llm.engine.tokenizer import Stream, Tokenizer


@dataclass(slots=True)
class _Text:
    """Text of one sequence so far.

    Attributes:
        num_tokens: number of decoded tokens.
        pending: the last of them, which gave no text yet: an unfinished character.
        after_special: the last decoded token is a special token.
        sent_chars: characters that a DELTA stream has delivered.
    """

    stream: Stream
    text: str = ""
    num_tokens: int = 0
    pending: list[int] = field(default_factory=list)
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
                if params.stop and not (params.use_beam_search and sequence.finished):
                    self._decode(sequence)
                if request.num_unfinished == 0:
                    ready[request.request_id] = request
            else:
                if params.detokenize:
                    self._decode(sequence)
                ready[request.request_id] = request
        return [self._output(request) for request in ready.values()]

    def abort(self, request: Request) -> RequestOutput:
        """The last output of an aborted request."""
        return self._output(request)

    # -- text -------------------------------------------------------------------------------

    def _decode(self, sequence: Sequence) -> None:
        """Decodes new tokens; ends the sequence at a stop string."""
        params = sequence.request.params
        assert self._tokenizer is not None
        text = self._texts.get(sequence)
        if text is None:
            prompt = sequence.token_ids[: sequence.num_prompt_tokens].tolist()
            stream = self._tokenizer.decode_stream(
                prompt, skip_special_tokens=params.skip_special_tokens
            )
            text = self._texts[sequence] = _Text(stream)
        tokens = sequence.token_ids
        end = len(tokens)
        if sequence.finish_reason is FinishReason.STOP and not (
            params.include_stop_str_in_output or isinstance(sequence.stop_reason, str)
        ):
            end -= 1  # the token that ended it is not part of the text
        for position in range(sequence.num_prompt_tokens + text.num_tokens, end):
            new = self._push(text, tokens[position], params)
            text.num_tokens += 1
            generated = position + 1 - sequence.num_prompt_tokens
            if new and params.stop and generated > params.min_tokens:
                found = find_stop(text.text, len(new), params)
                if found is not None:
                    stop, cut = found
                    text.text = text.text[:cut]
                    self._stop_sequence(sequence, stop, position + 1)
                    return
        if sequence.finished and text.pending:
            text.text += self._tokenizer.decode(
                text.pending, skip_special_tokens=params.skip_special_tokens
            )
            text.pending.clear()

    def _push(self, text: _Text, token: int, params: SamplingParams) -> str:
        assert self._tokenizer is not None
        new = text.stream.push(token)
        if not (params.skip_special_tokens or params.spaces_between_special_tokens):
            # Some tokenizers put a space between neighbouring special tokens: it is left out.
            special = self._tokenizer.added_tokens.get(token)
            if special is not None and text.after_special:
                new = special
            text.after_special = special is not None
        if new:
            text.text += new
            text.pending.clear()
        else:
            text.pending.append(token)
        return new

    def _visible(self, sequence: Sequence, text: _Text) -> str:
        """The text that can be delivered: all but, while the sequence runs, the longest possible
        beginning of a stop string."""
        stop = sequence.request.params.stop
        if sequence.finished or not stop or sequence.request.params.include_stop_str_in_output:
            return text.text
        held = max(map(len, stop)) - 1
        return text.text[: len(text.text) - held] if held else text.text

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
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=finished,
            metrics=request.metrics,
            num_cached_tokens=max(request.num_cached_tokens, 0),
            error=request.error,
        )

    def _completion(self, sequence: Sequence, index: int) -> CompletionOutput:
        params = sequence.request.params
        shown = ""
        if params.detokenize:
            self._decode(sequence)
            shown = self._visible(sequence, self._texts[sequence])
        token_ids = sequence.output_ids
        first = 0
        if params.output_kind is RequestOutputKind.DELTA:
            first = self._sent.get(sequence, 0)
            self._sent[sequence] = -1 if sequence.finished else len(token_ids)
            if params.detokenize:
                text = self._texts[sequence]
                shown, text.sent_chars = shown[text.sent_chars :], len(shown)
        logprobs = None
        if sequence.logprobs is not None:
            logprobs = [
                self._token_logprobs(token, entry)
                for token, entry in zip(token_ids[first:], sequence.logprobs[first:], strict=True)
            ]
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
        if request.prompt_logprobs is None:
            return None
        shown = self._prompts.get(request.request_id, [])
        if len(shown) < len(request.prompt_logprobs):
            entries = zip(request.prompt_token_ids, request.prompt_logprobs, strict=False)
            shown = self._prompts[request.request_id] = [
                None if entry is None else self._token_logprobs(token, entry)
                for token, entry in entries
            ]
        return shown

    def _token_logprobs(self, token: int, entry: SampleLogprobs) -> TokenLogprobs:
        """The token itself first, then the most likely ones."""
        result = {token: Logprob(entry.sampled, entry.rank, self._shown(token))}
        for rank, (other, value) in enumerate(entry.top, start=1):
            if other != token:
                result[other] = Logprob(value, rank, self._shown(other))
        return result

    def _shown(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode_token(token)


def find_stop(text: str, num_new: int, params: SamplingParams) -> tuple[str, int] | None:
    """Finds the stop string that ends first within the last `num_new` characters. Returns it and
    the length to which the text is cut."""
    best: tuple[int, str, int] | None = None
    for stop in params.stop or ():
        at = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
        if at >= 0 and (best is None or at + len(stop) < best[0]):
            cut = at + len(stop) if params.include_stop_str_in_output else at
            best = (at + len(stop), stop, cut)
    return None if best is None else (best[1], best[2])


def holds_stop(tokenizer: Tokenizer, request: Request, output_ids: list[int]) -> bool:
    """Whether the last of `output_ids` completes one of the request's stop strings."""
    skip = request.params.skip_special_tokens
    before = tokenizer.decode(output_ids[:-1], skip_special_tokens=skip)
    text = tokenizer.decode(output_ids, skip_special_tokens=skip)
    return find_stop(text, max(len(text) - len(before), 0), request.params) is not None
