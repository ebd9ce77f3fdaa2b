"""Checkpoints of several ranks: saved in one layout, loaded in another, whole or not at all."""

import errno

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_plainly

from sppo.checkpoint.checkpoint import CheckpointManager, read_weights
from sppo.checkpoint.manifest import sum_files, write_manifest
from sppo.checkpoint.newest import find_checkpoint
from sppo.checkpoint.tensors import read_tensors, saved_shapes
from sppo.output_file import write_json
from tests.checkpoint import faulty_ranks as faulty
from tests.checkpoint import resharding_ranks as work
from tests.checkpoint.damage import flip_a_bit
from tests.tiers import each_once, exhaustive

LAYOUTS = ["whole", "rows", "grid", *(f"random {i}" for i in range(4))]
SOME_LAYOUTS = ["grid", "random 1", "random 2"]
"""What the default tier loads in."""
SAVING_RANKS, DEFAULT_SIZE = 4, 3


@pytest.fixture(scope="module", name="ranks")
def _ranks(ranks):
    """Function that returns what one of a group returns on each rank; 0 ranks have no group."""

    def run(function, *arguments, size):
        if size == 0:
            return [function(None, *arguments)]
        return ranks.run(work.in_group, function, *arguments, ranks=size)

    return run


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Step 3, saved by four ranks, in a directory for each layout."""
    directory = tmp_path_factory.mktemp("saved")
    ranks(work.save_layouts, str(directory), LAYOUTS, size=SAVING_RANKS)
    return directory


def _step(directory, step):
    return directory / "checkpoints" / f"step_{step:06d}"


# Layouts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [DEFAULT_SIZE, *exhaustive(0, 1, 2, 5)])
def test_any_number_of_ranks_loads_what_four_have_saved(ranks, saved, size):
    wanted = SOME_LAYOUTS if size == DEFAULT_SIZE else LAYOUTS
    compared = ranks(work.load_layouts, str(saved), LAYOUTS, wanted, size=size)
    assert sum(compared) >= 10 * len(LAYOUTS) * len(wanted)


def test_several_ranks_load_what_one_has_saved(ranks, tmp_path):
    ranks(work.save, str(tmp_path), "whole", 3, size=0)
    for layout in ("rows", "grid"):
        assert ranks(work.load_newest, str(tmp_path), layout, size=3) == [3, 3, 3]


def test_blocks_may_be_views_into_larger_tensors(ranks, saved):
    ranks(work.load_views, str(saved / "grid"), size=3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_process_reads_the_model(saved, layout):
    checkpoint, weights = read_weights(saved / layout)
    assert (checkpoint.step, checkpoint.metadata["by"]) == (3, layout)
    state = work.tensors_of(3)
    expected = {name for name in state if name.startswith("model.")}
    assert {f"model.{name}" for name in weights} == expected
    for name, weight in weights.items():
        assert work.same_bits(weight, state[f"model.{name}"]), name
    path = find_checkpoint(saved / layout).path
    assert saved_shapes(path) == {name: tensor.shape for name, tensor in state.items()}
    (moment,) = read_tensors(path, names=["optimizer.exp_avg.embed.weight"]).values()
    assert torch.equal(moment, state["optimizer.exp_avg.embed.weight"].float())


def test_replicas_are_written_once_and_the_work_is_shared(saved):
    path = _step(saved / "whole", 3)
    index = FileSystemReader(path).read_metadata()
    assert len(index.storage_data) == len(work.tensors_of(3))
    assert len(list(path.glob("*.distcp"))) == SAVING_RANKS


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_from_before_there_were_blocks_are_read(ranks, tmp_path):
    path = _step(tmp_path, 3)
    path.mkdir(parents=True)
    writer = FileSystemWriter(path, thread_count=1)
    save_plainly(dict(work.tensors_of(3)), storage_writer=writer, no_dist=True)
    write_json(path / "metadata.json", {"step": 3})
    write_manifest(path, sum_files(path.iterdir()))
    assert ranks(work.load_newest, str(tmp_path), "grid", size=4) == [3] * 4
    manager = CheckpointManager(tmp_path / "checkpoints", keep=1, async_save=False)
    assert work.load_and_compare(None, manager, "whole", step=3) == len(work.tensors_of(3))


def test_only_the_newest_stay_and_the_same_step_is_saved_once(ranks, tmp_path):
    listed = ranks(work.save, str(tmp_path), "grid", 1, 2, 2, 3, 4, size=2)
    kept = [f"step_{step:06d}" for step in (2, 3, 4)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == kept
    assert listed[0] == kept


def test_a_background_save_does_not_disturb_the_group(ranks, tmp_path):
    sums = ranks(work.save_in_background, str(tmp_path), size=3)
    assert sums == [[3] * 100] * 3
    assert ranks(work.load_newest, str(tmp_path), "whole", size=0) == [2]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("gap", "all ranks together hold 8 elements"),
        ("overlap", "validate global plan"),  # DCP's words, which name the tensor since 2.13
        ("shape", "on rank 1"),
        ("size", r"block at \[0, 0\] is \[3, 2\] on rank 1"),
        ("dtype", "bfloat16.* on rank 1"),
    ],
)
def test_blocks_that_do_not_tile_their_tensor_are_refused(ranks, tmp_path, fault, says):
    messages = ranks(faulty.save_bad_layout, str(tmp_path), fault, size=3)
    for message in messages:
        assert fault == "overlap" or "model.w" in message
        with pytest.raises(AssertionError, match=says):
            raise AssertionError(message)
    assert list((tmp_path / "checkpoints").iterdir()) == []


# Faults -----------------------------------------------------------------------------------------


FAULTS = [
    ("file size", 2, "rank 2: File too large"),
    ("file size", 0, "rank 0: File too large"),
    ("write", 1, "rank 1: I/O error"),
    ("read back", 2, "rank 2: I/O error"),
    ("publish", 0, "No space left on device"),
    ("space", 0, "not enough free space"),
    ("not shared", 1, "rank 1: .*partial-.* which rank 0 has made, is not here"),
    ("not seen", 1, "__1_0.distcp, written by another rank: missing"),
]
"""Fault, the rank that has it, and what all say."""


@pytest.mark.parametrize(("failed", "async_save"), each_once(FAULTS, [False, True]), ids=str)
def test_what_one_rank_fails_at_all_fail_at(ranks, tmp_path, failed, async_save):
    fault, on, says = failed
    raised = ranks(faulty.save_with_fault, str(tmp_path), fault, on, async_save, size=3)
    for error in raised:
        assert error["type"] == "CheckpointError", error
        assert error["errno"] in (errno.EFBIG, errno.EIO, errno.ENOSPC, errno.ENOENT)
        assert error["left"] == ["step_000001"]
    (text,) = {error["text"] for error in raised}
    assert "cannot save step 2" in text
    assert "bytes" in text
    assert "are free" in text
    assert "earlier checkpoints are untouched" in text
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(text)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("interrupt", "KeyboardInterrupt"),
        ("unportable", "RuntimeError"),
        ("unportable write", "RuntimeError"),
    ],
)
def test_other_errors_of_one_rank_reach_all(ranks, tmp_path, fault, kind):
    raised = ranks(faulty.save_with_fault, str(tmp_path), fault, 1, False, size=3)
    assert [error["type"] for error in raised] == [kind] * 3
    assert [error["left"] for error in raised] == [["step_000001"]] * 3


@pytest.mark.parametrize("on", [0, 2])
def test_a_rank_killed_in_a_save_loses_only_that_save(ranks, tmp_path, on):
    with pytest.raises(AssertionError, match=f"rank {on}:\nthe process ended") as failed:
        ranks(faulty.die_in_save, str(tmp_path), on, size=3)
    assert str(failed.value).count("sppo.parallel.job.peer_errors.PeerLostError: ") == 2
    assert "step_000002" not in work.names(str(tmp_path))
    assert ranks(work.load_newest, str(tmp_path), "grid", size=2) == [1, 1]
    listed = ranks(work.save, str(tmp_path), "grid", 2, size=4)
    assert listed[0] == ["step_000001", "step_000002"]
    assert ranks(work.load_newest, str(tmp_path), "whole", size=0) == [2]


def test_a_damaged_file_is_reported_alike_by_all(ranks, tmp_path):
    assert ranks(faulty.find, str(tmp_path), size=3) == [{"found": None}] * 3
    ranks(work.save, str(tmp_path), "rows", 1, 2, size=4)
    flip_a_bit(_step(tmp_path, 2) / "__2_0.distcp")
    answers = ranks(faulty.find, str(tmp_path), size=3)
    path = str(_step(tmp_path, 1))
    assert answers == [{"found": [path, 1, {"by": "rows", "step": 1}]}] * 3
    flip_a_bit(_step(tmp_path, 1) / "__3_0.distcp")
    answers = ranks(faulty.find, str(tmp_path), size=3)
    (message,) = {answer["error"] for answer in answers}
    assert "step_000001: __3_0.distcp: bytes" in message
    assert "step_000002: __2_0.distcp: bytes" in message


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("missing", "model.extra is missing"),
        ("shape", "model.layers.1.norm.weight is [3], not [4]"),
        ("unseen", "rank 1 does not see checkpoint"),
    ],
)
def test_what_one_rank_cannot_load_changes_nothing_anywhere(ranks, tmp_path, fault, says):
    ranks(work.save, str(tmp_path), "rows", 1, size=2)
    answers = ranks(faulty.load_wrong, str(tmp_path), fault, size=3)
    for answer in answers:
        assert says in answer["error"]
        assert answer["unchanged"]
