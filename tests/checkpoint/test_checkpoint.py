"""Checkpoints: round trips, damage, full disks, background saves."""

import errno
import logging
import shutil
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sppo.checkpoint import checkpoint as checkpoint_module
from sppo.checkpoint import manifest as checkpoint_manifest
from sppo.checkpoint import newest as checkpoint_newest
from sppo.checkpoint.checkpoint import CheckpointError, CheckpointManager, read_weights
from sppo.checkpoint.files import list_checkpoints, run_metadata
from sppo.checkpoint.newest import InvalidCheckpointError, find_checkpoint
from sppo.config import RunConfig
from tests.checkpoint.damage import flip_a_bit, truncate
from tests.make import make_run
from tests.tiers import exhaustive

KEYS = ("model.embed.weight", "model.final_norm.weight", "optimizer.exp_avg.embed.weight")


def _state(step):
    generator = torch.Generator().manual_seed(step)
    return {
        KEYS[0]: torch.randn(33, 17, generator=generator),
        KEYS[1]: torch.randn(17, generator=generator),
        KEYS[2]: torch.randn(33, 17, generator=generator),
        "optimizer.step": torch.tensor(step),
    }


def _blank():
    return {key: torch.full_like(tensor, -1) for key, tensor in _state(0).items()}


def _manager(directory, *, keep=3, async_save=False):
    return CheckpointManager(directory / "checkpoints", keep=keep, async_save=async_save)


def _saved(directory, *steps, keep=3):
    manager = _manager(directory, keep=keep)
    for step in steps:
        manager.save(_state(step), step=step, metadata={"sequences_consumed": 2 * step})
    return manager


def _save_and_wait(manager, *, step):
    manager.save(_state(step), step=step, metadata={})
    manager.wait()


def _names(directory):
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def _assert_holds(manager, *, step):
    found = manager.latest_valid()
    assert found.step == step
    state = _blank()
    manager.load_into(found, state)
    for key, tensor in _state(step).items():
        assert torch.equal(state[key], tensor), key


def test_what_was_saved_comes_back_in_place(tmp_path):
    manager = _saved(tmp_path, 4, 12)
    _assert_holds(manager, step=12)
    assert _names(tmp_path) == ["step_000004", "step_000012"]
    state = _blank()
    addresses = {key: tensor.data_ptr() for key, tensor in state.items()}
    manager.load_into(find_checkpoint(tmp_path / "checkpoints" / "step_000004"), state)
    assert torch.equal(state[KEYS[0]], _state(4)[KEYS[0]])
    assert {key: tensor.data_ptr() for key, tensor in state.items()} == addresses


def test_metadata_is_all_that_a_run_needs_to_go_on(tmp_path):
    config = make_run()
    manager = _manager(tmp_path)
    manager.save(_state(5), step=5, metadata=run_metadata(config, sequences_consumed=20))
    found = manager.latest_valid()
    assert found.metadata["step"] == 5
    assert found.metadata["sequences_consumed"] == 20
    assert RunConfig.model_validate(found.metadata["config"]) == config
    assert found.metadata["sppo_version"]


def test_steps_beyond_a_million_keep_their_order(tmp_path):
    manager = _saved(tmp_path, 999_999, 1_000_000)
    _assert_holds(manager, step=1_000_000)


# Damage -----------------------------------------------------------------------------------------


def _grow(path):
    path.write_bytes(path.read_bytes() + b"\0")


