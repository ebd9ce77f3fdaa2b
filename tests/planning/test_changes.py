"""Advice if nothing fits: all commands give the same figures, and each advice is true."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from sppo.hardware.run_hardware import hardware_for, run_hardware
from sppo.planning.changes import too_long_for, what_would_fit
from sppo.planning.longest_sequence import (
    fits_at_all,
    longest_sequence,
    longest_tokens,
    with_length,
)
from sppo.planning.search.solver import quick_best
from sppo.units import GIB, KIB, format_tokens
from tests.planning.cases import machine, run_config


def request(model="llama-3.2-1b", *, length, devices=2, nodes=1, **sections):
    return run_config(
        model,
        length=length,
        hardware={"preset": "h100", "nodes": nodes, "devices_per_node": devices},
        **sections,
    )


def advised(run, *, hardware=None):
    """What would fit, by change, on `hardware` or the machine that each run names."""

    def machine_of(changed):
        nodes = changed.hardware.nodes
        if hardware is None:
            return hardware_for(changed.hardware)
        return hardware if changed.hardware == run.hardware else replace(hardware, num_nodes=nodes)

    return {advice.change: advice for advice in what_would_fit(run, machine_of=machine_of)}


@cache
def too_long(length, memory_gib=8, host_gib=16):
    """A run that does not fit, on little memory, and what would: by change."""
    few_layers = {"preset": "llama-3.2-1b", "num_layers": 4, "vocab_size": 16384}
    run = request(few_layers, length=length)
    hardware = machine(
        hardware_for(run.hardware),
        memory_bytes=memory_gib * GIB,
        reserved_bytes=0,
        host_memory_bytes=host_gib * GIB,
    )
    return run, hardware, advised(run, hardware=hardware)


@pytest.mark.exhaustive
@pytest.mark.parametrize("length", ["768Ki", "1400Ki"])
def test_the_longest_is_the_same_whoever_asks(length):
    run, hardware, advice = too_long(length)
    longest = longest_sequence(run, hardware)
    assert f"sequence.length={format_tokens(longest)}" in advice
    assert fits_at_all(with_length(run, longest), hardware)
    assert not fits_at_all(with_length(run, longest + KIB), hardware)


def test_the_longest_is_found_to_whole_ki():
    for most in (1, 2, 3, 1000, 1023, 1024, 1025):
        assert longest_tokens(lambda tokens, most=most: tokens <= most * KIB) == most * KIB
    assert longest_tokens(lambda tokens: False) == 0


@pytest.mark.exhaustive
def test_a_million_tokens_on_one_node_need_the_host_and_how_much_of_it():
    how = {"length": "1Mi", "devices": 8}
    run = request("llama-3.1-8b", state={"optimizer": "device"}, **how)
    found = advised(run)["state.optimizer=host"]
    best = quick_best(
        request("llama-3.1-8b", state={"optimizer": "host"}, **how), hardware_for(run.hardware)
    )
    assert found.step_s == best.step_s
    assert found.node_host_bytes == 8 * best.host_peak_bytes
    assert "of host memory a node" in found.effect


def test_the_smallest_cluster_is_the_smallest():
    run, hardware, advice = too_long("160Ki", memory_gib=3, host_gib=1)
    change = next(change for change in advice if change.startswith("hardware.nodes="))
    nodes = int(change.partition("=")[2])
    assert nodes > 2
    assert fits_at_all(run, replace(hardware, num_nodes=nodes))
    assert not fits_at_all(run, replace(hardware, num_nodes=nodes - 1))


def test_what_no_choice_can_hold_is_said_plainly():
    run = request("llama-3.1-8b", length="3700Ki", devices=8)
    hardware = hardware_for(run.hardware)
    # K and V of 8 heads of 128 in bf16 and their gradients in fp32, of 32 layers.
    assert too_long_for(run, hardware=hardware) is None
    one_stage = run.model_copy(
        update={"parallel": run.parallel.model_copy(update={"virtual_stages": 1})}
    )
    text = too_long_for(one_stage, hardware=hardware)
    assert f"{3700 * KIB * 32 * 2 * 8 * 128 * 6 / GIB / 1024:.1f} TiB for one sequence" in text
    stays = run.model_copy(
        update={"activations": run.activations.model_copy(update={"kv": "retain"})}
    )
    text = too_long_for(with_length(stays, 5120 * KIB), hardware=hardware)
    assert "K and V of all layers are on the devices" in text
    assert "with gradients of one of 32 stages in fp32" in text
    assert f"{5120 * KIB * 2 * 8 * 128 * (32 * 2 + 4) / GIB:.1f} GiB for one sequence" in text
    text = too_long_for(with_length(run, 40960 * KIB), hardware=hardware)
    assert "K and V of two of 32 stages are on the devices at once" in text
    assert f"{40960 * KIB * 2 * 8 * 128 * (2 * 2 + 4) / GIB:.1f} GiB for one sequence" in text
    assert too_long_for(with_length(run, 512 * KIB), hardware=hardware) is None


@pytest.mark.exhaustive
def test_where_only_less_would_fit_all_that_is_written_may_be_given_up():
    conditions = {
        "parallel": {"pipeline_parallel_degree": 1},
        "activations": {"policy": "retain", "tier": "device"},
        "state": {"optimizer": "device"},
    }
    shorter, freed = advised(request("llama-3.1-8b", length="256Ki", devices=4, **conditions))
    assert shorter.startswith("sequence.length=")
    assert freed == (
        "leave out parallel.pipeline_parallel_degree, activations.policy, activations.tier, "
        "state.optimizer"
    )
    followed = request("llama-3.1-8b", length="256Ki", devices=4)
    assert fits_at_all(followed, hardware_for(followed.hardware))


def test_advice_to_change_degrees_is_for_the_cpu_that_the_changed_run_sees():
    """Fewer ranks have larger parts of the CPU, and more nodes have fewer ranks each."""
    model = {"preset": "tiny", "num_layers": 4}
    sections = {"hardware": {"preset": "laptop-cpu"}, "activations": {"policy": "retain"}}
    run = run_config(model, length="560Ki", parallel={"pipeline_parallel_degree": 4}, **sections)
    changes = what_would_fit(run, machine_of=run_hardware)
    advice = {advice.change: advice for advice in changes}
    freed = run_config(model, length="560Ki", **sections)
    found = advice["leave out parallel.pipeline_parallel_degree"]
    assert found.step_s == quick_best(freed, run_hardware(freed)).step_s
    change = next(change for change in advice if change.startswith("hardware.nodes="))
    on_nodes = sections | {"hardware": {"preset": "laptop-cpu", "nodes": int(change[15:])}}
    more = run_config(model, length="560Ki", parallel={"pipeline_parallel_degree": 4}, **on_nodes)
    assert advice[change].step_s == quick_best(more, run_hardware(more)).step_s
