"""What to change where nothing fits: as text, with numbers, from trying it.

Each change is tried by asking the solver's closed forms again: a shorter sequence, more nodes, a
larger or another tier, another activation policy with what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.evaluated_candidate import Shortfall
from sppo.units import KIB, format_bytes, format_duration, format_tokens

_MOST_NODES = 1024
_TIB = 1 << 40

Fits = Callable[[RunConfig, HardwareSpec], float | None]
"""Seconds of the best step, None where nothing fits."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One change that makes the request feasible.

    Attributes:
        change: What to write instead.
        effect: What comes of it.
    """

    change: str
    effect: str


def explain(shortfall: Shortfall) -> str:
    """Why something does not fit, in one line."""
    return (
        f"stage {shortfall.stage} needs {format_bytes(shortfall.needed_bytes)} of "
        f"{shortfall.place} memory and {format_bytes(shortfall.available_bytes)} are there: short "
        f"by {format_bytes(shortfall.short_bytes)}; most of it is "
        f"{shortfall.bucket.replace('_', ' ')} ({format_bytes(shortfall.bucket_bytes)})"
    )


def advise(run: RunConfig, *, hardware: HardwareSpec, fits: Fits) -> tuple[Advice, ...]:
    """The nearest changes that make `run` fit on `hardware`, easiest first.

    Args:
        run: a request that does not fit.
        hardware: the machine it does not fit on.
        fits: the solver's closed forms.
    """
    return tuple(_advice(run, hardware, fits))


def _advice(run: RunConfig, hardware: HardwareSpec, fits: Fits) -> Iterator[Advice]:
    yield from _other_policies(run, hardware, fits)
    yield from _tiers(run, hardware, fits)
    length = _longest_length(run, hardware, fits)
    if length is not None:
        yield Advice(f"sequence.length={format_tokens(length)}", "the longest that fits here")
    nodes = _fewest_nodes(run, hardware, fits)
    if nodes is not None:
        step = fits(run, replace(hardware, num_nodes=nodes))
        assert step is not None, "just found to fit"
        devices = nodes * hardware.node.num_devices
        yield Advice(
            f"hardware.nodes={nodes}", f"{devices} devices, {format_duration(step)} a step"
        )


def _other_policies(run: RunConfig, hardware: HardwareSpec, fits: Fits) -> Iterator[Advice]:
    if run.activations.policy in ("auto", "hybrid"):
        return
    for policy in ("hybrid", "keep_attention", "recompute"):
        changed = _with_activations(run, policy=policy, offload_ratio="auto")
        step = fits(changed, hardware)
        if step is not None:
            yield Advice(f"activations.policy={policy}", f"{format_duration(step)} a step")
            return


def _tiers(run: RunConfig, hardware: HardwareSpec, fits: Fits) -> Iterator[Advice]:
    """Optimizer states in host memory; then more of the tier behind the device."""
    node = hardware.node
    if not run.optimizer.offload and node.host_memory_bytes:
        optimizer = run.optimizer.model_copy(update={"offload": True})
        step = fits(run.model_copy(update={"optimizer": optimizer}), hardware)
        if step is not None:
            yield Advice("optimizer.offload=true", f"{format_duration(step)} a step")
    name = "host_memory_bytes" if node.host_memory_bytes else "disk_bytes"
    if not getattr(node, name):
        return
    roomy = replace(hardware, node=replace(node, **{name: 1024 * _TIB}))
    step = fits(run, roomy)
    if step is not None:
        what = "host memory" if node.host_memory_bytes else "disk space"
        yield Advice(f"more {what} per node", f"{format_duration(step)} a step")


def _longest_length(run: RunConfig, hardware: HardwareSpec, fits: Fits) -> int | None:
    """Find the longest length that fits, by bisection over whole Ki tokens, to 1/16 of itself."""
    if run.sequence.boundaries is not None:
        return None
    low, high = 0, run.sequence.length // KIB
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        sequence = run.sequence.model_copy(update={"length": middle * KIB})
        fitting = fits(run.model_copy(update={"sequence": sequence}), hardware) is not None
        low, high = (middle, high) if fitting else (low, middle)
    return low * KIB if low else None


def _fewest_nodes(run: RunConfig, hardware: HardwareSpec, fits: Fits) -> int | None:
    nodes = hardware.num_nodes
    while nodes < _MOST_NODES:
        nodes *= 2
        if fits(run, replace(hardware, num_nodes=nodes)) is not None:
            return nodes
    return None


def _with_activations(run: RunConfig, **change: object) -> RunConfig:
    return run.model_copy(update={"activations": run.activations.model_copy(update=change)})
