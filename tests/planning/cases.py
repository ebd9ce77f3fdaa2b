"""Short ways to make requests, machines and evaluated candidates, for the tests of this folder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sppo.activations.placement import ActivationPlacement
from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.stages.stage_cost import stage_costs
from sppo.hardware.description import HardwareSpec
from sppo.hardware.presets import PRESETS
from sppo.hardware.run_hardware import hardware_for
from sppo.planning.search.candidates import candidate_of, workload_of
from sppo.planning.search.choices import Degrees, cut_sequence
from sppo.planning.search.solver import Solution, solve
from sppo.schedule.costs import Costs
from sppo.schedule.program import generate, lower
from sppo.schedule.simulation.simulate import simulate
from sppo.schedule.timeline import Timeline
from tests.make import make_run

A100 = PRESETS["a100-80g"]
PERFECT = replace(
    A100,
    device=replace(
        A100.device,
        gemm_efficiency=1.0,
        attention_backend="",
        attention_efficiency=1.0,
        attention_backward_efficiency=1.0,
        num_multiprocessors=0,
        memory_bytes_per_s=1e30,
        kernel_s=0.0,
    ),
)
"""Every kernel runs at the peak, whatever its shape, and memory is never waited for."""


def run_config(model: str | dict[str, Any] = "gpt-7b", *, length: int | str = 65536, **sections):
    """A run of `model` on one node of A100s, with `sections` written over it."""
    return make_run(model, length=length, **{"hardware": {"preset": "a100-80g"}, **sections})


def solved(run: RunConfig, *, hardware: HardwareSpec | None = None) -> Solution:
    """The solver's answer, for the machine that the run names unless another is given."""
    return solve(run, hardware=hardware or hardware_for(run.hardware))


def candidate_of_subsequences(
    run: RunConfig,
    *,
    hardware: HardwareSpec,
    degrees: Degrees,
    num_subsequences: int,
    virtual_stages: int = 1,
) -> Candidate:
    """Return the candidate with the given degrees, numbers of subsequences and virtual stages."""
    workload = workload_of(run, hardware=hardware, degrees=degrees)
    lengths = cut_sequence(
        run,
        num_subsequences=num_subsequences,
        num_stages=degrees.pipeline_parallel,
    )
    return candidate_of(run, workload, degrees, lengths=lengths, virtual_stages=virtual_stages)


def machine(hardware: HardwareSpec = A100, *, nodes: int | None = None, **change) -> HardwareSpec:
    """`hardware` with some of its figures changed, each named by its attribute."""
    for part in ("device", "node", "network"):
        spec = getattr(hardware, part)
        own = {name: value for name, value in change.items() if hasattr(spec, name)}
        hardware = replace(hardware, **{part: replace(spec, **own)})
    return hardware if nodes is None else replace(hardware, num_nodes=nodes)


def price(candidate: Candidate, *, placement=None) -> Costs:
    """What each action costs, with a placement or with everything retained."""
    if placement is None:
        tokens = np.array(candidate.lengths)[None, :, None]
        retained = np.broadcast_to(tokens, (candidate.num_stages, len(candidate.lengths), 3))
        placement = ActivationPlacement(retained, retained * 0, retained * 0)
    return stage_costs(candidate, placement)


def play(
    costs: Costs,
    *,
    lengths,
    schedule: str = "sppo",
    num_virtual: int = 1,
    forward_only_stages: int = 0,
) -> Timeline:
    """Simulate a step of `lengths` with so many stages per rank."""
    programs = generate(
        schedule,
        num_ranks=costs.num_stages // num_virtual,
        num_virtual=num_virtual,
        forward_only_stages=forward_only_stages,
        lengths=lengths,
        costs=costs,
    )
    return simulate(lower(programs, costs=costs), costs=costs)
