"""Copies that overlap with compute: exposed copy time, and how much copies slow the compute.

A unit is the forward of one layer on one subsequence: the products with the layer's weights, and
attention over the whole prefix. While a unit runs, the bytes that the layer would save are copied
to the next tier, through the same lane as in training. Backward copies the same bytes back and
takes about twice as long, so copies are harder to hide in forward.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sppo.activations.tensor_classes import class_bytes_per_token
from sppo.bench.operands import DTYPES, Operands
from sppo.bench.timing import Watcher
from sppo.config.model import ModelConfig
from sppo.config.presets import PRESETS
from sppo.cost.parameters import layer_shapes
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.interface import attention_forward
from sppo.kernels.linear import linear
from sppo.offload.cpu_lane import CpuLane
from sppo.offload.cuda_lane import CudaLane
from sppo.offload.disk.file_tier import whole_sectors
from sppo.offload.lane import Lane
from sppo.offload.worker_pool import Event
from sppo.units import GIB, format_duration

_cuda: Any = torch.cuda  # parts of torch.cuda have no types

_TOKENS = {"cpu": (256, 1024, 4096), "cuda": (1024, 4096, 16384)}
_CONTEXTS = {"cpu": (0, 4096, 16384), "cuda": (0, 32768, 131072)}
_QUICK_TOKENS = {"cpu": (128, 256), "cuda": (2048, 4096)}
_QUICK_CONTEXTS = {"cpu": (0, 512), "cuda": (0, 16384)}
_ROUNDS, _QUICK_ROUNDS = 3, 1
_WINDOW_S, _QUICK_WINDOW_S = 0.3, 0.03
_LONGEST_S = 1.0
"""Most seconds of a unit; longer units are left out."""
_FEWEST_UNITS, _MOST_UNITS = 3, 64
_SLOTS = 2
_MOST_FILE_BYTES = GIB


LeftOut = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class OverlapPoint:
    """Times of one unit's compute alone, its copy alone, and both; medians, seconds per unit.

    Attributes:
        tokens: Tokens of the subsequence.
        context: Tokens before the subsequence.
        moved_bytes: Bytes that one layer saves for the subsequence, all of which are copied.
        products_s: Products with weights, without copies.
        attention_s: Attention, without copies.
        copy_s: Copies, without compute.
        products_copying_s: Products while copies run.
        attention_copying_s: Attention while copies run.
        exposed_s: Time that compute waits for copies.
        spread: Difference between the fastest and the slowest round of the unit with copies,
            relative to the median.
    """

    tokens: int
    context: int
    moved_bytes: int
    products_s: float
    attention_s: float
    copy_s: float
    products_copying_s: float
    attention_copying_s: float
    exposed_s: float
    spread: float = 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of the unit without copies."""
        return self.products_s + self.attention_s

    @property
    def compute_copying_s(self) -> float:
        """Seconds of the unit while copies run, without the time that compute waits."""
        return self.products_copying_s + self.attention_copying_s

    @property
    def slowdown(self) -> float:
        """Fraction by which copies slow the compute that hides them; noise may make it negative."""
        return self.compute_copying_s / self.compute_s - 1


@dataclass(frozen=True, slots=True)
class OverlapMeasurements:
    """Results of one run of the overlap benchmark.

    Attributes:
        model: Name of the model of the layer.
        dtype: Type of weights and activations.
        where: Target of the copies, for users.
        points: Timings by subsequence length and context.
        added_s_per_byte: Compute time that every copied byte costs: the median over the points.
        left_out: (tokens, context, time or memory needed) of units that were not measured.
    """

    model: str
    dtype: str
    where: str
    points: tuple[OverlapPoint, ...]
    added_s_per_byte: float
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """Layer whose forward the copies overlap with.

    Attributes:
        name: Name of the model, for reports.
        model: Model of which one layer is computed.
        dtype: "bf16" or "fp32".
    """

    name: str
    model: ModelConfig
    dtype: str


_DEFAULT_CPU = ModelConfig(
    vocab_size=4096,
    hidden_size=512,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    mlp_size=1792,
)
_DEFAULT_CUDA = "llama-3.2-1b"


def default_layer(device: str) -> MeasuredLayer:
    """Return the layer that is measured if no run file is given; a small one on a CPU."""
    if device == "cuda":
        return MeasuredLayer(_DEFAULT_CUDA, ModelConfig(**PRESETS[_DEFAULT_CUDA]), "bf16")
    return MeasuredLayer("a Llama shape of width 512", _DEFAULT_CPU, "bf16")


