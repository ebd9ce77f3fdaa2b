"""Growth of a CPU process besides its tensors, in plans: its parts, and what each depends on."""

from dataclasses import replace

import pytest

from sppo.config.model import ModelConfig
from sppo.cost.candidate import Candidate
from sppo.cost.memory.process_growth import (
    ACTION_BYTES,
    CODE_BYTES,
    CODE_BYTES_PER_LENGTH,
    CODE_BYTES_PER_ODD_LENGTH,
    POOL_FREE_BYTES,
    STEPS_BYTES,
    TOKEN_BYTES,
)
from sppo.cost.memory.stage_memory import SAVED_IN_BACKGROUND
from sppo.cost.memory.state_memory import checkpoint_bytes
from sppo.cost.parameters import num_parameters
from sppo.cost.state_tiers import StateTiers
from sppo.cost.workload import Workload
from sppo.hardware.presets import PRESETS
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.units import KIB

MODEL = ModelConfig(
    vocab_size=64, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, mlp_size=128
)


def growth(preset="laptop-cpu", *, dtype="fp32", lengths=(KIB, KIB), **options):
    workload = Workload(MODEL, PRESETS[preset], dtype=dtype)
    (stage,) = evaluate_candidate(Candidate(workload, lengths, **options)).memory
    return stage.device.growth_bytes


def test_data_and_program_of_a_step_count():
    step = 2 * KIB * TOKEN_BYTES + 2 * 2 * ACTION_BYTES
    fixed = STEPS_BYTES + POOL_FREE_BYTES
    assert growth() == fixed + step
    assert growth(sequences=1000) == fixed + 1000 * step


def test_kernels_are_compiled_for_every_length_in_bf16():
    code = CODE_BYTES + CODE_BYTES_PER_LENGTH
    assert growth(dtype="bf16") - growth() == code
    uneven = growth(dtype="bf16", lengths=(KIB + 128, KIB - 128))
    assert uneven - growth() == code + CODE_BYTES_PER_LENGTH
    odd = growth(dtype="bf16", lengths=(KIB + 1, KIB - 1))
    assert odd - uneven == 2 * CODE_BYTES_PER_ODD_LENGTH


def test_no_kernels_are_compiled_without_products_in_half_precision():
    laptop = PRESETS["laptop-cpu"]
    casting = replace(laptop, device=replace(laptop.device, half_products=False))
    for dtype in ("bf16", "fp32"):
        workload = Workload(MODEL, casting, dtype=dtype)
        (stage,) = evaluate_candidate(Candidate(workload, (KIB, KIB))).memory
        assert stage.device.growth_bytes == growth()


def test_a_save_in_the_background_holds_the_state_once_more():
    assert growth(background_saves=True) - growth() == 3 * 4 * num_parameters(MODEL)


def test_a_gpu_has_no_part_in_it():
    assert growth("h100") == 0
    assert growth("h100", background_saves=True) == 0


@pytest.mark.parametrize("optimizer", ["device", "host"])
def test_behind_a_gpu_a_save_in_the_background_takes_host_memory(optimizer):
    """Beside an optimizer that lives there, whose state changes while it is written."""
    state = StateTiers(optimizer=optimizer)
    workload = Workload(MODEL, PRESETS["h100"], dtype="fp32")
    candidate = Candidate(workload, (KIB, KIB), data_parallel_degree=2, state=state)
    without = evaluate_candidate(candidate)
    found = evaluate_candidate(replace(candidate, background_saves=True))
    copied = 3 * 4 * num_parameters(MODEL) // 2
    assert checkpoint_bytes(candidate) == (copied,)
    assert found.memory[0].device == without.memory[0].device
    assert found.host_peak_bytes - without.host_peak_bytes == copied
    assert found.node_host_bytes - without.node_host_bytes == 2 * copied


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("ranks", "virtual"), [(1, 2), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize(("zero", "replicas"), [(0, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("kind", ["ulysses", "megatron"])
def test_ranks_save_every_parameter_once(tied, ranks, virtual, zero, replicas, kind):
    """Also an embedding that the first and the last rank update."""
    model = MODEL.model_copy(update={"num_layers": 4, "tie_embeddings": tied})
    for degree in (1, 2) if zero else (1,):
        workload = Workload(
            model,
            PRESETS["h100"],
            dtype="bf16",
            sequence_parallel_degree=degree,
            sequence_parallel=kind,
        )
        candidate = Candidate(
            workload,
            (KIB, KIB),
            pipeline_parallel_degree=ranks,
            virtual_stages=virtual,
            schedule="looped_bfs" if virtual > 1 else "sppo",
            data_parallel_degree=replicas,
            zero=zero,
            background_saves=True,
        )
        saved = checkpoint_bytes(candidate)
        shares = degree * replicas
        assert sum(saved) * shares == pytest.approx(3 * 4 * num_parameters(model), abs=100)
        memory = evaluate_candidate(candidate).memory
        assert tuple(rank.background_save_bytes for rank in memory) == saved


def test_it_counts_against_the_host():
    def shortfall(room_bytes, **change):
        hardware = PRESETS["h100"]
        node = replace(hardware.node, num_devices=1, host_memory_bytes=room_bytes)
        workload = Workload(MODEL, replace(hardware, node=node), dtype="fp32")
        return evaluate_candidate(
            Candidate(workload, (KIB,), background_saves=True, **change)
        ).shortfall

    needed = 3 * 4 * num_parameters(MODEL)
    assert shortfall(needed) is None
    short = shortfall(needed - 1)
    assert (short.place, short.bucket, short.short_bytes) == ("host", SAVED_IN_BACKGROUND, 1)
    assert shortfall(needed + 1000, state=StateTiers(optimizer="host")).short_bytes == needed - 1000
