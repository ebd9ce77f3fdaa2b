"""Checkpoints of runs that freeze weights: what they hold, and the base that they need."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from sppo.config import load_run
from sppo.model.huggingface.peft_weights import open_adapter
from sppo.model.huggingface.writing import save_hf_weights
from sppo.model.initialize import initial_weights
from sppo.training.evaluation.evaluated_run import evaluate
from tests.conftest import RUN, refuse, succeed, write_run, write_tokens
from tests.tiers import exhaustive
from tests.training.jobs import job_of_rank, losses, saved_state, train_alone, train_rank

SECTIONS = {
    "model": {"num_layers": 2, "num_heads": 2, "num_kv_heads": 2},
    "adapter": {"rank": 2, "alpha": 3, "also_train": ["norms"]},
    "optimizer": {"schedule": "constant", "eps": 1e-4},
    "checkpoint": {"every": 3, "keep": 9},
}
LAST = "out/checkpoints/step_000006"


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    """Directory with a base ``hf``, and ``run.yaml``, which has trained six steps beside it."""
    directory = tmp_path_factory.mktemp("adapter")
    with contextlib.chdir(directory):
        write_tokens(directory / "tokens")
        model = load_run(write_run(directory / "random.yaml", **SECTIONS)).model
        save_hf_weights(directory / "hf", initial_weights(model, seed=3), model, dtype="fp32")
        raw = json.loads(load_run("random.yaml").model_dump_json(exclude_unset=True))
        raw |= {"model": {"from_hf": "hf"}, "train": raw["train"] | {"steps": 6}}
        (directory / "run.yaml").write_text(json.dumps(raw))
        train_alone(load_run(directory / "run.yaml"))
    return directory


@pytest.fixture
def run(work, trained_once):
    """Copy of that directory, which is the working directory."""
    return Path(shutil.copytree(trained_once, work, dirs_exist_ok=True))


def evaluated(*words):
    answer = json.loads(succeed("eval", "run.yaml", "--json", *words))
    return answer["loss"]


def test_checkpoint_holds_what_trains_and_a_resumed_run_is_the_uninterrupted_one(run):
    before = saved_state(run / LAST)
    names = {key.removeprefix("model.") for key in before if key.startswith("model.")}
    assert "layers.1.q.lora_a" in names
    assert all("lora_" in name or "norm" in name for name in names)
    assert len(before) == 3 * len(names) + 1
    kept = losses(run / "out")
    shutil.rmtree(run / LAST)
    train_alone(load_run(run / "run.yaml"))
    assert losses(run / "out") == kept
    after = saved_state(run / LAST)
    assert all(torch.equal(tensor, before[key]) for key, tensor in after.items())


def evaluated_and_trained(rank, directory, values):
    """Evaluate the newest checkpoint as one rank, and go on from it up to step 6."""
    with contextlib.chdir(directory):
        job = job_of_rank(load_run(Path("run.yaml"), values), rank)
        loss = evaluate(job, Path("out"), most=None, on_sequence=lambda *done: None).loss
        train_rank(rank, directory, values)
    return loss


@pytest.mark.parametrize(
    "degrees",
    [
        ["parallel.sequence_parallel_degree=2", "parallel.sequence_parallel=megatron"],
        *exhaustive(
            ["parallel.pipeline_parallel_degree=2"],
            [
                "parallel.sequence_parallel_degree=2",
                "parallel.zero=3",
                "checkpoint.async_save=true",
            ],
        ),
    ],
    ids=str,
)
def test_other_degrees_evaluate_and_go_on(ranks, run, degrees):
    kept = torch.tensor(losses(run / "out"))
    shutil.rmtree(run / LAST)
    loss = evaluated()
    found = ranks.run(evaluated_and_trained, run, degrees, ranks=2)
    assert found == pytest.approx([loss, loss], rel=1e-5)
    torch.testing.assert_close(torch.tensor(losses(run / "out")), kept, rtol=1e-4, atol=0)
    assert (run / LAST / "adapter").is_dir()


def test_evaluation_reads_the_base_and_refuses_other_adapters(run):
    trained_loss, initial = evaluated(), evaluated("--initial")
    assert trained_loss < initial
    assert evaluated("--checkpoint", LAST) == trained_loss
    other = refuse("eval", "run.yaml", "adapter.rank=3", "--checkpoint", LAST)
    assert "trained with an adapter of rank 2 and scale 1.5, q, k, v, o, gate, up, down" in other
    assert "the run file has an adapter of rank 3 and scale 1, q" in other


def test_another_base_is_refused_and_one_that_is_gone_is_named(run):
    other = load_run(run / "run.yaml").model
    shutil.rmtree(run / "hf")
    assert "hf" in refuse("train", "run.yaml", "train.steps=7")
    save_hf_weights(run / "hf", initial_weights(other, seed=4), other, dtype="fp32")
    changed = f"{LAST} was trained beside other weights than hf holds now: put those back"
    for command in ("train run.yaml train.steps=7", "eval run.yaml", "convert to-peft out there"):
        assert changed in refuse(*command.split())


def test_base_may_be_divided_into_other_files(run):
    trained_loss = evaluated()
    succeed("convert", "from-hf", "hf", "divided", "--max-shard-size", "20KiB")
    shutil.rmtree(run / "hf")
    (run / "divided").rename(run / "hf")
    assert evaluated() == trained_loss


def start_from(run, **sections):
    """Run of three steps that starts from ``out`` with the keys of its model left out."""
    raw = json.loads((run / "run.yaml").read_text())
    raw |= {"model": {}, "start": {"from_run": "out"}, **sections}
    raw["train"] |= {"output": "second", "steps": 1}
    raw["optimizer"] |= {"lr": 0}
    raw = {name: section for name, section in raw.items() if section is not None}
    (run / "second.yaml").write_text(json.dumps(raw))
    return run / "second.yaml"


def test_a_run_starts_from_an_adapter_by_going_on_with_it_or_merged(run):
    trained_loss = evaluated()
    goes_on = start_from(run)
    first = json.loads(succeed("eval", goes_on, "--initial", "--json"))
    assert first["loss"] == trained_loss
    train_alone(load_run(goes_on))
    saved, before = saved_state(run / "second/checkpoints/step_000001"), saved_state(run / LAST)
    assert all(torch.equal(saved[k], v) for k, v in before.items() if k.startswith("model."))
    again = load_run(goes_on, {"train.steps": 2})
    train_alone(again)
    assert len(losses(run / "second")) == 2

    shutil.rmtree(run / "second")
    merged = start_from(run, adapter=None)
    first = json.loads(succeed("eval", merged, "--initial", "--json"))
    assert first["loss"] == pytest.approx(trained_loss, rel=1e-6)
    train_alone(load_run(merged))
    saved = saved_state(run / "second/checkpoints/step_000001")
    assert not any("lora" in key for key in saved)

    shutil.rmtree(run / "out")
    train_alone(load_run(merged, {"train.steps": 2}))


def test_with_optimizer_and_data_it_is_the_uninterrupted_run_bit_for_bit(run):
    start = {"from_run": "out", "step": 3, "optimizer": True, "data": True}
    path = start_from(run, start=start)
    train_alone(load_run(path, {"train.steps": 3, "optimizer.lr": 1e-2}))
    assert losses(run / "second") == losses(run / "out")[3:]


def test_a_run_that_froze_another_runs_weights_needs_them_to_go_on(run):
    train_alone(load_run(start_from(run)))
    (run / "hf/model.safetensors").rename(run / "hf/away.safetensors")
    for command in ("train", "eval --initial"):
        told = refuse(*command.split(), "second.yaml", "train.output=third")
        assert f"{LAST} holds only the parameters that train, and the others cannot be" in told
        assert "read from hf: hf holds neither model.safetensors nor" in told
    (run / "hf/away.safetensors").rename(run / "hf/model.safetensors")
    shutil.rmtree(run / LAST)
    told = refuse("train", "second.yaml", "train.steps=2")
    assert f"the others cannot be read from {LAST}: checkpoint {LAST} is not there" in told


def test_the_base_of_a_chain_of_adapters_is_the_published_model(run):
    train_alone(load_run(start_from(run)))
    succeed("convert", "to-peft", "second", "adapter", "--base", "hf")
    other = load_run(run / "run.yaml").model
    save_hf_weights(run / "other", initial_weights(other, seed=4), other, dtype="fp32")
    told = refuse("convert", "to-peft", "second", "there", "--base", "other")
    assert "other holds other weights than hf, beside which the adapter was trained" in told
    (run / "hf").rename(run / "away")
    (run / "other").rename(run / "hf")
    for command in ("eval second.yaml", "convert to-peft second there"):
        told = refuse(*command.split())
        assert told.startswith(f"error: {LAST} was trained beside other weights than hf holds now")


def test_the_base_of_an_adapter_on_another_runs_weights_is_what_that_run_exports(run):
    train_alone(load_run(start_from(run, adapter=None)))
    third = start_from(run, start={"from_run": "second"})
    train_alone(load_run(third, {"train.output": "third"}))
    succeed("convert", "to-hf", "second", "copy", "--dtype", "bf16")
    succeed("convert", "to-peft", "third", "adapter", "--base", "copy")
    told = refuse("convert", "to-peft", "third", "there", "--base", "hf")
    assert "hf holds other weights than second/checkpoints/step_000001, beside which the" in told


def test_initial_factors_are_needed_only_to_start(run):
    shutil.copytree(run / LAST / "adapter", run / "theirs")
    raw = json.loads((run / "run.yaml").read_text())
    raw["adapter"]["from_peft"], raw["train"] = "theirs", raw["train"] | {"output": "second"}
    (run / "run.yaml").write_text(json.dumps(raw))
    train_alone(load_run(run / "run.yaml", {"train.steps": 1}))
    before = evaluated()
    shutil.rmtree(run / "theirs")
    assert evaluated() == before
    succeed("convert", "to-hf", "second", "merged")


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"rank": 3, "alpha": 4.5, "also_train": ["norms"]}, "lora_a [2, 32] is [3, 32] here"),
        ({"rank": 2, "also_train": ["norms"]}, "its scale is 1.5 there, 1 here"),
        ({"rank": 2, "alpha": 3}, "norm.weight [32] does not train here"),
    ],
)
def test_starts_with_another_adapter_are_refused(run, adapter, message):
    told = refuse("train", start_from(run, adapter=adapter))
    assert "start.from_run=out has an adapter, and this run has another one" in told
    assert message in told


def test_globs_freeze_as_adapters_do(work):
    path = write_run(
        work / "run.yaml", **SECTIONS | {"adapter": {}}, train={"only": ["layers.1.*"], "steps": 3}
    )
    raw = path.read_text().replace("adapter: {}", "")
    path.write_text(raw)
    train_alone(load_run(path))
    saved = saved_state(work / "out/checkpoints/step_000003")
    assert all(".layers.1." in key or key == "optimizer.step" for key in saved)
    trained_loss = evaluated()
    assert trained_loss < evaluated("--initial")
    succeed("convert", "to-hf", "out", "exported")
    sections = RUN | {"model": {"from_hf": "exported"}, "optimizer": {}}
    (work / "run.yaml").write_text(json.dumps(sections))
    assert evaluated("--initial") == trained_loss


def test_each_checkpoint_holds_the_adapter_for_other_programs(run):
    weights = saved_state(run / LAST)
    section = load_run(run / "run.yaml")
    found = open_adapter(run / LAST / "adapter", section.model, section.adapter)
    assert all(torch.equal(found[name], weights[f"model.{name}"]) for name in found)
    config = json.loads((run / LAST / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "hf"
    train_alone(load_run(run / "run.yaml", {"train.steps": 7, "checkpoint.export": "none"}))
    assert not (run / "out/checkpoints/step_000007/adapter").exists()


def test_adapters_of_other_programs_are_checked_before_anything_starts(run):
    before = json.loads((run / LAST / "adapter/adapter_config.json").read_text())
    shutil.copytree(run / LAST / "adapter", run / "theirs")
    raw = json.loads((run / "run.yaml").read_text())
    raw["adapter"]["from_peft"], raw["train"]["output"] = "theirs", "second"
    (run / "second.yaml").write_text(json.dumps(raw))
    for settings, message in (
        ({"use_dora": True}, "adapter_config.json has use_dora=True: only plain LoRA"),
        ({"r": 3}, "adapter.rank is 2, r is 3 there: write adapter.rank=3"),
    ):
        (run / "theirs/adapter_config.json").write_text(json.dumps(before | settings))
        for command in ("train", "config check"):
            assert message in refuse(*command.split(), "second.yaml")
    assert not (run / "second").exists()
    shutil.rmtree(run / "theirs")
    assert "theirs holds no adapter_config.json" in refuse("train", "second.yaml")