def measure_overlap(
    operands: Operands,
    layer: MeasuredLayer,
    *,
    directory: Path | None,
    quick: bool,
    watcher: Watcher,
) -> OverlapMeasurements:
    """Measure copies that overlap with the forward of ``layer``.

    Args:
        operands: Operands on the device to measure.
        layer: Layer to compute, which determines the bytes to copy.
        directory: Directory on the disk that a CPU copies to; a GPU copies to host memory.
        quick: Measure short subsequences in one round.
        watcher: Receiver of the progress, notified of every round.

    Raises:
        OSError: A disk that lacks the space, or failed.
    """
    device = operands.device
    assert device == "cuda" or directory is not None, "a CPU's next tier is a disk"
    shapes, left_out = _shapes(operands, layer, quick=quick)
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    watcher.begin("overlap", total=len(shapes) * rounds)
    points: list[OverlapPoint] = []
    for tokens, context in shapes:
        unit = _ForwardWork(operands, layer, tokens=tokens, context=context)
        size = tokens * saved_bytes_per_token(layer)
        try:
            with closing(_lane(device)) as lane:
                disk = directory if device == "cpu" else None
                mover = _Copier(lane, disk, size_bytes=size, device=unit.device)
                point = _measure(unit, mover, rounds=rounds, quick=quick, advance=watcher.advance)
        except torch.OutOfMemoryError:
            if not points:
                raise
            left_out.append((tokens, context, "more memory than the device has"))
        else:
            points.append(point)
    return OverlapMeasurements(
        layer.name,
        layer.dtype,
        f"to a disk, in {directory}" if device == "cpu" else "to page-locked host memory",
        tuple(points),
        added_s_per_byte=added_s_per_byte(points),
        left_out=tuple(left_out),
    )


def _lane(device: str) -> Lane:
    return CudaLane(torch.device(device)) if device == "cuda" else CpuLane()


def saved_bytes_per_token(layer: MeasuredLayer) -> int:
    """Return the bytes that one layer saves per token: input, attention and linear classes."""
    element_bytes = DTYPES[layer.dtype].itemsize
    return int(class_bytes_per_token(layer.model, element_bytes=element_bytes).sum())


def added_s_per_byte(points: Sequence[OverlapPoint]) -> float:
    """Return the seconds of compute that a copied byte costs: the median over the points.

    The result is at least 0, which noise may otherwise make negative, and at most the copy time per
    byte, as if compute stood still during copies: any more has other causes.
    """
    added = statistics.median((p.compute_copying_s - p.compute_s) / p.moved_bytes for p in points)
    return min(max(0.0, added), statistics.median(p.copy_s / p.moved_bytes for p in points))


def _shapes(
    operands: Operands, layer: MeasuredLayer, *, quick: bool
) -> tuple[list[tuple[int, int]], list[LeftOut]]:
    """Return the (tokens, context) to measure, and those that would take this device too long."""
    shapes: list[tuple[int, int]] = []
    left_out: list[LeftOut] = []
    device = operands.device
    all_tokens = (_QUICK_TOKENS if quick else _TOKENS)[device]
    contexts = (_QUICK_CONTEXTS if quick else _CONTEXTS)[device]
    probe = _ForwardWork(operands, layer, tokens=all_tokens[0], context=contexts[-1])
    probe.time(1)
    products_s, attention_s = probe.time(1)
    for tokens in all_tokens:
        for context in contexts:
            attended = (context + tokens / 2) / (contexts[-1] + all_tokens[0] / 2)
            expected_s = (products_s + attention_s * attended) * tokens / all_tokens[0]
            if expected_s <= _LONGEST_S or tokens == all_tokens[0]:
                shapes.append((tokens, context))
            else:
                left_out.append((tokens, context, f"{format_duration(expected_s)} a unit"))
    return shapes, left_out


