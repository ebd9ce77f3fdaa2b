"""Short texts about the results of the solver."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cli.output.memory_groups import bucket_text
from sppo.cost.candidate import Candidate
from sppo.cost.stage_cost import row_bytes_of
from sppo.hardware.description import Tier
from sppo.planning.search.candidate_search import Rejection
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.units import format_bytes

TIER_NAMES: Mapping[Tier, str] = {
    "device": "the device",
    "host": "host memory",
    "disk": "a file on the disk",
}
_SHOWN_RATIOS = 10


def degrees_text(degrees: Degrees) -> str:
    """Return the degrees as text, such as ``SP 8 · PP 4 · DP 1``."""
    return (
        f"SP {degrees.sequence_parallel} · PP {degrees.pipeline_parallel} · "
        f"DP {degrees.data_parallel}"
    )


def lengths_text(lengths: Sequence[int]) -> str:
    """Return the first length, and the last one if it differs."""
    first, last = lengths[0], lengths[-1]
    return str(first) if first == last else f"{first} … {last}"


def ratio_text(ratios: Sequence[float]) -> str:
    """Return the first and last offload ratio as text; "none" if all are 0."""
    return f"{ratios[0]:.2f} … {ratios[-1]:.2f}" if any(ratios) else "none"


def offload_ratios_line(ratios: Sequence[float]) -> str:
    """Return a line with at most ten evenly spaced ratios, including the first and the last."""
    count = min(len(ratios), _SHOWN_RATIOS)
    places = np.linspace(0, len(ratios) - 1, count).round().astype(int)
    shown = " ".join(f"{ratios[place]:.2f}" for place in places)
    of_all = f" ({count} of {len(ratios)})" if count < len(ratios) else ""
    return f"offload ratio, first to last subsequence{of_all}: {shown}"


def schedule_text(candidate: Candidate) -> str:
    """Return the name of the schedule, and the number of stages on a rank if there are several."""
    if candidate.virtual_stages == 1:
        return candidate.schedule
    return f"{candidate.schedule} with {candidate.virtual_stages} stages on a rank"


def policy_text(evaluated: EvaluatedCandidate) -> str:
    """Return what happens to saved activations, in fractions of their bytes over all stages."""
    placement = evaluated.placement
    row_bytes = row_bytes_of(evaluated.candidate)[:, None, :]
    retained, offloaded, recomputed = (
        (table * row_bytes).sum(axis=(0, 1))
        for table in (placement.retained, placement.offloaded, placement.recomputed)
    )
    whole = float((retained + offloaded + recomputed).sum())
    kv = ""
    if evaluated.kv != "retained":
        kv = f"; K and V are {evaluated.kv} between a stage's forward and its backward"
        if recomputed_stages := evaluated.candidate.kv_recomputed:
            kv += f", and recomputed on {recomputed_stages} stages of a rank"
    if retained.sum() == whole:
        return f"every saved tensor stays on the device until its backward{kv}"
    parts = []
    if retained.any():
        parts.append(f"{retained.sum() / whole:.0%} is retained on the device")
    if offloaded.any():
        tier = TIER_NAMES[evaluated.candidate.tier]
        parts.append(f"{offloaded.sum() / whole:.0%} is offloaded to {tier}")
    if recomputed[LINEAR]:
        parts.append(f"{recomputed[LINEAR] / whole:.0%} is recomputed by projections")
    if recomputed[ATTENTION]:
        parts.append(f"{recomputed[ATTENTION] / whole:.0%} is recomputed by attention")
    return f"of the saved bytes {', '.join(parts)}{kv}"


@dataclass(frozen=True, slots=True)
class RejectedGroup:
    """Rejected candidates with the same reason.

    Attributes:
        count: Number of candidates.
        reason: Common part of the reasons. For a single candidate that cannot work in any memory,
            the candidate and its reason.
        example: Description of the candidate that is nearest to fitting; "" if `reason` says all.
    """

    count: int
    reason: str
    example: str


def rejected_groups(rejected: Sequence[Rejection]) -> tuple[RejectedGroup, ...]:
    """Group rejections by reason: first those short of memory, then others; larger groups first."""
    by_reason: dict[tuple[bool, str], list[Rejection]] = {}
    for rejection in rejected:
        by_reason.setdefault(_reason(rejection), []).append(rejection)
    groups = sorted(by_reason.items(), key=lambda item: (item[0][0], -len(item[1]), item[0][1]))
    return tuple(_group(members, reason) for (_, reason), members in groups)


def _group(members: Sequence[Rejection], reason: str) -> RejectedGroup:
    example = _example(members)
    if members[0].shortfall is not None:
        return RejectedGroup(len(members), reason, example)
    if len(members) == 1:
        return RejectedGroup(1, example, "")
    return RejectedGroup(len(members), _in_common(members), example)


def _in_common(members: Sequence[Rejection]) -> str:
    """Return the common words of the members' reasons, with "…" for words that differ."""
    places = zip(*(_without_figures(member.reason).split() for member in members), strict=True)
    return " ".join(words[0] if len(set(words)) == 1 else "…" for words in places)