def _warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("file", "spoil", "says"),
    [
        ("__0_0.distcp", truncate, "were written"),
        ("__0_0.distcp", flip_a_bit, "are not those that were written"),
        ("__0_0.distcp", _grow, "were written"),
        ("__0_0.distcp", Path.unlink, "missing"),
        (".metadata", flip_a_bit, "are not those that were written"),
        ("metadata.json", flip_a_bit, "are not those that were written"),
        ("manifest.json", Path.unlink, "missing"),
        ("manifest.json", truncate, "not a manifest"),
        ("manifest.json", lambda path: path.write_text("[" * 3000), "not a manifest"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(
    tmp_path, caplog, file, spoil, says
):
    _saved(tmp_path, 10, 12)
    spoil(tmp_path / "checkpoints" / "step_000012" / file)
    with caplog.at_level(logging.WARNING):
        _assert_holds(_manager(tmp_path), step=10)
    (message,) = _warnings(caplog)
    for part in ("step_000012", file, says, "using step_000010"):
        assert part in message, message


def test_damaged_checkpoints_are_all_named(tmp_path, caplog):
    _saved(tmp_path, 1, 2, 3)
    for step in (2, 3):
        truncate(tmp_path / "checkpoints" / f"step_{step:06d}" / "__0_0.distcp")
    _assert_holds(_manager(tmp_path), step=1)
    third, second = _warnings(caplog)
    assert "step_000003" in third
    assert "step_000002" in second


def test_a_run_passes_a_damaged_checkpoint_and_replaces_it(tmp_path):
    _saved(tmp_path, 10, 12, 14, keep=3)
    for step in (12, 14):
        flip_a_bit(tmp_path / "checkpoints" / f"step_{step:06d}" / "__0_0.distcp")
    manager = _manager(tmp_path, keep=3)
    _assert_holds(manager, step=10)
    manager.save(_state(12), step=12, metadata={})
    assert _names(tmp_path) == ["step_000010", "step_000012"]
    _assert_holds(_manager(tmp_path), step=12)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("flips")
    _saved(directory, 1, 2)
    return directory


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_flipped_bit_anywhere_is_found(two_checkpoints, data):
    newest = two_checkpoints / "checkpoints" / "step_000002"
    path = data.draw(st.sampled_from(sorted(newest.iterdir())))
    original = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(original) - 1))
    spoiled = bytearray(original)
    spoiled[bit // 8] ^= 1 << bit % 8
    path.write_bytes(spoiled)
    try:
        found = _manager(two_checkpoints).latest_valid()
    finally:
        path.write_bytes(original)
    assert found.step == 1


def test_large_files_are_summed_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_manifest, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(checkpoint_manifest, "_READ_BYTES", 300)
    _saved(tmp_path, 1)
    path = tmp_path / "checkpoints" / "step_000001"
    assert checkpoint_manifest.find_damage(path) is None
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[2345] ^= 1
    (path / "__0_0.distcp").write_bytes(content)
    assert "bytes 2000-3000" in str(checkpoint_manifest.find_damage(path))


# Loading ----------------------------------------------------------------------------------------


def test_weights_can_be_loaded_alone_and_narrower(tmp_path):
    manager = _saved(tmp_path, 1)
    found = manager.latest_valid()
    weight = {KEYS[0]: torch.zeros(33, 17, dtype=torch.bfloat16)}
    manager.load_into(found, weight)
    assert torch.equal(weight[KEYS[0]], _state(1)[KEYS[0]].bfloat16())


def test_read_weights_takes_a_run_or_a_checkpoint_of_any_name(tmp_path):
    run = tmp_path / "step_000001"  # a run may be called like a step
    _saved(run, 5, 7)
    shutil.copytree(run / "checkpoints" / "step_000007", tmp_path / "best")
    for path in (run, run / "checkpoints", run / "checkpoints" / "step_000007", tmp_path / "best"):
        checkpoint, weights = read_weights(path)
        assert checkpoint.step == checkpoint.metadata["step"] == 7
        assert weights.keys() == {"embed.weight", "final_norm.weight"}
        assert torch.equal(weights["embed.weight"], _state(7)[KEYS[0]])
    newest = run / "checkpoints" / "step_000007"
    flip_a_bit(newest / "__0_0.distcp")
    with pytest.raises(InvalidCheckpointError, match=r"step_000007 is damaged: __0_0\.distcp"):
        read_weights(newest)
    assert read_weights(run)[0].step == 5


@pytest.mark.parametrize(
    ("below", "says"),
    [
        ("nowhere", "holds no checkpoint"),
        ("", "holds no checkpoint"),
        ("step_000003", "is not a directory"),
    ],
)
def test_read_weights_without_a_checkpoint_says_what_to_give(tmp_path, below, says):
    with pytest.raises(InvalidCheckpointError, match=says):
        read_weights(tmp_path / below)


# Readers beside a run ---------------------------------------------------------------------------


def _save_before(monkeypatch, owner, name, manager):
    """Let the run save another step, and delete the older one, just before the reader's call."""
    real, steps = getattr(owner, name), iter((6, 7, 8))

    def call(*words, **named):
        step = next(steps, None)
        if step is not None:
            manager.save(_state(step), step=step, metadata={})
        return real(*words, **named)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (checkpoint_newest, "find_damage"),
        (checkpoint_newest, "_open"),
        (checkpoint_module, "saved_shapes"),
        (checkpoint_module, "read_tensors"),
    ],
)
@pytest.mark.parametrize("keep", [1, *exhaustive(2)])
def test_a_run_that_saves_at_any_moment_of_a_reader(tmp_path, monkeypatch, owner, name, keep):
    _save_before(monkeypatch, owner, name, _saved(tmp_path, 5, keep=keep))
    checkpoint, weights = read_weights(tmp_path)
    step = checkpoint.step
    assert 5 <= step <= 8
    assert torch.equal(weights["embed.weight"], _state(step)[KEYS[0]])


def test_one_checkpoint_that_the_run_deletes_is_not_called_damaged(tmp_path, monkeypatch):
    _save_before(monkeypatch, checkpoint_newest, "find_damage", _saved(tmp_path, 5, keep=1))
    with pytest.raises(InvalidCheckpointError, match="A run keeps its newest ones: name .*points"):
        read_weights(tmp_path / "checkpoints" / "step_000005")