class _ForwardWork:
    """Forward of one layer on one subsequence; products and attention are timed separately."""

    def __init__(
        self, operands: Operands, layer: MeasuredLayer, *, tokens: int, context: int
    ) -> None:
        operands.begin()
        model, dtype = layer.model, DTYPES[layer.dtype]
        self.tokens, self.context, self._kind = tokens, context, operands.device
        matrices = [shape for shape in layer_shapes(model).values() if len(shape) == 2]
        self._weights = [operands.take(*shape, dtype=dtype) for shape in matrices]
        widths = {weight.shape[1] for weight in self._weights}
        self._inputs = {width: operands.take(tokens, width, dtype=dtype) for width in widths}
        self._q = operands.take(tokens, model.num_heads, model.head_dim, dtype=dtype)
        self._k, self._v = (
            operands.take(context + tokens, model.kv_heads, model.head_dim, dtype=dtype)
            for _ in range(2)
        )

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return self._q.device

    @torch.no_grad()
    def time(
        self,
        units: int,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> tuple[float, float]:
        """Return the seconds of (products, attention) per unit, without ``before`` and ``after``.

        Args:
            units: Number of times that the unit is computed.
            before: Function to call before each unit.
            after: Function to call after each unit.
        """
        marks = []
        for _ in range(units):
            before()
            marks.append([self._mark()])
            for weight in self._weights:
                linear(self._inputs[weight.shape[1]], weight)
            marks[-1].append(self._mark())
            attention_forward(AttentionCall(self._q, self._k, self._v))
            marks[-1].append(self._mark())
            after()
        if self._kind == "cuda":
            _cuda.synchronize(self.device)
        products_s = sum(_seconds_between(begin, middle) for begin, middle, _ in marks)
        attention_s = sum(_seconds_between(middle, end) for _, middle, end in marks)
        return products_s / units, attention_s / units

    def _mark(self) -> Any:
        """Return the current time on a CPU, or an event recorded in the current stream."""
        if self._kind == "cpu":
            return time.perf_counter()
        event = _cuda.Event(enable_timing=True)
        event.record(_cuda.current_stream(self.device))
        return event


def _seconds_between(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)


class _Copier:
    """Copies of the bytes of successive units through two host slots, on a CPU on to a disk."""

    def __init__(
        self,
        lane: Lane,
        directory: Path | None,
        *,
        size_bytes: int,
        device: torch.device,
    ) -> None:
        self._lane, self._size_bytes = lane, size_bytes
        slot_bytes = whole_sectors(size_bytes)
        self._slots = lane.host_memory("blocks", _SLOTS * slot_bytes).view(_SLOTS, slot_bytes)
        noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device=device)
        repeats = math.ceil(size_bytes / len(noise))
        self._sources = [noise.repeat(repeats)[:size_bytes] for _ in range(2)]
        self._places: list[int] = []
        if directory is not None:
            count = max(_SLOTS, min(8, _MOST_FILE_BYTES // slot_bytes))
            self._places = [index * slot_bytes for index in range(count)]
            lane.open_file(directory, count * slot_bytes)
        self._turn = 0
        self._copied: Event | None = None
        self._written: list[Event | None] = [None] * _SLOTS

    @property
    def size_bytes(self) -> int:
        """Bytes of one copy."""
        return self._size_bytes

    @property
    def num_places(self) -> int:
        """Number of copies that write all of the file once; 1 without a file."""
        return max(1, len(self._places))

    def begin(self) -> None:
        """Start the copy of one unit's bytes."""
        slot = self._turn % _SLOTS
        source, written = self._sources[slot], self._written[slot]
        after = [self._lane.computed([source]), *([] if written is None else [written])]
        memory = self._slots[slot]
        self._copied = self._lane.out([(memory[: self._size_bytes], source)], after=after)
        if self._places:
            place = self._places[self._turn % len(self._places)]
            self._written[slot] = self._lane.write(place, memory, after=[self._copied])
        self._turn += 1

    def end(self) -> None:
        """Make compute wait until the last copy out is done, as if it overwrote the source."""
        assert self._copied is not None, "begin() comes first"
        self._lane.before_compute(self._copied)

    def drain(self) -> float:
        """Wait for all copies; return the seconds that compute waited since the last call."""
        last = self._written[(self._turn - 1) % _SLOTS]
        if last is not None:
            self._lane.before_compute(last)
        self._lane.check()
        return self._lane.take_times().exposed_s


def _measure(
    unit: _ForwardWork, mover: _Copier, *, rounds: int, quick: bool, advance: Callable[[], None]
) -> OverlapPoint:
    unit.time(1)  # warm
    once_s = sum(unit.time(1))
    window_s = _QUICK_WINDOW_S if quick else _WINDOW_S
    units = max(_FEWEST_UNITS, min(_MOST_UNITS, math.ceil(window_s / once_s)))
    for _ in range(mover.num_places):  # the first write to allocated space is slow
        _move(mover, 1)
    found = []
    for _ in range(rounds):
        products_s, attention_s = unit.time(units)
        copy_s = _move(mover, units) / units
        with_copies = unit.time(units, before=mover.begin, after=mover.end)
        exposed_s = mover.drain() / units
        found.append((products_s, attention_s, copy_s, *with_copies, exposed_s))
        advance()
    medians = [statistics.median(column) for column in zip(*found, strict=True)]
    behind = [products + attention for *_, products, attention, _ in found]
    spread = (max(behind) - min(behind)) / statistics.median(behind)
    point = OverlapPoint(unit.tokens, unit.context, mover.size_bytes, *medians)
    return replace(point, spread=spread)


def _move(mover: _Copier, units: int) -> float:
    """Return the seconds to copy the bytes of ``units`` units without compute."""
    start = time.perf_counter()
    for _ in range(units):
        mover.begin()
        mover.end()
    mover.drain()
    return time.perf_counter() - start
