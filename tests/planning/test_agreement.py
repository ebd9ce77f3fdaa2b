"""Random requests: the plan fits, no listed candidate is faster, and all commands agree."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import pytest

from sppo.config import RunConfig, load_run
from sppo.hardware.run_hardware import hardware_for
from sppo.planning.estimate import estimate
from sppo.planning.make_plan import make_plan
from sppo.planning.search import evaluated_candidate
from sppo.planning.search.choices import Degrees, degree_problems
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.evaluation import WORTH_IT
from sppo.planning.search.solver import Solution, quick_best, solve
from sppo.schedule.orders.names import WHOLE_SEQUENCES
from sppo.schedule.simulation.simulate import simulate
from sppo.training.preflight import check_trainable
from sppo.training.start import followed_plan
from tests.planning.cases import run_config
from tests.tiers import default_of

REQUESTS_EACH = 5
SCHEDULES = (
    "sppo",
    "seq1f1b",
    "1f1b",
    "gpipe",
    "seq_zb_h1",
    "sppo_msp",
    "looped_bfs",
    "interleaved_seq1f1b",
)
ROUNDING = 1e-9
MOST_EVALUATED = 1000
"""Placements whose memory one answer counts at most: seconds of a search, without a clock."""
MOST_PLAYED = 200_000
"""Units that it simulates at most, each on each stage."""
KEYS = {
    "parallel.data_parallel_degree": (1, 2, 4),
    "parallel.pipeline_parallel_degree": (1, 2, 4, 8),
    "parallel.sequence_parallel_degree": (1, 2, 4, 8),
    "parallel.virtual_stages": (1, 2, 4),
    "parallel.schedule": ("sppo", "looped_bfs", "sppo_msp", "seq_zb_h1", "interleaved_seq1f1b"),
    "parallel.multiplexed": ("on", "off"),
    "sequence.num_subsequences": (1, 2, 4, 6, 8, 12, 16, 32),
    "activations.policy": ("retain", "recompute", "sppo"),
    "activations.kv": ("retain", "offload"),
}
"""Keys of which the solver chooses the fastest value, and what requests may write for them."""
SLOWER = 1.01
"""Most by which an answer may be slower than one with a key more, relative to that."""


def some_request(dice: random.Random) -> RunConfig:
    """A model, sequences, a cluster, and some of what a run file may fix."""
    parallel: dict[str, object] = {}
    if dice.random() < 0.3:
        parallel["pipeline_parallel_degree"] = dice.choice([1, 2, 4])
    if dice.random() < 0.3:
        parallel["sequence_parallel_degree"] = dice.choice([1, 2, 8])
    if dice.random() < 0.3:
        parallel["zero"] = dice.choice([0, 1, 2, 3])
    if dice.random() < 0.4:
        parallel["schedule"] = dice.choice(SCHEDULES)
    if parallel.get("schedule", "auto") in ("auto", "looped_bfs") and dice.random() < 0.4:
        parallel["virtual_stages"] = dice.choice([1, 2, 4])
    hardware = {
        "preset": dice.choice(["a100-40g", "a100-80g", "h100", "h200"]),
        "nodes": dice.choice([1, 2, 4]),
    }
    if dice.random() < 0.3:
        hardware["margin"] = dice.choice([0.0, 0.1])
    sequence = {"num_subsequences": dice.choice([8, 24])} if dice.random() < 0.2 else {}
    activations = {"policy": dice.choice(["auto", "auto", "auto", "retain", "sppo", "recompute"])}
    if dice.random() < 0.2:
        activations["kv"] = dice.choice(["retain", "offload"])
    state = {"optimizer": dice.choice(["device", "host"])} if dice.random() < 0.2 else {}
    return run_config(
        dice.choice(["llama-3.2-1b", "gpt-7b", "llama-3.1-8b", "mistral-7b"]),
        length=f"{dice.choice([16, 48, 128, 300, 700])}Ki",
        sequence=sequence,
        train={"sequences_per_step": dice.choice([1, 1, 2, 4, 6])},
        parallel=parallel,
        activations=activations,
        state=state,
        hardware=hardware,
    )


def requests(seed: int) -> list[RunConfig]:
    """Requests of a seed, without those that contradict themselves."""
    dice = random.Random(f"agreement {seed}")
    found: list[RunConfig] = []
    while len(found) < REQUESTS_EACH:
        with suppress(ValueError):
            found.append(some_request(dice))
    return found


def answer(run: RunConfig) -> Solution | None:
    """Solve a request; None if the machine cannot do what it asks for."""
    try:
        return solve(run, hardware=hardware_for(run.hardware))
    except ValueError:
        return None


def as_recommended(run: RunConfig, best: EvaluatedCandidate) -> RunConfig:
    """`run` with everything written that the solver chose, but the policy."""
    degrees, candidate = best.degrees, best.candidate
    return run.with_values(
        {f"parallel.{name}": degree for name, degree in degrees.by_name.items()}
        | {
            "parallel.schedule": candidate.schedule,
            "parallel.virtual_stages": candidate.virtual_stages,
            "sequence.num_subsequences": len(candidate.lengths),
        }
    )


@pytest.fixture
def work(monkeypatch) -> Counter[str]:
    """What searches have done since this was cleared: placements evaluated, units simulated."""
    done: Counter[str] = Counter()
    count, play = evaluated_candidate.with_placement, evaluated_candidate.simulate_step

    def with_placement(*states, **options):
        done["evaluated"] += 1
        return count(*states, **options)

    def simulate_step(schedule, *, costs):
        done["played"] += costs.forward_s.size
        return play(schedule, costs=costs)

    monkeypatch.setattr(evaluated_candidate, "with_placement", with_placement)
    monkeypatch.setattr(evaluated_candidate, "simulate_step", simulate_step)
    return done


@pytest.mark.parametrize("seed", default_of(range(60), 4))
def test_answers_fit_are_best_and_agree(seed: int, work: Counter[str]):
    solved, dice = 0, random.Random(seed)
    for run in requests(seed):
        work.clear()
        solution = answer(run)
        assert work["evaluated"] <= MOST_EVALUATED
        assert work["played"] <= MOST_PLAYED
        no_key_more_is_faster(run, dice)
        if solution is None:
            continue
        if solution.best is None:
            assert all(rejection.reason for rejection in solution.rejected)
            continue
        solved += 1
        fits_and_is_best(solution)
        keeps_what_is_written(run, solution)
        agrees_with_its_plan(run, solution)
        is_trained(run, solution)
        # Of the request as it is the commands ask the solver again, so once for each seed.
        commands_agree(as_recommended(run, solution.best), solution)
        if solved == 1:
            commands_agree(run, solution)
    assert solved, "no request of this seed can be served"


def fits_and_is_best(solution: Solution) -> None:
    """What is listed fits in closed form and simulated, and the best of it is the fastest."""
    best, hardware = solution.best, solution.hardware
    for listed in (best, *solution.runners_up, *solution.by_num_subsequences):
        assert listed.shortfall is None
        assert listed.device_peak_bytes <= hardware.device.usable_bytes
        assert listed.host_peak_bytes <= hardware.host_bytes_per_device
        assert max(listed.simulated_bytes) <= listed.device_peak_bytes + 8
        # Units are cut over ranks (MSP) where a run asks for it, however slow that is.
        if best.candidate.schedule != "sppo_msp" or solution.run.parallel.schedule == "auto":
            assert best.step_s <= listed.step_s * (1 + ROUNDING) / WORTH_IT
    for listed in solution.runners_up:  # slower by up to that for less host memory alone
        as_fast = listed.step_s <= best.step_s
        assert not as_fast or listed.node_host_bytes >= best.node_host_bytes


def no_key_more_is_faster(run: RunConfig, dice: random.Random) -> None:
    """Writing one more key gives no faster plan in the tiers in which the solver finds one."""
    open_keys = []
    for name in KEYS:
        section, key = name.split(".")
        if key in run.parallel.open_degrees or getattr(getattr(run, section), key) == "auto":
            open_keys.append(name)
    found = None
    with suppress(ValueError):
        found = quick_best(run, hardware_for(run.hardware))
    for name in dice.sample(open_keys, 2):
        written = None
        with suppress(ValueError):
            more = load_run(run, {name: dice.choice(KEYS[name])})
            written = quick_best(more, hardware_for(run.hardware))
        if found is None or written is None:
            assert written is None
        elif tiers(found) == tiers(written):
            assert found.step_s <= SLOWER * written.step_s


def tiers(evaluated: EvaluatedCandidate) -> tuple[object, ...]:
    """Tiers of the state and of activations: farther ones, which a key may need, may be faster."""
    return evaluated.candidate.state, evaluated.candidate.tier


def keeps_what_is_written(run: RunConfig, solution: Solution) -> None:
    """Every key of the run that is not left to the solver has its value in all that is listed."""
    parallel, asked = run.parallel, run.sequence.num_subsequences
    for listed in (solution.best, *solution.runners_up, *solution.by_num_subsequences):
        candidate, degrees = listed.candidate, listed.degrees
        for name, chosen in (
            ("pipeline_parallel_degree", degrees.pipeline_parallel),
            ("sequence_parallel_degree", degrees.sequence_parallel),
        ):
            assert name in parallel.open_degrees or getattr(parallel, name) == chosen
        for written, chosen in (
            (parallel.schedule, candidate.schedule),
            (parallel.virtual_stages, candidate.virtual_stages),
            (1 if parallel.schedule in WHOLE_SEQUENCES else asked, len(candidate.lengths)),
            (run.activations.policy, candidate.policy),
            (run.state.optimizer, candidate.state.optimizer),
        ):
            assert written in ("auto", chosen)


def agrees_with_its_plan(run: RunConfig, solution: Solution) -> None:
    """A plan holds what was promised, and its program takes as long as was simulated."""
    best = solution.best
    plan = make_plan(run, best)
    assert plan.predicted.device_peak_bytes == best.device_peak_bytes
    played = plan.evaluated()
    schedule, costs = played.case()
    timeline = simulate(schedule, costs=costs)
    peaks = [
        steady + round(track.memory["total"].peak_bytes)
        for steady, track in zip(played.steady_bytes, timeline.ranks, strict=True)
    ]
    assert played.candidate.num_devices == best.degrees.num_devices
    assert max(peaks) <= plan.predicted.device_peak_bytes + 8
    assert peaks == list(best.simulated_bytes)
    assert timeline.makespan_s == pytest.approx(plan.predicted.step_s)


def is_trained(run: RunConfig, solution: Solution) -> None:
    """Training refuses nothing of what is recommended, whatever it looks at before it begins."""
    plan = make_plan(run, solution.best)
    followed = followed_plan(run, plan)
    assert not [*degree_problems(followed, degrees=Degrees.of_run(followed))]
    check_trainable(followed, plan, kind=plan.hardware.device.kind)


@pytest.mark.parametrize("seed", default_of(range(12), *range(5)))
def test_what_is_recommended_is_trained_where_many_ranks_share_few_tokens(seed: int):
    dice = random.Random(f"trained {seed}")
    parallel: dict[str, object] = {"virtual_stages": dice.choice([1, 2, "auto"])}
    parallel |= dice.choice([{}, {"multiplexed": "on"}, {"schedule": "sppo_msp"}])
    run = run_config(
        dice.choice(["llama-3.2-1b", "gpt-7b"]),
        length=dice.choice([256, 1024, 3000]),
        sequence={
            "num_subsequences": dice.choice([8, 24, 64]),
            "partition": dice.choice(["length", "flops"]),
        },
        parallel=parallel,
        hardware={"preset": "a100-80g", "nodes": dice.choice([1, 2, 4])},
    )
    solution = answer(run)
    if solution is not None and solution.best is not None:
        is_trained(run, solution)


def commands_agree(request: RunConfig, solution: Solution) -> None:
    """`estimate` and `simulate` say of a request what `solve` recommends for it."""
    best, hardware = solution.best, solution.hardware
    evaluated = estimate(request, hardware=hardware).evaluated
    assert evaluated.degrees == best.degrees
    assert evaluated.candidate.lengths == best.candidate.lengths
    assert evaluated.candidate.schedule == best.candidate.schedule
    assert evaluated.shortfall is None
    assert evaluated.device_peak_bytes == best.device_peak_bytes
    assert evaluated.host_peak_bytes == best.host_peak_bytes
    assert evaluated.node_host_bytes == best.node_host_bytes
    schedule, costs = evaluated.case()
    assert simulate(schedule, costs=costs).makespan_s == pytest.approx(best.step_s)
    assert evaluated.step_s == pytest.approx(best.step_s)
