"""Attention back ends that compute a run on this machine, and the check that its plan meant them.

Kernels are chosen by :mod:`sppo.kernels.attention.choice` whatever the plan says. A plan with the
times and memory of a better kernel would be wrong without a sign of it: the run is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise, product

from sppo.config import RunConfig
from sppo.cost.attention_backend import planned_backend
from sppo.cost.workload import Workload
from sppo.hardware.description import HardwareSpec
from sppo.kernels.attention.choice import (
    CAPABILITIES,
    AttentionCase,
    BackendName,
    chosen_name,
    preference,
    why_not_here,
)
from sppo.kernels.attention.interface import may_have_single_tokens
from sppo.planning.plan import ExecutionPlan
from sppo.planning.search.choices import has_documents
from sppo.report.run_summary import AttentionSummary
from sppo.training.devices.device import Device
from sppo.training.state import DTYPES

_SAME_KERNEL = {"torch_flash": "flash_attn_2"}
"""Back end of the same kernel in a package of its own, by back end inside torch."""


def attention_text(attention: AttentionSummary) -> str:
    """Return the back ends that compute a run as text, and the planned one if it is another."""
    as_planned = _same(attention.used[0]) == _same(attention.planned)
    return " and ".join(attention.used) + ("" if as_planned else f" (planned: {attention.planned})")


def load_attention(run: RunConfig, device: Device) -> tuple[BackendName, ...]:
    """Return the back ends of the spans that plans are priced for.

    The first call tries them, which loads their libraries into the memory of a GPU.
    """
    return _chosen(_cases(run, device))


def with_attention_here(hardware: HardwareSpec, run: RunConfig, device: Device) -> HardwareSpec:
    """Return the hardware with the back end that computes a run here, for a plan made at its start.

    The back end of measured rates stays, as does one that the run file names, or one that this
    machine replaces by a better one without known rates.
    """
    named = run.hardware != "auto" and run.hardware.attention != "auto"
    spec = hardware.device
    if spec.attention_points or named:
        return hardware
    here = _last(load_attention(run, device), device)
    known = _same(here) if _same(here) in spec.published_backends else here
    planned = planned_backend(Workload(run.model, hardware, dtype=run.train.dtype))
    if known not in spec.published_backends and _rank(here, device) <= _rank(planned, device):
        return hardware
    return replace(hardware, device=replace(spec, attention_backend=known))


def check_attention(run: RunConfig, plan: ExecutionPlan, device: Device) -> AttentionSummary:
    """Return the back ends that compute a run; refuse a plan that expects a better one.

    Raises:
        ValueError: This machine cannot run the back end that the plan is priced with; names both,
            the reason and the fix.
    """
    planned, names = planned_backend(plan.candidate().workload), load_attention(run, device)
    here = _last(names, device)
    if _rank(here, device) > _rank(planned, device):
        case = next(case for case in _cases(run, device) if _chosen([case]) == (here,))
        raise ValueError(_fall_back(plan, case, planned=planned, here=here))
    others = _chosen(_cases(run, device, plan=plan))
    return AttentionSummary(planned, tuple(dict.fromkeys((*names, *others))))


def _fall_back(plan: ExecutionPlan, case: AttentionCase, *, planned: str, here: str) -> str:
    """Return why a plan is refused whose back end this machine would replace by a later one."""
    reasons = [
        f"{name} {why_not_here(name, case)}"
        for name in CAPABILITIES
        if _same(name) == _same(planned)
    ]
    spec, instead = plan.hardware.device, _same(here)
    if spec.attention_points:
        fix = "measure this machine again (sppo bench all -o FILE) and solve again with that file"
    elif instead in spec.published_backends:
        fix = f"write hardware.attention={instead} in the run file and solve again"
    else:
        fix = "train without --plan and hardware.attention: the plan is then made for what runs"
    return (
        f"the plan is priced with the attention back end {planned}, and this machine would run "
        f"{here}: {'; '.join(reasons)}. Install what is missing, or {fix}"
    )


def _cases(
    run: RunConfig, device: Device, *, plan: ExecutionPlan | None = None
) -> Iterator[AttentionCase]:
    """Yield the cases of a run's attention: layers with and without a window, documents.

    With a plan, also spans that some kernels do not take; else those that plans are priced for.
    """
    model, degree = run.model, run.parallel.sequence_parallel_degree
    windows = sorted({window is not None for window in model.windows})
    single = [has_documents(run)]
    if plan is not None:
        cuts = pairwise(plan.boundaries)
        some = any(may_have_single_tokens(end - start, end, (0,)) for start, end in cuts)
        single = [False] if not (some or has_documents(run)) else [False, True]
    for window, tokens in product(windows, single):
        yield AttentionCase(
            device.torch_device,
            DTYPES[run.train.dtype],
            model.head_dim,
            group=max(1, model.num_heads // degree) // max(1, model.kv_heads // degree),
            window=window,
            single_tokens=tokens,
        )


def _chosen(cases: Iterable[AttentionCase]) -> tuple[BackendName, ...]:
    return tuple(dict.fromkeys(chosen_name(case) for case in cases))


def _same(name: str) -> str:
    return _SAME_KERNEL.get(name, name)


def _rank(name: str, device: Device) -> int:
    """Return the place of a back end's kernel in the order in which ``auto`` tries them here."""
    order = [*dict.fromkeys(_same(other) for other in preference(device.torch_device))]
    return order.index(_same(name))


def _last(names: tuple[BackendName, ...], device: Device) -> BackendName:
    return max(names, key=lambda name: _rank(name, device))
