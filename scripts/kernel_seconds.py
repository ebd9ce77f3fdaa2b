"""Measurement of the fixed cost of a kernel in the engine: the Python code around it, and its call.

``sppo bench`` measures kernels alone. On a CPU the measured rates include the cost of a call, but
not the work of the engine between two kernels, which dominates short units of narrow models.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

from pipeline_ranks import run_ranks  # beside this file

from sppo.hardware.description import HardwareSpec

_TOKENS = 64
_STEPS = 40


@dataclass(frozen=True, slots=True)
class _Request:
    """Inputs of the measurement."""

    hardware: HardwareSpec
    model: dict[str, Any]
    dtype: str


def with_kernel_seconds(
    hardware: HardwareSpec, *, model: dict[str, Any], dtype: str
) -> HardwareSpec:
    """Return the machine with the fixed cost of a kernel, measured for a model.

    Args:
        hardware: Machine with rates of one thread.
        model: Keys of the model.
        dtype: Type of the weights.
    """
    found = run_ranks(_measure, _Request(hardware, model, dtype), ranks=1)
    return _with(hardware, found["kernel_s"])


def _with(hardware: HardwareSpec, kernel_s: float) -> HardwareSpec:
    return replace(hardware, device=replace(hardware.device, kernel_s=kernel_s))


def _measure(_rank: int, request: _Request) -> dict[str, float]:
    """Return the time per kernel by which a step of few tokens exceeds its predicted time."""
    import torch

    from sppo.config.model import ModelConfig
    from sppo.cost.parameters import parameter_shapes
    from sppo.engine.engine import Engine
    from sppo.engine.unit import SequenceData
    from sppo.kernels.native.cpu_allocator import install_cpu_allocator
    from sppo.model.gradients import zero_gradients
    from sppo.training.state_tensors import DTYPES

    install_cpu_allocator()
    model = ModelConfig.model_validate(request.model)
    weights = {
        name: torch.zeros(shape, dtype=DTYPES[request.dtype])
        for name, shape in parameter_shapes(model).items()
    }
    engine = Engine(model, weights=weights, gradients=zero_gradients(weights), policy="retain")
    tokens = torch.arange(_TOKENS + 1) % model.vocab_size
    data = SequenceData(tokens[:-1], tokens[1:])
    done = [engine.accumulate([data], [(0, _TOKENS)]) for _ in range(_STEPS)][1:]
    measured_s = statistics.median(step.forward_s + step.backward_s for step in done)
    free_s = _step_s(request, kernel_s=0.0)
    kernels = _step_s(request, kernel_s=1.0) - free_s
    return {"kernel_s": max(0.0, measured_s - free_s) / kernels}


def _step_s(request: _Request, *, kernel_s: float) -> float:
    """Return the predicted seconds of a step of few tokens."""
    from sppo.config.model import ModelConfig
    from sppo.cost.candidate import Candidate
    from sppo.cost.layer import Workload
    from sppo.cost.stage_cost import stage_seconds

    model = ModelConfig.model_validate(request.model)
    workload = Workload(model, _with(request.hardware, kernel_s), dtype=request.dtype)
    units = stage_seconds(Candidate(workload, (_TOKENS,))).units
    return float((units.forward + units.backward + units.weight).sum())
