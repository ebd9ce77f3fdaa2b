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
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from sppo.activations.tensor_classes import class_bytes_per_token
from sppo.bench.operands import DTYPES, Operands
from sppo.bench.timing import Watcher
from sppo.config.model import ModelConfig
from sppo.config.model.presets import PRESETS
from sppo.config.run import RunConfig
from sppo.cost.parameters import layer_shapes
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.interface import attention_forward
from sppo.kernels.linear import linear
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
_DEFAULT_MODEL = {"cpu": "tiny", "cuda": "llama-3.2-1b"}
_SLOTS = 2
_MOST_FILE_BYTES = GIB


LeftOut = tuple[int, int, str]
"""(tokens, context, reason) of a unit that was not measured; longer ones were not tried."""


@dataclass(frozen=True, slots=True)
class OverlapPoint:
    """Times of one unit's compute alone, its copy alone, and both; medians, seconds per unit.

    Attributes:
        tokens: Tokens of the subsequence.
        context: Tokens before the subsequence.
        moved_bytes: Bytes that one layer saves for the subsequence, all of which are copied.
        compute_s: Compute without copies.
        copy_s: Copies without compute.
        compute_copying_s: Compute while copies run, without the time that it waits for them.
        exposed_s: Time that compute waits for copies.
        spread: Difference between the fastest and the slowest round of the compute with copies,
            relative to the median.
    """

    tokens: int
    context: int
    moved_bytes: int
    compute_s: float
    copy_s: float
    compute_copying_s: float
    exposed_s: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class OverlapMeasurements:
    """Results of one run of the overlap benchmark.

    Attributes:
        model: Name of the model of the layer.
        dtype: Type of weights and activations.
        where: Target of the copies, for users.
        points: Timings by subsequence length and context.
        added_s_per_byte: Compute time that every copied byte costs: the median over the points.
        left_out: Units that take too long, or too much memory.
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


def measured_layer(device: str, run: RunConfig | None) -> MeasuredLayer:
    """Return the layer of a run's model, without a run that of a common one."""
    if run is None:
        name = _DEFAULT_MODEL[device]
        return MeasuredLayer(name, ModelConfig(**PRESETS[name]), "bf16")
    model = run.model
    return MeasuredLayer(model.preset or model.from_hf or "the run", model, run.train.dtype)


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
        watcher: Receiver of the progress, notified of every unit.

    Raises:
        OSError: A disk that lacks the space, or failed.
    """
    device = operands.device
    assert device == "cuda" or directory is not None, "a CPU's next tier is a disk"
    tokens_of, contexts = (_QUICK_TOKENS, _QUICK_CONTEXTS) if quick else (_TOKENS, _CONTEXTS)
    shapes = list(product(tokens_of[device], contexts[device]))
    watcher.begin("overlap", total=len(shapes))
    points: list[OverlapPoint] = []
    left_out: list[LeftOut] = []
    for tokens, context in shapes:
        if not any(tokens >= least and context >= far for least, far, _ in left_out):
            try:
                unit = _ForwardWork(operands, layer, tokens=tokens, context=context)
                once_s = unit.warm_s()
                if once_s > _LONGEST_S and points:
                    left_out.append((tokens, context, f"{format_duration(once_s)} a unit"))
                else:
                    points.append(_measure(unit, once_s, device, directory, quick=quick))
            except torch.OutOfMemoryError:
                if not points:
                    raise
                left_out.append((tokens, context, "more memory than the device has"))
        watcher.advance()
    return OverlapMeasurements(
        layer.name,
        layer.dtype,
        f"to a disk, in {directory}" if device == "cpu" else "to page-locked host memory",
        tuple(points),
        added_s_per_byte=added_s_per_byte(points),
        left_out=tuple(left_out),
    )


def _lane(device: str) -> Lane:
    return CudaLane(torch.device(device)) if device == "cuda" else Lane()


def saved_bytes_per_token(layer: MeasuredLayer) -> int:
    """Return the bytes that one layer saves per token: input, attention and linear classes."""
    element_bytes = DTYPES[layer.dtype].itemsize
    model = layer.model
    first = model.layer_type(0)
    return int(class_bytes_per_token(model, first, element_bytes=element_bytes).sum())


def added_s_per_byte(points: Sequence[OverlapPoint]) -> float:
    """Return the seconds of compute that a copied byte costs: the median over the points.

    The result is at least 0, which noise may otherwise make negative, and at most the copy time per
    byte, as if compute stood still during copies: any more has other causes.
    """
    added = statistics.median((p.compute_copying_s - p.compute_s) / p.moved_bytes for p in points)
    return min(max(0.0, added), statistics.median(p.copy_s / p.moved_bytes for p in points))


class _ForwardWork:
    """Forward of one layer on one subsequence."""

    def __init__(
        self, operands: Operands, layer: MeasuredLayer, *, tokens: int, context: int
    ) -> None:
        operands.begin()
        model, dtype = layer.model, DTYPES[layer.dtype]
        self.tokens, self.context, self._kind = tokens, context, operands.device
        matrices = [shape for shape in layer_shapes(model, 0).values() if len(shape) == 2]
        self._weights = [operands.take(*shape, dtype=dtype) for shape in matrices]
        widths = {weight.shape[1] for weight in self._weights}
        self._inputs = {width: operands.take(tokens, width, dtype=dtype) for width in widths}
        self._q = operands.take(tokens, model.num_heads, model.head_dim, dtype=dtype)
        self._k, self._v = (
            operands.take(context + tokens, model.kv_heads, model.head_dim, dtype=dtype)
            for _ in range(2)
        )
        self.saved_bytes = tokens * saved_bytes_per_token(layer)

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return self._q.device

    def warm_s(self) -> float:
        """Return the seconds of one unit that is not the first."""
        self.time(1)
        return self.time(1)

    @torch.no_grad()
    def time(
        self,
        units: int,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> float:
        """Return the seconds of compute per unit, without ``before`` and ``after``.

        Args:
            units: Number of times that the unit is computed.
            before: Function to call before each unit.
            after: Function to call after each unit.
        """
        marks = []
        for _ in range(units):
            before()
            begin = self._mark()
            for weight in self._weights:
                linear(self._inputs[weight.shape[1]], weight)
            attention_forward(AttentionCall(self._q, self._k, self._v))
            marks.append((begin, self._mark()))
            after()
        if self._kind == "cuda":
            _cuda.synchronize(self.device)
        return sum(_seconds_between(begin, end) for begin, end in marks) / units

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
            lane.file.open(directory, count * slot_bytes)
        self._turn = 0
        self._copied: Event | None = None
        self._written: list[Event | None] = [None] * _SLOTS

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
            self._written[slot] = self._lane.file.write(place, memory.numpy(), after=[self._copied])
        self._turn += 1

    def end(self) -> None:
        """Make compute wait until the last copy out is done, as if it overwrote the source."""
        assert self._copied is not None, "begin() comes first"
        self._lane.before_compute(self._copied)

    def drain(self) -> float:
        """Wait for all copies; return the seconds that compute waited since the last call."""
        for written in self._written:
            if written is not None:
                self._lane.before_compute(written)
        return self._lane.take_times().exposed_s


def _measure(
    unit: _ForwardWork, once_s: float, device: str, directory: Path | None, *, quick: bool
) -> OverlapPoint:
    """Time a unit alone, its copy alone, and both, in turn.

    Args:
        unit: Unit to time.
        once_s: Seconds of the unit alone, an estimate.
        device: "cpu" or "cuda".
        directory: As in :func:`measure_overlap`.
        quick: As in :func:`measure_overlap`.
    """
    rounds, window_s = (_QUICK_ROUNDS, _QUICK_WINDOW_S) if quick else (_ROUNDS, _WINDOW_S)
    units = max(_FEWEST_UNITS, min(_MOST_UNITS, math.ceil(window_s / once_s)))
    found = []
    with closing(_lane(device)) as lane:
        mover = _Copier(
            lane,
            directory if device == "cpu" else None,
            size_bytes=unit.saved_bytes,
            device=unit.device,
        )
        for _ in range(mover.num_places):  # the first write to allocated space is slow
            _move(mover, 1)
        for _ in range(rounds):
            compute_s = unit.time(units)
            copy_s = _move(mover, units) / units
            with_copies_s = unit.time(units, before=mover.begin, after=mover.end)
            found.append((compute_s, copy_s, with_copies_s, mover.drain() / units))
    compute_s, copy_s, with_copies_s, exposed_s = map(statistics.median, zip(*found, strict=True))
    behind = [with_copies for _, _, with_copies, _ in found]
    return OverlapPoint(
        unit.tokens,
        unit.context,
        unit.saved_bytes,
        compute_s,
        copy_s,
        with_copies_s,
        exposed_s,
        spread=(max(behind) - min(behind)) / with_copies_s,
    )


def _move(mover: _Copier, units: int) -> float:
    """Return the seconds to copy the bytes of ``units`` units without compute."""
    start = time.perf_counter()
    for _ in range(units):
        mover.begin()
        mover.end()
    mover.drain()
    return time.perf_counter() - start
