"""How fast each way of copying is, and which one a load takes. `copy_calibration` measures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetero_llm.bridge.kv_offload.copier_library import Method

_ASSUMED_RATE = 20e9  # bytes a second, as long as nothing was measured
_LAYER_COMPUTE_S = 0.15e-3  # of a few rows, if nobody says more
# What a group costs besides its bytes: a few calls of the driver. It only keeps tiny loads from
# being cut into many groups for nothing.
_GROUP_S = 5e-6
# A kernel takes its turn on the processors behind the step's own, which idle measurements do not
# show: it has to be so much faster than the copy engines.
_KERNEL_HANDICAP = 1.25


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast one method is at one size of pieces.

    Attributes:
        layers: of a group; its pieces are so many layers of a block.
        scattered, ascending: bytes a second with blocks that follow each other nowhere, or
            everywhere, of large loads.
        scattered_start, ascending_start: seconds that every group takes besides.
    """

    method: Method
    layers: int
    scattered: float
    ascending: float
    scattered_start: float = 0.0
    ascending_start: float = 0.0

    def seconds(self, num_bytes: int, num_groups: int, share: float) -> float:
        """Of a load of which a share of the blocks follows the one before."""
        scattered = num_groups * self.scattered_start + num_bytes / self.scattered
        ascending = num_groups * self.ascending_start + num_bytes / self.ascending
        return share * ascending + (1 - share) * scattered


@dataclass(frozen=True, slots=True)
class Choice:
    """How a load goes: by which method, how many layers at a time."""

    method: Method
    group: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured; see `calibrate`.

    Attributes:
        layer_bytes: of one layer of one block.
        rates: for each method one entry or more, by ascending size.
        measured: False: nothing was, all rates are one assumption.
    """

    layer_bytes: int
    rates: tuple[Rate, ...]
    measured: bool = True

    def choose(
        self, num_layers: int, num_blocks: int, share: float, compute: float | None
    ) -> Choice:
        """The method and the group that let a step of `compute` seconds end the soonest.

        Args:
            share: of the blocks that follow the one before on both sides.
            compute: of the step's rows; 0: unknown; None: what follows this load takes longer.
        """
        if compute == 0:
            compute = num_layers * _LAYER_COMPUTE_S
        num_bytes = num_blocks * num_layers * self.layer_bytes

        def seconds(method: Method, group: int) -> float:
            num_groups = -(-num_layers // group)
            load = self._rate(method, group).seconds(num_bytes, num_groups, share)
            if method == Method.KERNEL:
                load *= _KERNEL_HANDICAP
            load += num_groups * _GROUP_S
            if compute is None:
                return load
            # What is not hidden: the first group before the compute, or the last layers after it.
            return max(load, compute) + min(load, compute) * group / num_layers

        groups = [group for group in _powers_of_two() if group <= num_layers]
        every = [(method, group) for method in self.methods() for group in groups]
        return Choice(*min(every, key=lambda one: seconds(*one)))

    def methods(self) -> tuple[Method, ...]:
        return tuple(dict.fromkeys(rate.method for rate in self.rates))

    def best_rate(self) -> float:
        """Bytes a second, of the fastest method at its best."""
        return max(max(rate.scattered, rate.ascending) for rate in self.rates)

    def best(self) -> tuple[Rate, ...]:
        """The fastest with scattered blocks, for each size of pieces."""
        sizes = sorted({rate.layers for rate in self.rates})
        of_size = ([rate for rate in self.rates if rate.layers == size] for size in sizes)
        return tuple(max(rates, key=lambda rate: rate.scattered) for rates in of_size)

    def table(self) -> str:
        """For people: GB/s of each method at each size, scattered / ascending blocks."""
        if not self.measured:
            return "copies to the device: not measured"
        sizes = sorted({rate.layers for rate in self.rates})
        pieces = "".join(f"{_size(layers * self.layer_bytes):>16}" for layers in sizes)
        lines = [
            "copies to the device, GB/s, scattered / ascending blocks",
            f"{'piece':<8}{pieces}",
        ]
        best = self.best()
        for method in self.methods():
            own = {rate.layers: rate for rate in self.rates if rate.method == method}
            cells = [_cell(own[size], own[size] in best) if size in own else "-" for size in sizes]
            lines.append(f"{method.name.lower():<8}" + "".join(f"{cell:>16}" for cell in cells))
        return "\n".join([*lines, "* the fastest with scattered blocks"])

    def _rate(self, method: Method, group: int) -> Rate:
        """The entry of the nearest size that is not larger, else the smallest."""
        own = [rate for rate in self.rates if rate.method == method]
        return max((r for r in own if r.layers <= group), key=lambda r: r.layers, default=own[0])


def assumed(methods: Iterable[Method], layer_bytes: int) -> Calibration:
    """What is chosen from before anything is measured: the first of the methods, whatever it is."""
    rate = Rate(next(iter(methods)), 1, _ASSUMED_RATE, _ASSUMED_RATE)
    return Calibration(layer_bytes, (rate,), measured=False)


def _powers_of_two() -> tuple[int, ...]:
    return tuple(1 << exponent for exponent in range(10))


def _cell(rate: Rate, is_best: bool) -> str:
    return f"{rate.scattered / 1e9:.1f} / {rate.ascending / 1e9:.1f}{'*' if is_best else ' '}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 10} KiB" if num_bytes >= 1 << 10 else f"{num_bytes} B"
