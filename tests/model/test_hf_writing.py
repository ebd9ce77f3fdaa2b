"""Writing of the Hugging Face layout, complete or not at all, under limits of size and space."""

import errno
import json
import shutil
import stat
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from sppo.config import PRESETS, ModelConfig
from sppo.cost.parameters import parameter_shapes
from sppo.model.huggingface import writing as hf_writing
from sppo.model.huggingface.reading import open_hf_weights
from sppo.model.huggingface.writing import plan_shards, save_hf_weights
from sppo.model.initialize import initial_weights
from tests.model.hf_models import tiny_hf_model

MODEL = ModelConfig.model_validate(PRESETS["tiny-test"])


@pytest.fixture
def weights():
    return initial_weights(MODEL, seed=3)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    limit=st.integers(1, 120),
)
def test_shards_hold_everything_once_in_order(sizes, limit):
    named = {f"t{index}": size for index, size in enumerate(sizes)}
    shards = plan_shards(named, max_shard_bytes=limit)
    assert [name for shard in shards.values() for name in shard] == list(named)
    for shard in shards.values():
        assert len(shard) == 1 or sum(named[name] for name in shard) <= limit
    groups = list(shards.values())
    for first, second in zip(groups, groups[1:], strict=False):
        assert sum(named[name] for name in first) + named[second[0]] > limit
    assert list(shards) == sorted(shards)


def test_shard_names_and_limit():
    assert list(plan_shards({"a": 1}, max_shard_bytes=9)) == ["model.safetensors"]
    names = list(plan_shards({"a": 1, "b": 1}, max_shard_bytes=1))
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    with pytest.raises(ValueError, match="allow at least 1"):
        plan_shards({"a": 1}, max_shard_bytes=0)


def test_layout_of_one_file(tmp_path, weights):
    saved = save_hf_weights(
        tmp_path / "m",
        weights,
        MODEL,
        dtype="bf16",
        token_ids={"eos_token_id": 256},
        extra_files={"tokenizer.json": b"{}"},
    )
    names = sorted(path.name for path in (tmp_path / "m").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert saved.files == ("model.safetensors",)
    assert saved.num_parameters == sum(w.numel() for w in weights.values())
    assert saved.total_bytes == 2 * saved.num_parameters
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == (256, None)
    assert config["torch_dtype"] == "bfloat16"
    with safe_open(tmp_path / "m" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    stored = open_hf_weights(tmp_path / "m", MODEL)
    assert all(torch.equal(stored[name], w.bfloat16()) for name, w in weights.items())


def test_layout_of_shards(tmp_path, weights):
    saved = save_hf_weights(tmp_path / "m", weights, MODEL, dtype="fp32", max_shard_bytes=40_000)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert len(saved.files) > 2
    assert index["metadata"] == {"total_size": saved.total_bytes}
    assert set(index["weight_map"].values()) == set(saved.files)
    for name in saved.files:
        assert (tmp_path / "m" / name).stat().st_size < 40_000 + 4096


def test_files_are_readable_by_whom_the_directory_allows(tmp_path, weights):
    save_hf_weights(tmp_path / "m", weights, MODEL, dtype="fp32")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "m").iterdir()}
    assert len(modes) == 1


def test_an_empty_directory_and_a_new_path_are_filled(tmp_path, weights):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    save_hf_weights(tmp_path / "link", weights, MODEL, dtype="fp32")
    save_hf_weights(tmp_path / "new" / "er", weights, MODEL, dtype="fp32")
    assert (tmp_path / "empty" / "config.json").is_file()
    assert (tmp_path / "new" / "er" / "config.json").is_file()


@pytest.mark.parametrize("kind", ["used", "file", "dangling"])
def test_what_is_there_is_left_alone(kind, tmp_path, weights):
    target = tmp_path / "m"
    if kind == "used":
        target.mkdir()
        (target / "precious").write_text("x")
    elif kind == "file":
        target.write_text("x")
    else:
        target.symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="name a new directory"):
        save_hf_weights(target, weights, MODEL, dtype="fp32")
    assert sorted(tmp_path.rglob("*")) == before


def test_too_little_space_is_seen_before_writing(tmp_path, weights, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="1000 B are free") as error:
        save_hf_weights(tmp_path / "new" / "m", weights, MODEL, dtype="fp32")
    assert error.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, weights, monkeypatch):
    full = mock.Mock(
        side_effect=SafetensorError("I/O error: No space left on device (os error 28)")
    )
    monkeypatch.setattr(hf_writing, "save_file", full)
    with pytest.raises(OSError, match="No space left") as error:
        save_hf_weights(tmp_path / "m", weights, MODEL, dtype="fp32")
    assert error.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_weights_of_another_model(tmp_path, weights):
    missing = {name: w for name, w in weights.items() if name != "final_norm.weight"}
    with pytest.raises(ValueError, match="missing final_norm.weight, unknown none"):
        save_hf_weights(tmp_path / "m", missing, MODEL, dtype="fp32")
    misshapen = {**weights, "final_norm.weight": torch.ones(3)}
    with pytest.raises(ValueError, match=r"model.norm.weight \[3\], needs \[32\]"):
        save_hf_weights(tmp_path / "m", misshapen, MODEL, dtype="fp32")
    assert not list(tmp_path.iterdir())


def test_a_parameter_of_all_experts_is_looked_up_once(tmp_path):
    class Counted(dict):
        def __getitem__(self, name):
            seen.append(name)
            return super().__getitem__(name)

    seen = []
    _, model = tiny_hf_model("mixtral")
    save_hf_weights(tmp_path / "m", Counted(initial_weights(model, seed=0)), model, dtype="fp32")
    assert seen == list(parameter_shapes(model))


def test_a_model_without_a_family(tmp_path, weights):
    model = MODEL.model_copy(update={"norm": "layernorm"})
    with pytest.raises(ValueError, match="norm is layernorm, needs rmsnorm"):
        save_hf_weights(tmp_path / "m", weights, model, dtype="fp32")
