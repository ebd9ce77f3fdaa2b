"""Why nothing fits, in words: which memory is short, by how much, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sppo.config.run import RunConfig
from sppo.cost.memory.stage_memory import BUCKETS, MemoryBuckets, bucket_label
from sppo.cost.parameters import num_parameters
from sppo.hardware.run_hardware import hardware_line, run_hardware
from sppo.planning.changes import Change, what_would_fit
from sppo.planning.corpus.search import CorpusSolution
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.nothing_fits import NothingFitsError
from sppo.planning.search.division import Rejection
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.planning.search.solver import Solution
from sppo.units import counted, format_bytes, format_count, format_tokens

_SHOWN_BUCKETS = 5
_SHOWN_GROUPS = 3


def run_line(run: RunConfig) -> str:
    """Return the model, the sequences of a step and the precision of a run as one line."""
    return (
        f"{model_text(run)}, {counted(run.train.sequences_per_step, 'sequence')} "
        f"of {format_tokens(run.sequence.length)} tokens a step, {run.train.dtype}"
    )


def model_text(run: RunConfig) -> str:
    """Return the name of the model of a run, and the number of its parameters."""
    name = run.model.preset or run.model.from_hf or "model"
    return f"{name} ({format_count(num_parameters(run.model))} parameters)"


def nothing_fits(solution: Solution | CorpusSolution) -> NothingFitsError:
    """Return the error that says which memory is short and what would fit; searches the latter."""
    run = solution.run
    if isinstance(solution, Solution):
        changes = what_would_fit(run, machine_of=run_hardware)
        lines = _stream_lines(solution)
    else:
        lines, changes = _corpus_lines(solution), ()
        if not any(refused.steps for refused in solution.rejected):
            longest = run_of_longest_samples(run)
            changes = what_would_fit(longest, machine_of=run_hardware)
    text = "\n".join([*lines, *_advice_lines(solution, changes)])
    return NothingFitsError(text, solution, changes)


def _advice_lines(solution: Solution | CorpusSolution, changes: Sequence[Change]) -> Iterator[str]:
    """Yield lines about the changes that would make a request fit."""
    if not changes:
        yield "no smaller change was found that makes it fit"
        return
    yield "what would fit (closed form):"
    for advice in changes:
        yield f" {advice.change}  {advice.effect}"
    more_nodes = any(advice.change.startswith("hardware.nodes=") for advice in changes)
    if isinstance(solution, Solution) and solution.nearest and not more_nodes:
        yield "up to 1024 of these nodes alone do not make it fit"


def _corpus_lines(solution: CorpusSolution) -> Iterator[str]:
    """Yield lines about the nearest division of the devices, for a run of samples."""
    run = solution.run
    yield (
        f"nothing fits: {run.model.preset or run.model.from_hf or 'model'}, samples of up to "
        f"{format_tokens(run.sequence.length)} tokens, on {hardware_line(solution.hardware)}"
    )
    if solution.rejected:
        nearest = solution.rejected[0]
        yield f"nearest: {nearest.degrees.text()}"
        yield f" {nearest.reason}"
    yield f"none of {solution.num_divisions} ways to divide the devices works"


def _stream_lines(solution: Solution) -> Iterator[str]:
    """Yield lines about the rejections nearest to fitting, for a run of the stream."""
    nearest, count = solution.nearest, len(solution.rejected)
    problem = "no way to divide the devices works" if nearest is None else "nothing fits"
    yield f"{problem}: {run_line(solution.run)}"
    yield f"on {hardware_line(solution.hardware)}"
    if nearest is not None:
        yield from _nearest_lines(nearest)
    if nearest is not None and count == 1:
        return
    if count > 1:
        yield f"none of {count} ways to divide the devices works:"
    else:
        yield "the only way to divide the devices does not work:"
    yield from rejected_lines(solution.rejected, most=_SHOWN_GROUPS, examples=nearest is None)


def _nearest_lines(nearest: Rejection) -> Iterator[str]:
    """Yield lines about the memory that is short: where, by how much, and its largest buckets."""
    shortfall, candidate = nearest.shortfall, nearest.candidate
    assert shortfall is not None, "chosen for it"
    assert candidate is not None, "memory is short of a candidate"
    yield (
        f"nearest: {nearest.degrees.text()}, N={nearest.num_subsequences}, policy {nearest.policy}"
    )
    yield (
        f" rank {shortfall.rank} is short by {format_bytes(shortfall.short_bytes)} of "
        f"{shortfall.place} memory: needs {format_bytes(shortfall.needed_bytes)}, "
        f"{format_bytes(shortfall.available_bytes)} are there"
    )
    if shortfall.place != "device":
        yield f" most of it {bucket_label(shortfall.bucket)}"
        return
    yield f" {_largest_buckets(evaluate_candidate(candidate).memory[shortfall.rank].device)}"


def _largest_buckets(device: MemoryBuckets) -> str:
    sizes = [(getattr(device, name), label) for name, (_, label) in BUCKETS.items()]
    by_size = sorted(sizes, key=lambda sized: -sized[0])[:_SHOWN_BUCKETS]
    return ", ".join(f"{label} {format_bytes(size)}" for size, label in by_size if size)


def rejected_lines(
    rejected: Sequence[Rejection], *, most: int | None = None, examples: bool = True
) -> Iterator[str]:
    """Yield lines about rejections, one for all with the same reason: first those for memory.

    Args:
        rejected: Rejections to group by their reasons.
        most: Number of groups; None for all.
        examples: Whether to describe the rejection of each group that is nearest to fitting.
    """
    by_reason: dict[tuple[bool, str], list[Rejection]] = {}
    for rejection in rejected:
        by_reason.setdefault(_reason(rejection), []).append(rejection)
    groups = sorted(by_reason.items(), key=lambda item: (item[0][0], -len(item[1]), item[0][1]))
    for (is_other, reason), members in groups[:most]:
        example = _example(members)
        if is_other and len(members) == 1:
            yield f"   1 × {example}"
            continue
        yield f" {len(members):>3} × {_in_common(members) if is_other else reason}"
        if examples:
            yield f"     {example}"


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
    return False, f"short of {place}, most of it {bucket_label(shortfall.bucket)}"


def _without_figures(reason: str) -> str:
    """Return `reason` up to the first colon, which precedes its figures."""
    return reason.partition(": ")[0]


def _example(members: Sequence[Rejection]) -> str:
    def short_bytes(rejection: Rejection) -> tuple[bool, int]:
        short = rejection.shortfall
        return (False, 0) if short is None else (short.at_least, short.short_bytes)

    nearest = min(members, key=short_bytes)
    shortfall, where = nearest.shortfall, nearest.degrees.text()
    if shortfall is None:
        return f"{where}: {nearest.reason}"
    where += f", N={nearest.num_subsequences}"
    bound = "at least " if shortfall.at_least else ""
    bounded = any(one.shortfall is not None and one.shortfall.at_least for one in members)
    return (
        f"{'e.g.' if bounded else 'nearest'} {where}: rank "
        f"{shortfall.rank} is short by {bound}{format_bytes(shortfall.short_bytes)} "
        f"({bucket_label(shortfall.bucket)} {format_bytes(shortfall.bucket_bytes)} of {bound}"
        f"{format_bytes(shortfall.needed_bytes)} needed, "
        f"{format_bytes(shortfall.available_bytes)} there)"
    )
