"""Rates of the copy methods, measured by `copy_calibration`, and the choice of a method by them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetero_llm.bridge.kv_offload.copier_library import Method

_ASSUMED_RATE = 20e9  # bytes a second, until rates are measured
_LAYER_COMPUTE_S = 0.15e-3  # of a few tokens, if not given
# Seconds of driver calls for each group. Keeps tiny loads from being cut into many groups.
_GROUP_S = 5e-6
# The copy kernel competes with the step's kernels, which measurements of an idle device do not
# show: it is chosen only if it is faster than the copy engines by this factor.
_KERNEL_HANDICAP = 1.25
_MOST_GROUPS = 10  # sizes of groups to choose from: 1, 2, 4 ... layers


@dataclass(frozen=True, slots=True)
class Rate:
    """Speed of one method with one size of groups.

    Attributes:
        layers: of a group. A piece, contiguous bytes of one block, has as many layers.
        scattered, ascending: bytes a second of large loads, with no consecutive blocks or only
            consecutive ones.
        scattered_start, ascending_start: additional seconds for each group.
    """

    method: Method
    layers: int
    scattered: float
    ascending: float
    scattered_start: float = 0.0
    ascending_start: float = 0.0

    def seconds(self, num_bytes: int, num_groups: int, share: float) -> float:
        """Seconds of a load in which a share of the blocks are consecutive to the previous one."""
        scattered = num_groups * self.scattered_start + num_bytes / self.scattered
        ascending = num_groups * self.ascending_start + num_bytes / self.ascending
        return share * ascending + (1 - share) * scattered


@dataclass(frozen=True, slots=True)
class Choice:
    """Method of a load, and layers of a group."""

    method: Method
    group: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measured rates; see `copy_calibration.calibrate`.

    Attributes:
        layer_bytes: of one layer of one block.
        rates: one or more for each method, by ascending size.
        measured: False: all rates are one assumption.
    """

    layer_bytes: int
    rates: tuple[Rate, ...]
    measured: bool = True

    def choose(
        self, num_layers: int, num_blocks: int, share: float, compute: float | None
    ) -> Choice:
        """The choice with which a step that waits for the load ends first.

        Args:
            share: of blocks that are consecutive to the previous one on both sides.
            compute: seconds of the step's computation; 0: unknown; None: longer than the load.
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
            # Not hidden: the first group before the computation, or the last layers after it.
            return max(load, compute) + min(load, compute) * group / num_layers

        groups = [1 << power for power in range(num_layers.bit_length())][:_MOST_GROUPS]
        every = [(method, group) for method in self.methods() for group in groups]
        return Choice(*min(every, key=lambda one: seconds(*one)))

    def methods(self) -> tuple[Method, ...]:
        return tuple(dict.fromkeys(rate.method for rate in self.rates))

    def best_rate(self) -> float:
        """Bytes a second of the fastest method under its best conditions."""
        return max(max(rate.scattered, rate.ascending) for rate in self.rates)

    def best(self) -> tuple[Rate, ...]:
        """The fastest method with scattered blocks, for each size of groups."""
        sizes = sorted({rate.layers for rate in self.rates})
        of_size = ([rate for rate in self.rates if rate.layers == size] for size in sizes)
        return tuple(max(rates, key=lambda rate: rate.scattered) for rates in of_size)

    def table(self) -> str:
        """Text table for the log: GB/s of each method and size, scattered / ascending blocks."""
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
        """The rate of the largest size up to `group`, else of the smallest."""
        own = [rate for rate in self.rates if rate.method == method]
        return max((r for r in own if r.layers <= group), key=lambda r: r.layers, default=own[0])


def assumed(methods: Iterable[Method], layer_bytes: int) -> Calibration:
    """Used before rates are measured: chooses the first of the methods."""
    rate = Rate(next(iter(methods)), 1, _ASSUMED_RATE, _ASSUMED_RATE)
    return Calibration(layer_bytes, (rate,), measured=False)


def _cell(rate: Rate, is_best: bool) -> str:
    return f"{rate.scattered / 1e9:.1f} / {rate.ascending / 1e9:.1f}{'*' if is_best else ' '}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 10} KiB" if num_bytes >= 1 << 10 else f"{num_bytes} B"
