"""Attention back end of a plan against those of the machine: priced anew, said, or refused."""

from types import SimpleNamespace

import pytest
import torch

from sppo.config import load_run
from sppo.hardware.description import ATTENTION_BACKENDS
from sppo.hardware.run_hardware import hardware_for
from sppo.kernels.attention import choice
from sppo.training import preflight
from sppo.training.attention_in_use import (
    attention_text,
    check_attention,
    with_attention_here,
)
from tests.dry_run.cases import plan_for_gpu
from tests.planning.cases import run_config
from tests.training.jobs import job_alone

GPU = SimpleNamespace(kind="cuda", torch_device=torch.device("cuda", 0))
FLASH_3, FLASH_2 = "flash_attn_interface", "flash_attn_2_cuda"
MODEL = {"vocab_size": 64, "hidden_size": 1024, "num_layers": 2, "num_heads": 8, "mlp_size": 2048}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU: its compute capability, the packages, and the back ends that fail on a small case."""
    found = SimpleNamespace(capability=(9, 0), installed=set(), broken={})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    monkeypatch.setattr(choice, "is_installed", lambda module: module in found.installed)
    monkeypatch.setattr(choice, "error_on_a_small_case", lambda name, case: found.broken.get(name))
    choice.chosen_name.cache_clear()
    yield found
    choice.chosen_name.cache_clear()


def run_on(preset, *, model=None, data=None, sequence=None, **hardware):
    return run_config(
        {**MODEL, **(model or {})},
        length=8192,
        data={"tokens": "data", **(data or {})},
        sequence=sequence or {"num_subsequences": 2},
        hardware={"preset": preset, "devices_per_node": 1, **hardware},
        activations={"policy": "retain"},
    )


def checked(run):
    return check_attention(run, plan_for_gpu(run), GPU)


@pytest.mark.parametrize(
    ("preset", "capability", "installed", "model", "data", "text"),
    [
        ("h200", (9, 0), (), {}, {}, "cudnn"),
        ("h200", (9, 0), (FLASH_3,), {}, {}, "flash_attn_3 (planned: cudnn)"),
        ("h200", (9, 0), (), {}, {"isolate_documents": True}, "torch_flash and cudnn"),
        ("h200", (9, 0), (), {"sliding_window": 512}, {}, "torch_flash"),
        ("a100-80g", (8, 0), (), {}, {}, "torch_flash"),  # that of flash-attn 2
        ("a100-80g", (8, 0), (FLASH_2,), {}, {}, "flash_attn_2"),
        ("a100-80g", (9, 0), (), {}, {}, "cudnn (planned: flash_attn_2)"),
    ],
)
def test_what_runs_is_said(gpu, preset, capability, installed, model, data, text):
    gpu.capability, gpu.installed = capability, {*installed}
    assert attention_text(checked(run_on(preset, model=model, data=data))) == text


def test_spans_that_the_kernel_does_not_take_are_said(gpu):
    in_use = checked(run_on("h200", sequence={"boundaries": [0, 8191, 8192]}))
    assert (in_use.planned, in_use.used) == ("cudnn", ("cudnn", "torch_flash"))


@pytest.mark.parametrize(
    ("preset", "hardware", "broken", "message"),
    [
        (
            "h200",
            {"attention": "flash_attn_3"},
            {},
            "priced with the attention back end flash_attn_3, and this machine would run cudnn: "
            "flash_attn_3 needs flash_attn_interface, which is not installed. Install what is "
            "missing, or write hardware.attention=cudnn in the run file and solve again",
        ),
        (
            "h200",
            {},
            {"cudnn": "is wrong on a small case"},
            "priced with the attention back end cudnn, and this machine would run torch_flash: "
            "cudnn is wrong on a small case. Install what is missing, or write "
            "hardware.attention=flash_attn_2 in",
        ),
        (
            "b200",
            {},
            {},
            "flash_attn_4, and this machine would run cudnn: flash_attn_4 needs flash_attn.cute, "
            "which is not installed. Install what is missing, or train without --plan",
        ),
        (
            "a100-80g",
            {},
            {"cudnn": "fails", "torch_flash": "fails too"},
            "flash_attn_2 needs flash_attn_2_cuda, which is not installed; torch_flash fails too",
        ),
    ],
)
def test_a_fall_back_is_refused(gpu, preset, hardware, broken, message):
    gpu.broken = broken
    with pytest.raises(ValueError, match="the plan is priced with") as refusal:
        checked(run_on(preset, **hardware))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("preset", "capability", "installed", "broken", "priced"),
    [
        ("h200", (9, 0), (), (), "cudnn"),
        ("h200", (9, 0), (FLASH_3,), (), "flash_attn_3"),
        ("h200", (9, 0), (), ("cudnn",), "flash_attn_2"),
        ("h200", (9, 0), (), ("cudnn", "torch_flash"), "torch_blocks"),
        ("b200", (10, 0), (), (), "torch_flash"),
        ("a100-80g", (9, 0), (), (), "flash_attn_2"),  # cuDNN's rates are not known there
    ],
)
def test_a_plan_made_at_the_start_is_for_what_runs(
    gpu, preset, capability, installed, broken, priced
):
    gpu.capability, gpu.installed, gpu.broken = capability, {*installed}, dict.fromkeys(broken, "x")
    run = run_on(preset)
    hardware = with_attention_here(hardware_for(run.hardware), run, GPU)
    assert hardware.device.attention_backend == priced
    check_attention(run, plan_for_gpu(run, hardware=hardware), GPU)


def test_kernels_are_loaded_before_free_memory_is_read(work, run_file, monkeypatch):
    order = []
    for name in ("load_attention", "find_free_memory"):
        original = getattr(preflight, name)

        def called(*arguments, name=name, original=original, **options):
            order.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(preflight, name, called)
    preflight.preflight(job_alone(load_run(run_file())))
    assert order == ["load_attention", "find_free_memory"]


def test_a_named_back_end_is_never_replaced(gpu):
    run = run_on("h200", attention="flash_attn_3")
    hardware = hardware_for(run.hardware)
    assert with_attention_here(hardware, run, GPU) == hardware


def test_machines_name_the_back_ends_that_there_are():
    on_gpus = {name for name, able in choice.CAPABILITIES.items() if "cuda" in able.devices}
    assert {*ATTENTION_BACKENDS} == on_gpus
