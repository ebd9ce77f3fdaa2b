"""Steps of packed samples by one engine: what they hold is what was predicted of each."""

from dataclasses import replace

import pytest
import torch

from sppo.engine.pipeline import Pipeline
from sppo.engine.step_programs import PlannedStep
from sppo.planning.elastic.step_planner import StepPlanner
from tests.engine.models import Trained, random_sequence, random_weights, tiny_model
from tests.random_training.samples import base_candidate, joined
from tests.tiers import each_once

LONGEST = 40


@pytest.mark.parametrize(
    ("order", "policy"),
    each_once(
        [("sppo", 1), ("seq1f1b", 1), ("gpipe", 1), ("looped_bfs", 2)],
        ["retain", "keep_attention", "recompute"],
    ),
    ids=str,
)
def test_bytes_held_are_those_predicted(order, policy):
    """Of steps one after another, the second of them the largest, by one engine."""
    (schedule, virtual), model = order, tiny_model("gqa, q/k-norm", num_layers=4)
    base = base_candidate(model, schedule=schedule, virtual_stages=virtual, policy=policy)
    base = replace(base, lengths=(LONGEST // 5,) * 5)
    planner = StepPlanner(base, alignment=1, tries_sizes=False)
    trained = Trained(
        model,
        random_weights(model, dtype=torch.float32),
        pipeline=Pipeline(schedule, num_virtual=virtual),
    )
    for lengths in ([40, 40, 5], [40, 7, 40, 3, 1, 12], [3, 3]):
        plan = planner.plan(lengths)
        data = [
            joined(random_sequence(model, tokens) for tokens in sequence.samples)
            for sequence in plan.sequences
        ]
        cuts = [sequence.boundaries for sequence in plan.sequences]
        trained.step(data, cuts, planned=PlannedStep(plan.program, plan.placements))
        (stage,) = plan.evaluated.memory
        planned, peaks = stage.device, trained.engine.take_peaks()
        saved = planned.activations_bytes + planned.loss_gradient_bytes
        assert peaks.activations_bytes == saved
        assert peaks.kv_bytes == planned.kv_bytes + planned.kv_gradients_bytes
