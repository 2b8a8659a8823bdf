"""Prompts that arrive in pieces, put together by the worker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero_llm.bridge.records import OPENING, Kind, OpenRequest, Records, Refusal


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A request that cannot be drafted for."""

    slot: int
    generation: int
    refusal: Refusal


@dataclass(slots=True, eq=False)
class _Arriving:
    request: OpenRequest
    tokens: int = 0  # of the prompt, so far


class Prompts:
    """Every slot's prompt until it is whole.

    Attributes:
        num_dropped: PROMPT records of requests that nobody waits for any more.
    """

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: longer prompts are refused."""
        self.num_dropped = 0
        self._max_tokens = max_tokens
        self._arriving: dict[int, _Arriving] = {}

    def __len__(self) -> int:
        """Prompts that are not whole."""
        return len(self._arriving)

    def take(self, records: Records) -> list[OpenRequest | RefusedRequest]:
        """Requests whose prompt became whole and those refused, in order.

        Args:
            records: OPEN, PROMPT and CLOSE records, in any mixture. What came of a request before
                its CLOSE is forgotten; whole ones are the caller's to close.
        """
        done: list[OpenRequest | RefusedRequest] = []
        end = 0
        for header in records.headers:
            start, end = end, end + int(header["words"])
            body = records.words[start:end]
            found: OpenRequest | RefusedRequest | None = None
            slot, generation = int(header["slot"]), int(header["generation"])
            if header["kind"] == Kind.OPEN:
                found = self._open(slot, generation, header, body)
            elif header["kind"] == Kind.PROMPT:
                found = self._add(slot, generation, int(header["base_length"]), body)
            else:
                assert header["kind"] == Kind.CLOSE, header
                if self._awaits(slot, generation):
                    del self._arriving[slot]
            if found is not None:
                done.append(found)
        return done

    def _awaits(self, slot: int, generation: int) -> bool:
        arriving = self._arriving.get(slot)
        return arriving is not None and arriving.request.generation == generation

    def _open(
        self, slot: int, generation: int, header: np.void, body: np.ndarray
    ) -> RefusedRequest | None:
        length = int(header["base_length"])
        self._arriving.pop(slot, None)
        if length > self._max_tokens:
            return RefusedRequest(slot, generation, Refusal.TOO_LONG)
        told = body.view(OPENING)[0]
        request = OpenRequest(
            slot,
            generation,
            np.empty(length, np.int32),
            seed=int(told["seed"]),
            sample_index=int(told["sample_index"]),
            temperature=float(told["temperature"]),
            depth=int(header["depth"]),
        )
        self._arriving[slot] = _Arriving(request)
        return None

    def _add(
        self, slot: int, generation: int, before: int, body: np.ndarray
    ) -> OpenRequest | RefusedRequest | None:
        if not self._awaits(slot, generation):
            # Its OPEN was lost, which its first piece tells; or it was closed or refused.
            if before == 0:
                return RefusedRequest(slot, generation, Refusal.LOST_RECORD)
            self.num_dropped += 1
            return None
        arriving = self._arriving[slot]
        prompt, end = arriving.request.prompt, before + len(body)
        if before != arriving.tokens or end > len(prompt):
            del self._arriving[slot]
            return RefusedRequest(slot, generation, Refusal.LOST_RECORD)
        prompt[before:end] = body
        arriving.tokens = end
        if end < len(prompt):
            return None
        del self._arriving[slot]
        return arriving.request