def _reason(rejection: Rejection) -> tuple[bool, str]:
    """Return whether a rejection is independent of memory, and the key to group it by."""
    shortfall = rejection.shortfall
    if shortfall is None:
        words = _without_figures(rejection.reason).split()
        return True, " ".join("…" if word.strip(",;").isdigit() else word for word in words)
    place = f"{shortfall.place} memory" if shortfall.place != "disk" else "disk space"
    return False, f"short of {place}, most of it {bucket_text(shortfall.bucket)}"


def _without_figures(reason: str) -> str:
    """Return `reason` up to the first colon, which precedes its figures."""
    return reason.partition(": ")[0]


def _example(members: Sequence[Rejection]) -> str:
    def short_bytes(rejection: Rejection) -> tuple[bool, int]:
        short = rejection.shortfall
        return (False, 0) if short is None else (short.at_least, short.short_bytes)

    nearest = min(members, key=short_bytes)
    shortfall, where = nearest.shortfall, degrees_text(nearest.degrees)
    if shortfall is None:
        return f"{where}: {nearest.reason}"
    bound = "at least " if shortfall.at_least else ""
    bounded = any(one.shortfall is not None and one.shortfall.at_least for one in members)
    return (
        f"{'e.g.' if bounded else 'nearest'} {where}, N={nearest.num_subsequences}: rank "
        f"{shortfall.rank} is short by {bound}{format_bytes(shortfall.short_bytes)} "
        f"({bucket_text(shortfall.bucket)} {format_bytes(shortfall.bucket_bytes)} of {bound}"
        f"{format_bytes(shortfall.needed_bytes)} needed, "
        f"{format_bytes(shortfall.available_bytes)} there)"
    )


def train_command(run_file: Path, overrides: Sequence[str], *, output: Path | None) -> str:
    """Return the command that trains a run by its plan.

    Args:
        run_file: File of the run.
        overrides: Overrides of its keys that the plan was made with.
        output: File of the plan; None if it has not been written.
    """
    plan = str(output or "plan.json")
    return shlex.join(["sppo", "train", str(run_file), *overrides, "--plan", plan])


def launch_commands(degrees: Degrees, *, devices_per_node: int, train: str) -> tuple[str, ...]:
    """Return the commands that train by a plan: sppo on one node, torchrun and srun on several.

    Args:
        degrees: Degrees of the plan.
        devices_per_node: Devices of each node of the machine.
        train: Command that trains by the plan, see :func:`train_command`.
    """
    devices, group = degrees.num_devices, degrees.sequence_parallel
    if devices <= devices_per_node:
        return (train,)
    # Equal numbers on all nodes; no sequence-parallel group spans nodes if it fits on one.
    group = group if group <= devices_per_node else 1
    each = max(n for n in range(1, devices_per_node + 1) if devices % n == 0 and n % group == 0)
    nodes = devices // each
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {each} {meeting} -m {train}",
        f"srun --nodes {nodes} --ntasks-per-node {each} {train}",
    )