def test_names_that_change_while_they_are_read(tmp_path, monkeypatch):
    """A directory that is read while one name comes and another goes may show neither."""
    _saved(tmp_path, 5, keep=1)
    looks = iter([[]])
    real = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: next(looks, None) or real(path))
    assert [step for step, _ in list_checkpoints(tmp_path / "checkpoints")] == [5]


# Full disks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["tensors", "metadata", "manifest", "rename"])
@pytest.mark.parametrize("async_save", [False, True])
def test_a_disk_that_fills_up_leaves_no_trace(tmp_path, monkeypatch, when, async_save):
    _saved(tmp_path, 1)
    manager = _manager(tmp_path, async_save=async_save)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    names = {
        "tensors": "save_tensors",
        "metadata": "write_json",
        "manifest": "write_manifest",
        "rename": "publish",
    }
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, names[when], full)
        with pytest.raises(CheckpointError, match="No space left on device") as error:
            _save_and_wait(manager, step=2)
    assert error.value.errno == errno.ENOSPC
    assert _names(tmp_path) == ["step_000001"]
    _assert_holds(manager, step=1)
    _save_and_wait(manager, step=2)
    _assert_holds(manager, step=2)


def test_a_save_that_fails_names_the_newest_whole_checkpoint(tmp_path, monkeypatch):
    """Not one that was found damaged when the run began, nor one that was cut since."""
    _saved(tmp_path, 8, 12)
    flip_a_bit(tmp_path / "checkpoints" / "step_000012" / "__0_0.distcp")
    manager = _manager(tmp_path)
    manager.load_into(manager.latest_valid(), _blank())
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(checkpoint_module, "save_tensors", full)
    with pytest.raises(CheckpointError, match="the newest is step_000008: what was trained after"):
        _save_and_wait(manager, step=13)
    truncate(tmp_path / "checkpoints" / "step_000008" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="untouched, and there is none: all that was trained"):
        _save_and_wait(manager, step=13)


def test_an_unwritable_directory_is_a_checkpoint_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match="cannot save step 1"):
        _manager(tmp_path).save(_state(1), step=1, metadata={})


class _Copies(TorchDispatchMode):
    """Bytes of the copies of tensors that are held at the same time, at most."""

    def __init__(self):
        super().__init__()
        self._made = []
        self.most_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self._made.append(result)
            held = sum(tensor.untyped_storage().nbytes() for tensor in self._made)
            self.most_bytes = max(self.most_bytes, held)
        return result


def test_a_save_copies_one_strided_block_at_a_time_and_no_view(tmp_path):
    """State behind the device is views of one mapping: copies of all of it would not fit."""
    mapping = torch.arange(12 * 64 * 16, dtype=torch.float32)
    rows = mapping.view(12, 64, 16)
    columns = torch.arange(3 * 64 * 16, dtype=torch.bfloat16).view(3, 64, 16)[..., :8]
    state = {f"rows.{i}": view for i, view in enumerate(rows)}
    state |= {f"columns.{i}": view for i, view in enumerate(columns)}
    with _Copies() as copies:
        _manager(tmp_path).save(state, step=1, metadata={})
    assert copies.most_bytes == columns[0].numel() * 2
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    manager = _manager(tmp_path)
    found = manager.latest_valid()
    manager.load_into(found, loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


# In the background ------------------------------------------------------------------------------


@pytest.mark.parametrize("async_save", [False, True])
def test_what_is_in_cpu_memory_does_not_wait_for_a_gpu(tmp_path, monkeypatch, async_save):
    """As it would for all that training has queued, on a stream of the first device."""
    current_stream = mock.Mock(side_effect=AssertionError("a device was asked for its stream"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    manager = _manager(tmp_path, async_save=async_save)
    _save_and_wait(manager, step=2)
    _assert_holds(manager, step=2)


def test_a_background_save_holds_the_state_of_its_step(tmp_path, monkeypatch):
    go_on = threading.Event()
    real = checkpoint_module.save_tensors

    def slow(*args, **kwargs):
        assert go_on.wait(10)
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint_module, "save_tensors", slow)
    manager = _manager(tmp_path, async_save=True)
    state = _state(3)
    manager.save(state, step=3, metadata={})
    for tensor in state.values():
        tensor.zero_()
    assert manager.latest_valid() is None
    go_on.set()
    manager.wait()
    _assert_holds(manager, step=3)


def test_a_failed_background_save_surfaces_once_at_the_next_save(tmp_path, monkeypatch):
    manager = _manager(tmp_path, async_save=True)
    broken = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "save_tensors", broken)
        manager.save(_state(1), step=1, metadata={})
        with pytest.raises(CheckpointError, match="cannot save step 1"):
            manager.save(_state(2), step=2, metadata={})
    manager.save(_state(2), step=2, metadata={})
    manager.wait()
    assert _names(tmp_path) == ["step_000002"]
