"""Random requests: writing one more key, of those that the solver chooses, gives no faster plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

import pytest

from sppo.config.run import RunConfig
from sppo.cost.state_tiers import StateTiers
from sppo.hardware.run_hardware import hardware_for
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.search.solver import quick_best
from tests.make import make_run
from tests.tiers import default_of

REQUESTS = 200
SLOWER = 1.01
"""Most by which an answer may be slower than one with a key more, relative to that."""
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


def with_key(sections: dict[str, dict[str, object]], key: str, value: object):
    """Return the sections of a run file with one more key."""
    section, name = key.split(".")
    return {**sections, section: {**sections.get(section, {}), name: value}}


def made(sections: dict[str, dict[str, object]]) -> RunConfig | None:
    """Return the request of a run file; None if the file contradicts itself."""
    with suppress(ValueError):
        return make_run(**sections)
    return None


def some_request(dice: random.Random) -> dict[str, dict[str, object]]:
    """Return the sections of a run file: a model, sequences, some devices, few of the keys."""
    sections: dict[str, dict[str, object]] = {
        "model": {"preset": dice.choice(("tiny", "llama-3.2-1b", "gpt-7b", "llama-3.1-8b"))},
        "sequence": {"length": dice.choice(("4Ki", "16Ki", "48Ki", "128Ki", "300000", "1Mi"))},
        "train": {"sequences_per_step": dice.choice((1, 1, 2, 4, 6))},
        "hardware": {
            "preset": dice.choice(("a100-80g", "h100", "h200")),
            "devices_per_node": dice.choice((1, 2, 4, 8)),
            "nodes": dice.choice((1, 1, 1, 2)),
        },
    }
    for key in dice.sample([*KEYS], dice.choice((0, 0, 1, 2))):
        sections = with_key(sections, key, dice.choice(KEYS[key]))
    return sections


def fastest(sections: dict[str, dict[str, object]]) -> EvaluatedCandidate | None:
    """Return the fastest plan; None if there is none.

    The plan that is recommended may take up to 1 % longer for less host memory.
    """
    run = made(sections)
    with suppress(ValueError):
        if run is not None:
            return quick_best(run, hardware_for(run.hardware))
    return None


def tiers(evaluated: EvaluatedCandidate) -> tuple[StateTiers, str]:
    """Return the tiers of the state and of activations, of which the nearest that fit are chosen.

    A key that does not fit in these is answered in farther ones, which may be faster.
    """
    return evaluated.candidate.state, evaluated.candidate.activation_tier


def compared(seed: int) -> Iterator[tuple[str, float]]:
    """Yield the keys that are written further, and the time of a step without them relative to it.

    Args:
        seed: Seed of the request.
    """
    dice = random.Random(f"one more key {seed}")
    sections = some_request(dice)
    while made(sections) is None:
        sections = some_request(dice)
    found = fastest(sections)
    more = [key for key in KEYS if key.split(".")[1] not in sections.get(key.split(".")[0], {})]
    for key in dice.sample(more, 2):
        value = dice.choice(KEYS[key])
        written = fastest(with_key(sections, key, value))
        if written is None or (found is not None and tiers(found) != tiers(written)):
            continue
        times = float("inf") if found is None else found.step_s / written.step_s
        yield f"{sections} {key}={value}", times


@pytest.mark.parametrize("seed", default_of(range(REQUESTS), *range(4)))
def test_no_key_more_makes_the_answer_faster(seed: int):
    assert {key: times for key, times in compared(seed) if times > SLOWER} == {}
