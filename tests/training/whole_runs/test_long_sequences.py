"""Memory of long sequences: as predicted, linear in the length, and far below what is saved.

Layers have a sliding window, so that time grows linearly and a sequence takes minutes on two cores;
most stages store all keys and values nevertheless.
"""

import subprocess
import sys

import pytest

from sppo.offload.disk.disk_room import usable_directory
from sppo.units import GIB
from tests.conftest import write_run, write_tokens
from tests.training.jobs import summary

LENGTHS = (128 * 1024, 256 * 1024)
LOOPED = {
    "preset": None,
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 2,
    "mlp_size": 1792,
    "sliding_window": 1024,
    "max_positions": LENGTHS[-1],
}
"""The README's Llama shape."""
WIDE = {
    **LOOPED,
    "vocab_size": 256,
    "hidden_size": 64,
    "num_layers": 12,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_size": 16,
    "mlp_size": 4096,
}
"""Layers with small inputs and wide MLPs save the most bytes per FLOP."""
WAYS = {
    "memory alone": {"policy": "keep_attention", "kv": "recompute"},
    "disk": {"policy": "offload_all", "kv": "offload", "disk": "."},
}
SAVED_BYTES, RUN_BYTES, DISK_BYTES = 24 * GIB, 6 * GIB, 32 * GIB


def trained(directory, length, *, model, units, activations, **parallel):
    """Summary of a run of one step."""
    room = usable_directory(directory).usable_bytes
    if "disk" in activations and room < DISK_BYTES:
        pytest.skip(f"moves {DISK_BYTES / GIB:.0f} GiB, and {room / GIB:.0f} GiB may be used")
    write_tokens(directory / "tokens", num_tokens=length + 1, vocab_size=model["vocab_size"])
    run_file = write_run(
        directory / f"{length}.yaml",
        model=model,
        sequence={"length": length, "num_subsequences": units},
        parallel=parallel,
        activations=activations,
        train={"steps": 1, "dtype": "bf16", "output": f"out_{length}"},
    )
    command = [sys.executable, "-c", "from sppo.__main__ import main; main()", "train", run_file]
    subprocess.run(command, check=True, cwd=directory, timeout=1800)
    return summary(directory / f"out_{length}")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_memory_of_the_looped_order_is_as_predicted_and_linear(tmp_path, way):
    memories = [
        trained(
            tmp_path,
            length,
            model=LOOPED,
            units=length // 2048,
            activations=WAYS[way],
            virtual_stages=LOOPED["num_layers"],
        )["memory_bytes"]
        for length in LENGTHS
    ]
    for memory in memories:
        for bucket in ("K/V and gradients", "activations"):  # every tensor is counted
            assert memory[bucket]["measured"] == memory[bucket]["predicted"]
        assert memory["all"]["measured"] == pytest.approx(memory["all"]["predicted"], rel=0.03)
    measured, predicted = (
        memories[1]["all"][how] - memories[0]["all"][how] for how in ("measured", "predicted")
    )
    assert measured == pytest.approx(predicted, rel=0.03)


@pytest.mark.slow
def test_a_sequence_trains_in_a_fraction_of_what_it_saves(tmp_path):
    told = trained(
        tmp_path, LENGTHS[0], model=WIDE, units=64, activations={**WAYS["disk"], "kv": "auto"}
    )
    assert told["device_peak_bytes"] <= RUN_BYTES
    assert told["offloaded_bytes_per_step"] >= SAVED_BYTES
    memory = told["memory_bytes"]["all"]
    assert memory["measured"] == pytest.approx(memory["predicted"], rel=0.05)
