"""Whether anything fits, and roughly how fast: the solver's closed forms with few values of N.

What advice and comparisons ask many times over, so it takes a fraction of what `solve` takes.
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo.config.run import RunConfig
from sppo.hardware.description import HardwareSpec
from sppo.planning.advice import Advice, advise
from sppo.planning.candidates import candidate_of_subsequences
from sppo.planning.choices import degrees_to_try, subsequence_counts_to_try
from sppo.planning.evaluated_candidate import assess, leaves_room
from sppo.planning.search import CandidateSearch
from sppo.units import format_duration

_DEGREES = ("data_parallel_degree", "pipeline_parallel_degree", "sequence_parallel_degree")
_CUTS = ("num_subsequences", "boundaries")


def quick_step_s(run: RunConfig, hardware: HardwareSpec) -> float | None:
    """Seconds of the best step in closed form, to a few percent; None where nothing fits.

    Also where the request cannot be served at all, such as more subsequences than tokens: whoever
    varies a request asks for many that cannot.
    """
    if not fits_at_all(run, hardware):
        return None
    counts = _few(subsequence_counts_to_try(run, hardware=hardware))
    search = CandidateSearch(run, hardware=hardware, subsequence_counts=counts)
    best = next(search.fastest_first(), None)
    return None if best is None else best.step_s


def fits_at_all(run: RunConfig, hardware: HardwareSpec) -> bool:
    """Whether any way to divide the devices fits, with any number of subsequences worth trying.

    Memory only shrinks with the number of subsequences, so no other number is looked at.
    """
    try:
        possible, _ = degrees_to_try(run, hardware=hardware)
        num_subsequences = subsequence_counts_to_try(run, hardware=hardware)[-1]
        # Most devices first, and of those the ones that also shard the running layer.
        possible.sort(key=lambda d: (d.num_devices, d.sequence_parallel), reverse=True)
        candidates = (
            candidate_of_subsequences(
                run, hardware=hardware, degrees=degrees, num_subsequences=num_subsequences
            )
            for degrees in possible
        )
        return any(
            leaves_room(candidate) and assess(candidate).shortfall is None
            for candidate in candidates
        )
    except ValueError:
        return False


def what_would_fit(run: RunConfig, *, hardware: HardwareSpec) -> tuple[Advice, ...]:
    """The nearest changes that make a request feasible, easiest first.

    Args:
        run: a request that does not fit.
        hardware: the machine it does not fit on.
    """
    return (*_fewer_conditions(run, hardware), *advise(run, hardware=hardware, fits=quick_step_s))


def _few(counts: tuple[int, ...]) -> tuple[int, ...]:
    """The first, the last, and two of the lower half, where the best one usually is."""
    last = len(counts) - 1
    return tuple(counts[place] for place in sorted({0, last // 4, last // 2, last}))


def _fewer_conditions(run: RunConfig, hardware: HardwareSpec) -> Iterator[Advice]:
    """Keys of the run file that the solver could choose better."""
    parallel = [key for key in _DEGREES if key in run.parallel.model_fields_set]
    cuts = [key for key in _CUTS if key in run.sequence.model_fields_set]
    for degrees, num_subsequences in (([], cuts), (parallel, []), (parallel, cuts)):
        if not degrees and not num_subsequences:
            continue
        step = quick_step_s(_without(run, parallel=degrees, sequence=num_subsequences), hardware)
        if step is not None:
            keys = [f"parallel.{key}" for key in degrees] + [
                f"sequence.{key}" for key in num_subsequences
            ]
            yield Advice(f"leave out {', '.join(keys)}", f"{format_duration(step)} a step")
            return


def _without(run: RunConfig, *, parallel: list[str], sequence: list[str]) -> RunConfig:
    """`run` as if those keys had not been written."""
    sections = {}
    for name, keys in (("parallel", parallel), ("sequence", sequence)):
        section = getattr(run, name)
        given = section.model_fields_set - set(keys)
        sections[name] = type(section)(**{key: getattr(section, key) for key in given})
    return run.model_copy(update=sections)
