"""Why nothing fits, in words: which memory is short, by how much, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sppo.config.run import RunConfig
from sppo.cost.memory.stage_memory import bucket_label
from sppo.cost.trainable import counts_text
from sppo.hardware.run_hardware import hardware_line, run_hardware
from sppo.planning.changes import MOST_NODES, Change, what_would_fit
from sppo.planning.corpus.search import CorpusSolution
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.nothing_fits import NothingFitsError
from sppo.planning.search.division import Rejection
from sppo.planning.search.solver import Solution, nearest_rejection
from sppo.units import counted, format_tokens


def run_line(run: RunConfig) -> str:
    """Return the model, the sequences of a step and the precision of a run as one line."""
    return (
        f"{model_text(run)}, {counted(run.train.sequences_per_step, 'sequence')} "
        f"of {format_tokens(run.sequence.length)} tokens a step, {run.train.dtype}"
    )


def model_text(run: RunConfig) -> str:
    """Return the name of the model of a run, and the number of its parameters."""
    name = run.model.preset or run.model.from_hf or "model"
    return f"{name} ({counts_text(run)})"


def nothing_fits(solution: Solution | CorpusSolution) -> NothingFitsError:
    """Return the error that says which memory is short and what would fit; searches the latter."""
    run, rejected = solution.run, solution.rejected
    # Where the longest sample fits, but a drawn step does not, no change is known to help.
    fits_alone = [one for one in rejected if one.steps]
    nearest = fits_alone[0] if fits_alone else nearest_rejection(rejected)
    problem = "no way to divide the devices works" if nearest is None else "nothing fits"
    if isinstance(solution, Solution):
        asked = run_line(run)
    else:
        asked = f"{model_text(run)}, samples of up to {format_tokens(run.sequence.length)} tokens"
    lines = [f"{problem}: {asked}", f"on {hardware_line(solution.hardware)}"]
    if nearest is not None:
        lines += [f"nearest: {_candidate_text(nearest)}", f" {nearest.reason}"]
    if nearest is None or len(rejected) > 1:
        lines.append(f"none of {counted(len(rejected), 'way')} to divide the devices works:")
        lines += rejected_lines(rejected)
    changes: tuple[Change, ...] = ()
    if not fits_alone:
        changes = what_would_fit(run_of_longest_samples(run), machine_of=run_hardware)
    if changes:
        lines.append("what would fit:")
        lines += [f" {change.change}  {change.effect}" for change in changes]
        more_nodes = any(change.change.startswith("hardware.nodes=") for change in changes)
        if nearest is not None and not more_nodes:
            lines.append(f"up to {MOST_NODES} of these nodes alone do not make it fit")
    else:
        lines.append("no smaller change was found that makes it fit")
    return NothingFitsError("\n".join(lines), solution, changes)


def rejected_lines(rejected: Sequence[Rejection]) -> Iterator[str]:
    """Yield lines about rejections: each reason with the one nearest to fitting, memory first."""
    by_reason: dict[tuple[bool, str], list[Rejection]] = {}
    for rejection in rejected:
        by_reason.setdefault(_reason(rejection), []).append(rejection)
    groups = sorted(by_reason.items(), key=lambda item: (item[0][0], -len(item[1]), item[0][1]))
    for (is_other, reason), members in groups:
        nearest = nearest_rejection(members) or members[0]
        example = f"{_candidate_text(nearest)}: {nearest.reason}"
        if is_other and len(members) == 1:
            yield f"   1 × {example}"
            continue
        yield f" {len(members):>3} × {reason}"
        yield f"     e.g. {example}"


def _reason(rejection: Rejection) -> tuple[bool, str]:
    """Return whether a rejection is independent of memory, and its reason without figures."""
    shortfall = rejection.shortfall
    if shortfall is None:
        words = rejection.reason.partition(": ")[0].split()
        return True, " ".join("…" if word.strip(",;").isdigit() else word for word in words)
    place = f"{shortfall.place} memory" if shortfall.place != "disk" else "disk space"
    return False, f"short of {place}, most of it {bucket_label(shortfall.bucket)}"


def _candidate_text(rejection: Rejection) -> str:
    """Return the degrees of a rejection; for memory, also N and the policy that came nearest."""
    text = rejection.degrees.text()
    if rejection.num_subsequences is not None:
        text += f", N={rejection.num_subsequences}"
    return text if rejection.policy is None else f"{text}, policy {rejection.policy}"
