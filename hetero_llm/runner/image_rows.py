"""Embeddings and positions of the tokens that belong to prompts with images, or begin with virtual
tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from hetero_llm.core.images import PromptImage, PromptImages
from hetero_llm.core.step import AdmittedSequence, SchedulerOutput
from hetero_llm.models.image_tokens import mrope_table
from hetero_llm.models.multimodal import StepImages


class Encoder(Protocol):
    """Makes the embeddings of an image."""

    def encode(self, image: PromptImage) -> torch.Tensor:
        """[count, hidden] on the model's device."""
        ...


@dataclass(slots=True)
class _Sequence:
    """A sequence with images.

    Attributes:
        encoded: by the image's number, [count, hidden] embeddings of all its tokens, first to last.
        table: see `mrope_table`; None with plain positions.
        shift: see `mrope_table`.
    """

    images: PromptImages
    encoded: dict[int, torch.Tensor] = field(default_factory=dict)
    table: np.ndarray | None = None
    shift: int = 0


class SlotImages:
    """The images of all request slots.

    Args:
        encoder: the model, or what stands for one where the embeddings are known.
        mrope: the model's positions follow the grids of images.

    An image is encoded when a step computes the first of its tokens, and its embeddings stay on the
    device until one has computed the last. Tokens found in the prefix cache need none, and after a
    preemption the image is encoded again. So no more embeddings are held than unfinished prompts
    have image tokens.
    """

    def __init__(self, encoder: Encoder, device: torch.device, *, mrope: bool) -> None:
        self._encoder = encoder
        self._mrope = mrope
        self._device = device
        self._sequences: dict[int, _Sequence] = {}

    def admit(self, state: AdmittedSequence) -> None:
        """Replaces what a request slot held by a sequence with or without images."""
        self._sequences.pop(state.request_slot, None)
        if state.images is None:
            return
        sequence = self._sequences[state.request_slot] = _Sequence(state.images)
        if self._mrope:
            sequence.table, sequence.shift = mrope_table(
                state.num_prompt_tokens, state.images.items
            )

    def rows(self, step: SchedulerOutput, positions: np.ndarray) -> StepImages | None:
        """Embeddings and positions for a step's tokens; None if they are all plain text.

        Args:
            positions: [T] int, each token's position in its sequence, draft nodes included.
        """
        rows: list[np.ndarray] = []
        parts: list[torch.Tensor] = []
        table: np.ndarray | None = None
        begin = 0
        for slot, start, count in zip(
            step.request_slots.tolist(),
            step.num_computed_tokens.tolist(),
            step.num_scheduled_tokens.tolist(),
            strict=True,
        ):
            sequence = self._sequences.get(slot)
            if sequence is not None:
                for first, part in self._parts(sequence, start, start + count):
                    rows.append(np.arange(begin + first - start, begin + first - start + len(part)))
                    parts.append(part)
                if sequence.table is not None:
                    if table is None:
                        table = np.tile(positions.astype(np.int64), (3, 1))
                    own = slice(begin, begin + count)
                    table[:, own] = _three_positions(sequence, positions[own])
            begin += count
        if not parts and table is None:
            return None
        embeddings = None
        if parts:
            embeddings = self._to_device(np.concatenate(rows)), torch.cat(parts)
        return StepImages(embeddings, None if table is None else self._to_device(table))

    def _parts(self, sequence: _Sequence, start: int, end: int) -> list[tuple[int, torch.Tensor]]:
        """Embeddings of the image tokens in `start .. end - 1` of a sequence: for each image the
        index of the first one and [n, hidden]."""
        found = []
        for number, image in enumerate(sequence.images.items):
            first, last = max(image.start, start), min(image.end, end)
            if first >= last:
                continue
            encoded = sequence.encoded.pop(number, None)
            if encoded is None:
                encoded = self._encoder.encode(image)
            if last < image.end:
                sequence.encoded[number] = encoded
            found.append((first, encoded[first - image.start : last - image.start]))
        return found

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _three_positions(sequence: _Sequence, positions: np.ndarray) -> np.ndarray:
    """[3, n] rotary positions of tokens at these positions of their sequence."""
    assert sequence.table is not None
    length = sequence.table.shape[1]
    prompt = sequence.table[:, np.minimum(positions, length - 1)]
    return np.where(positions < length, prompt, positions + sequence.shift)
