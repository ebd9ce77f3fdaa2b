"""File of a plan: exact, and refused if it is not what was written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sppo.config import load_run
from sppo.cost.trainable import trainable_of_run
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.make_plan import make_plan
from sppo.planning.plan import PLAN_VERSION, check_plan_fits, plan_json, planned_part, read_plan
from sppo.planning.run_plan import plan_run
from sppo.planning.search.choices import Degrees
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.units import GIB
from tests.planning.cases import candidate_of_subsequences, machine, run_config


def offloading_run(**sections):
    return run_config("llama-3.2-1b", length="128Ki", **sections)


def offloading_candidate(run=None, *, degrees=(1, 2, 4), num_subsequences=12, memory_gib=18.0):
    """On little memory, so that something of each fate is in the plan."""
    candidate = candidate_of_subsequences(
        run or offloading_run(),
        hardware=machine(memory_bytes=int(memory_gib * GIB), d2h_bytes_per_s=4e9),
        degrees=Degrees(*degrees),
        num_subsequences=num_subsequences,
    )
    return evaluate_candidate(candidate)


RUN = offloading_run()
PLAN = make_plan(RUN, offloading_candidate())


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)  # long paths are cut in messages
    path = Path("plan.json")
    path.write_text(json.dumps(plan_json(PLAN)), encoding="utf-8")
    return path


def changed(path, change):
    """The plan's file after `change`, which edits its values or gives others for them."""
    values = json.loads(path.read_text())
    replaced = change(values)
    values = values if replaced is None else replaced
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return path


def test_what_is_written_is_read(path):
    plan = read_plan(path)
    assert plan == PLAN
    assert plan_json(plan) == plan_json(PLAN)
    check_plan_fits(plan, RUN)


def test_a_plan_holds_the_candidate_it_was_made_of():
    evaluated = offloading_candidate()
    candidate = evaluated.candidate
    assert PLAN.candidate() == replace(candidate, policy=PLAN.policy)
    placement = PLAN.placement()
    for name in ("retained", "offloaded", "recomputed"):
        assert getattr(placement, name).any()
        assert (getattr(placement, name) == getattr(evaluated.placement, name)).all()
    again = evaluate_candidate(PLAN.candidate())
    assert again.device_peak_bytes == PLAN.predicted.device_peak_bytes


def _set(*keys, value):
    def change(values):
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: "{", "not JSON"),
        (lambda values: "[" * 100_000, "nested too deeply"),
        (lambda values: [values], f"version None, this is sppo .* version {PLAN_VERSION}: make"),
        (_set("version", value=0), "has version 0, this is"),
        (_set("stages", 0, "speed", value=3), "stages.0.speed: Unexpected"),
        (
            _set("predicted", "step_s", value="soon"),
            "predicted.step_s: Input should be a valid num",
        ),
        (lambda values: values.pop("boundaries") and None, "boundaries: Field required"),
        (_set("run", "sequence", "length", value=7), "its content does not match its digest"),
        (_set("predicted", "step_s", value=1.0), "its content does not match its digest"),
        (lambda values: values.pop("digest") and None, "its content does not match its digest"),
    ],
)
def test_what_is_no_plan_or_another_is_refused(path, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_plan(changed(path, change))
    assert str(path) in str(caught.value)
    assert "make it again" in str(caught.value)


def test_every_difference_from_the_run_is_named_with_both_values():
    other = offloading_run(
        sequence={"num_subsequences": 4},
        train={"dtype": "fp32", "steps": 7},
        activations={"policy": "retain"},
    )
    with pytest.raises(ValueError, match="was made for another run") as caught:
        check_plan_fits(PLAN, other)
    for difference in (
        'activations.policy was "auto", is "retain"',
        'sequence.num_subsequences was "auto", is 4',
        'train.dtype was "bf16", is "fp32"',
    ):
        assert difference in str(caught.value)
    assert "steps" not in str(caught.value)
    wider = RUN.model_copy(update={"model": RUN.model.model_copy(update={"mlp_size": 4096})})
    with pytest.raises(ValueError, match=r"model.mlp_size was 8192, is 4096"):
        check_plan_fits(PLAN, wider)


def test_a_plan_is_for_what_trains():
    adapted = offloading_run(adapter={"rank": 16})
    with pytest.raises(ValueError, match=r'adapter was null, is {"rank": 16'):
        check_plan_fits(PLAN, adapted)
    plan = replace(PLAN, run=planned_part(adapted))
    assert plan.trainable == trainable_of_run(adapted)
    check_plan_fits(plan, offloading_run(adapter={"rank": 16, "from_peft": "adapters/first"}))
    fewer = offloading_run(adapter={"rank": 8, "layers": "8-15"})
    with pytest.raises(ValueError, match=r"adapter.layers was null, .*; adapter.rank was 16, is 8"):
        check_plan_fits(plan, fewer)
    with pytest.raises(ValueError, match=r'train.only was null, is \["embed'):
        check_plan_fits(PLAN, offloading_run(train={"only": ["embed.*"]}))


def test_a_plan_of_documents_is_not_for_a_stream():
    stream = run_config("tiny", length=1024, parallel={"multiplexed": "off"})
    data = {"data.samples": "documents", "train.samples_per_step": 4}
    documents = run_of_longest_samples(load_run(stream, data))
    plan = plan_run(documents, hardware=machine(), available_bytes=8 * GIB, host_bytes=GIB)
    check_plan_fits(plan, documents)
    with pytest.raises(ValueError, match=r"data.samples was .* train.samples_per_step was"):
        check_plan_fits(plan, stream)


def test_a_plan_rests_on_the_shape_of_a_model_wherever_it_comes_from():
    """Neither its name, nor its weights, nor its rotation changes a plan."""
    scaling = RUN.model.rope_scaling.model_copy(update={"factor": 2.0})
    of_checkpoint = {"preset": None, "from_hf": "models/llama", "rope_scaling": scaling}
    of_checkpoint |= {"max_positions": 1 << 18, "init_std": 0.1, "norm_eps": 1e-6}
    same = RUN.model.model_copy(update=of_checkpoint)
    check_plan_fits(PLAN, RUN.model_copy(update={"model": same}))


def test_what_a_plan_does_not_rest_on_may_change():
    check_plan_fits(
        PLAN,
        offloading_run(
            train={"steps": 7, "seed": 3}, optimizer={"lr": 1.0}, parallel={"timeout_s": 5}
        ),
    )
    assert "lr" not in json.dumps(planned_part(RUN))
    assert "timeout_s" not in json.dumps(planned_part(RUN))


def test_predictions_agree_with_each_other():
    predicted = PLAN.predicted
    tokens = RUN.sequence.length / predicted.step_s / 8
    assert predicted.tokens_per_s_per_gpu == pytest.approx(tokens)
    assert 0 < predicted.mfu < 1
    assert 0 <= predicted.bubble_fraction < 1
    assert predicted.forward_s + predicted.backward_s < predicted.step_s
    assert len(predicted.offload_ratios) == len(PLAN.lengths)
    assert predicted.offload_ratios[-1] == 0
    assert predicted.host_peak_bytes == max(s.memory.tier_activations_bytes for s in PLAN.stages)
    assert predicted.disk_peak_bytes == 0
