"""Choices that a run file leaves open, and the values worth trying.

A key that is written is a condition; a key that is left out is the solver's to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from sppo.config.run import RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.flops import partition_costs
from sppo.cost.layer import Workload, seconds_per_token_and_pair
from sppo.cost.sharding.heads import HeadShard, head_shard, tensor_shard
from sppo.hardware.description import DeviceSpec, HardwareSpec, NodeSpec, Tier
from sppo.hardware.presets import PRESETS
from sppo.planning.partition import boundaries_by_flops, boundaries_by_length, lengths_of
from sppo.schedule.generators import LOOPED, WHOLE_SEQUENCES
from sppo.units import counted

SUBSEQUENCE_TOKENS = {"cuda": (2048, 16384), "cpu": (1024, 4096)}
"""Mean tokens of a subsequence worth trying. On accelerators the paper's sweet spot: below 2K
kernels are too small, above 16K nothing is gained."""
_MANTISSAS = (4, 5, 6, 7)
_MOST_VIRTUAL_STAGES = 4
"""Numbers of stages on a rank that are tried beside one."""
_SHARDED_GRADIENTS = 2
"""ZeRO level from which on replicas meet in every action, so that all run the same program."""
_DEGREES = ("data_parallel_degree", "pipeline_parallel_degree", "sequence_parallel_degree")


@dataclass(frozen=True, slots=True)
class Degrees:
    """One way to divide devices."""

    data_parallel: int
    pipeline_parallel: int
    sequence_parallel: int

    @classmethod
    def of_run(cls, run: RunConfig) -> Degrees:
        """Return those that a run writes; 1 where it writes none."""
        parallel = run.parallel
        return cls(
            parallel.data_parallel_degree,
            parallel.pipeline_parallel_degree,
            parallel.sequence_parallel_degree,
        )

    @classmethod
    def of_candidate(cls, candidate: Candidate) -> Degrees:
        """Return those of a candidate."""
        return cls(
            candidate.data_parallel_degree,
            candidate.pipeline_parallel_degree,
            candidate.workload.sequence_parallel_degree,
        )

    @property
    def num_devices(self) -> int:
        """Devices it occupies."""
        return self.data_parallel * self.pipeline_parallel * self.sequence_parallel


@dataclass(frozen=True, slots=True)
class Refusal:
    """Degrees that cannot work, whatever else is chosen, and why."""

    degrees: Degrees
    reason: str


def asked_schedule(run: RunConfig) -> str:
    """Return the schedule that the run asks for: ``multiplexed: on`` is schedule sppo_msp."""
    parallel = run.parallel
    is_msp = parallel.multiplexed == "on" and parallel.schedule == "auto"
    return "sppo_msp" if is_msp else parallel.schedule


def shares_units(run: RunConfig) -> bool:
    """Return whether the run asks for units sharded over pipeline ranks (MSP), by any key."""
    return asked_schedule(run) == "sppo_msp"


def multiplexed_problem(run: RunConfig, *, degrees: Degrees) -> str | None:
    """Say why training cannot shard units over pipeline ranks (MSP); None where it can.

    Every rank of a stage must have all of its weights, to send them. On one pipeline rank schedule
    sppo_msp, by its name, is an ordinary one.
    """
    parallel = run.parallel
    by_key = parallel.multiplexed == "on"
    if run.data.samples == "documents":
        return (
            "multiplexed sequence partitioning cuts subsequences of one long sequence, and with "
            "data.samples=documents they hold many samples; leave parallel.multiplexed and "
            "parallel.schedule out"
        )
    if degrees.pipeline_parallel == 1:
        if not by_key:
            return None
        return (
            "parallel.multiplexed=on shards units over pipeline ranks, and there is one: raise "
            "parallel.pipeline_parallel_degree, or leave it out"
        )
    shards_weights = parallel.sequence_parallel == "megatron" and degrees.sequence_parallel > 1
    if shards_weights or parallel.zero == 3:
        asked, other = "parallel.schedule=sppo_msp", "another parallel.schedule"
        if by_key:
            asked, other = "parallel.multiplexed=on", "parallel.multiplexed=off"
        return (
            f"{asked} lends whole weights to other pipeline ranks, and with "
            "parallel.sequence_parallel=megatron or parallel.zero=3 no rank has them: write "
            f"ulysses and parallel.zero=2, or {other}"
        )
    return None


def subsequence_problem(
    run: RunConfig, *, lengths: Sequence[int], degrees: Degrees, shares_units: bool
) -> str | None:
    """Say why ranks cannot share the shortest of some subsequences; None where they can.

    Args:
        run: checked.
        lengths: tokens of each subsequence.
        degrees: how the devices are divided.
        shares_units: whether units are sharded over pipeline ranks (MSP).
    """
    shortest, degree, ranks = min(lengths), degrees.sequence_parallel, degrees.pipeline_parallel
    # A shard of one token may be rounded away.
    if shares_units and ranks > 1 and shortest < 2 * degree * ranks:
        by_name = run.parallel.schedule == "sppo_msp"
        asked, other = "parallel.multiplexed", "parallel.multiplexed=off"
        if by_name:
            asked, other = "parallel.schedule=sppo_msp", "another parallel.schedule"
        return (
            f"{asked}: the shortest subsequence has {shortest} tokens, too few for shards on "
            f"{ranks} pipeline ranks of {degree} sequence-parallel ranks each, two for each; use "
            f"fewer subsequences, or {other}"
        )
    if shortest < degree:
        return (
            f"parallel.sequence_parallel_degree {degree}: the shortest subsequence has {shortest} "
            "tokens, and every rank needs one; use fewer subsequences or a lower degree"
        )
    return None


def shard_heads(run: RunConfig, *, degree: int) -> HeadShard:
    """Return the heads of each rank of a sequence-parallel group.

    Raises:
        ValueError: heads, or what else is sharded, cannot be divided by the degree.
    """
    model = run.model
    if run.parallel.sequence_parallel == "megatron":
        return tensor_shard(model, degree=degree)
    return head_shard(model.num_heads, model.kv_heads, degree=degree)


def machine_asked_for(run: RunConfig, *, hardware: HardwareSpec) -> HardwareSpec:
    """The machine with what the run allows of the tiers behind its devices, and its attention.

    Raises:
        ValueError: the run asks for a tier that the machine does not have.
    """
    asked, node = run.activations, hardware.node
    host, disk = node.host_memory_bytes, node.disk_bytes
    if asked.host_memory != "auto":
        host = min(host, asked.host_memory)
    if asked.disk_memory != "auto":
        # What a run writes of a disk that nobody has described is all that is known of it.
        disk = min(disk or asked.disk_memory, asked.disk_memory)
    # A disk is not a run's to fill unless it is told where; of a GPU also if it is asked for one.
    if asked.disk is None and (hardware.device.kind == "cpu" or asked.tier != "disk"):
        disk = 0
    there = {"host": host, "disk": disk}
    if there.get(asked.tier) == 0:
        raise ValueError(
            f"activations.tier={asked.tier}: {hardware.name} has no {asked.tier} memory that may "
            "be used; leave the key out, name a directory (activations.disk), or raise "
            "activations.host_memory or disk_memory"
        )
    return replace(
        hardware,
        device=_device_of_documents(hardware.device) if _has_documents(run) else hardware.device,
        node=with_disk(replace(node, host_memory_bytes=host), disk),
    )


def activation_tiers(run: RunConfig, *, hardware: HardwareSpec) -> tuple[Tier, ...]:
    """Return where offloaded activations, K and V may go, the nearest to the device first.

    Args:
        run: checked.
        hardware: the machine, with the tiers that the run may use.
    """
    if run.activations.tier != "auto":
        return (run.activations.tier,)
    rooms: dict[Tier, int] = {
        "host": hardware.node.host_memory_bytes,
        "disk": hardware.node.disk_bytes,
    }
    return tuple(tier for tier, room in rooms.items() if room) or ("device",)


def with_disk(node: NodeSpec, disk_bytes: int) -> NodeSpec:
    """Return the node with so much of a disk, at rates of a laptop's where nobody measured it."""
    if not disk_bytes:
        return replace(node, disk_bytes=0)
    rates = node if node.disk_write_bytes_per_s > 0 else PRESETS["laptop-cpu"].node
    return replace(
        node,
        disk_bytes=disk_bytes,
        disk_write_bytes_per_s=rates.disk_write_bytes_per_s,
        disk_read_bytes_per_s=rates.disk_read_bytes_per_s,
    )


def _has_documents(run: RunConfig) -> bool:
    """Return whether tokens attend to those of their own document alone."""
    return run.data.samples == "documents" or run.data.isolate_documents


def _device_of_documents(device: DeviceSpec) -> DeviceSpec:
    """Return the device with another back end than cuDNN, which takes no documents."""
    other = "flash_attn_2"
    if device.attention_backend != "cudnn" or other not in device.published_backends:
        return device
    return replace(device, attention_backend=other)


def degrees_to_try(
    run: RunConfig, *, hardware: HardwareSpec, samples: int | None = None
) -> tuple[list[Degrees], list[Refusal]]:
    """Every way to divide the machine that the run allows, and those it rules out.

    Sequence parallelism stays inside a node unless the run asks for more: its exchanges are on
    the way of every layer. Devices may be left over where the model has too few layers, or a step
    too few sequences, to use them.

    Args:
        run: checked.
        hardware: the machine.
        samples: fewest samples of a step, where steps are of samples; any number of replicas up to
            that may divide them. None: replicas divide the sequences of a step evenly.

    Raises:
        ValueError: degrees in the run that need more devices than there are, or units sharded over
            pipeline ranks (MSP) with degrees none of which allow it.
    """
    given, total = run.parallel.model_fields_set, hardware.num_devices
    fixed: dict[str, int] = {
        name: getattr(run.parallel, name) for name in _DEGREES if name in given
    }
    asked = 1
    for degree in fixed.values():
        asked *= degree
    if asked > total:
        raise ValueError(
            f"{' x '.join(f'parallel.{name} {value}' for name, value in fixed.items())} needs "
            f"{asked} devices, and {hardware.name} has {total}: lower a degree, or raise "
            "hardware.nodes"
        )
    possible, refused = [], []
    for sequence in _sequence_degrees(hardware, fixed=fixed):
        for pipeline in _pipeline_degrees(run, room=total // sequence, fixed=fixed):
            room = total // sequence // pipeline
            data = _data_degree(run, room=room, fixed=fixed, samples=samples)
            degrees = Degrees(data, pipeline, sequence)
            reason = _refusal(run, degrees=degrees, total=total, samples=samples)
            if reason is None:
                possible.append(degrees)
            else:
                refused.append(Refusal(degrees, reason))
    if shares_units(run):
        problems = {degrees: multiplexed_problem(run, degrees=degrees) for degrees in possible}
        possible = [degrees for degrees, reason in problems.items() if reason is None]
        refused += [Refusal(degrees, reason) for degrees, reason in problems.items() if reason]
        if problems and not possible:
            most_stages = max(problems, key=lambda degrees: degrees.pipeline_parallel)
            raise ValueError(problems[most_stages])
    return possible, refused


def subsequence_counts_to_try(run: RunConfig, *, hardware: HardwareSpec) -> tuple[int, ...]:
    """Values of N (num_subsequences) worth trying: quarter steps of powers of two."""
    sequence = run.sequence
    if sequence.boundaries is not None:
        return (len(sequence.boundaries) - 1,)
    if sequence.num_subsequences != "auto":
        return (sequence.num_subsequences,)
    if run.parallel.schedule in WHOLE_SEQUENCES:
        return (1,)
    shortest, longest = SUBSEQUENCE_TOKENS[hardware.device.kind]
    fewest, most = ceil(sequence.length / longest), max(1, sequence.length // shortest)
    steps = {m << k for k in range(20) for m in _MANTISSAS} | {1, 2, 3}
    chosen = {n for n in steps if fewest <= n <= most}
    return tuple(sorted(chosen | {min(fewest, most)}))


def likeliest_to_fit(counts: Sequence[int], *, hardware: HardwareSpec) -> Sequence[int]:
    """Values of N, of some in ascending order, one of which fits if any does.

    Memory only shrinks with N, so that is the last. On a CPU the process grows with what is
    compiled for subsequences of every length, so it may be any.
    """
    return counts if hardware.device.kind == "cpu" else counts[-1:]


def virtual_stages_to_try(run: RunConfig, *, num_ranks: int) -> tuple[int, ...]:
    """Numbers of stages on each of `num_ranks` pipeline ranks worth trying, ascending.

    Those with equally many layers: one stage, then some of the divisors of a rank's layers.
    """
    asked = run.parallel.virtual_stages
    if asked != "auto":
        return (asked,)
    if asked_schedule(run) not in ("auto", LOOPED):
        return (1,)
    divisors = _divisors(run.model.num_layers // num_ranks)[1:]
    last, steps = len(divisors) - 1, _MOST_VIRTUAL_STAGES - 1
    chosen = {divisors[last * step // steps] for step in range(steps + 1) if divisors}
    # With one stage on a rank nobody could do without K and V.
    fewest = [] if chosen and places_kv(run) else [1]
    return (*fewest, *sorted(chosen))


def places_kv(run: RunConfig) -> bool:
    """Return whether the run writes that K and V do not stay on the device between two uses."""
    return run.activations.kv in ("offload", "recompute")


def cut_sequence(
    run: RunConfig, *, num_subsequences: int, workload: Workload, num_stages: int
) -> tuple[int, ...]:
    """Tokens of each of `num_subsequences` subsequences, as the run's partition asks.

    Raises:
        ValueError: more subsequences than tokens.
    """
    sequence = run.sequence
    if sequence.boundaries is not None:
        return lengths_of(sequence.boundaries)
    length, alignment = sequence.length, sequence.alignment
    if sequence.partition == "length" or (sequence.partition == "auto" and num_stages == 1):
        return lengths_of(
            boundaries_by_length(length, num_subsequences=num_subsequences, alignment=alignment)
        )
    if sequence.partition == "cost_model":
        linear, quadratic = seconds_per_token_and_pair(workload, tokens=length / num_subsequences)
    else:
        linear, quadratic = partition_costs(run.model)
    cuts = boundaries_by_flops(
        length,
        num_subsequences=num_subsequences,
        linear=linear,
        quadratic=quadratic,
        alignment=alignment,
    )
    return lengths_of(cuts)


def _sequence_degrees(hardware: HardwareSpec, *, fixed: dict[str, int]) -> list[int]:
    if "sequence_parallel_degree" in fixed:
        return [fixed["sequence_parallel_degree"]]
    return _divisors(hardware.node.num_devices)


def _pipeline_degrees(run: RunConfig, *, room: int, fixed: dict[str, int]) -> list[int]:
    if room < 1:
        return []
    if "pipeline_parallel_degree" in fixed:
        return [fixed["pipeline_parallel_degree"]]
    # Stages of equal size where that is possible, or no device left over.
    equal = {n for n in _divisors(run.model.num_layers) if n <= room}
    return sorted(equal | set(_divisors(room)))


def _data_degree(run: RunConfig, *, room: int, fixed: dict[str, int], samples: int | None) -> int:
    """Return as many replicas as have a sequence or sample each and a place."""
    if "data_parallel_degree" in fixed:
        return fixed["data_parallel_degree"]
    if samples is not None:
        return 1 if run.parallel.zero >= _SHARDED_GRADIENTS else max(1, min(room, samples))
    sequences = run.train.sequences_per_step
    return max(n for n in range(1, max(1, min(room, sequences)) + 1) if sequences % n == 0)


def _refusal(run: RunConfig, *, degrees: Degrees, total: int, samples: int | None) -> str | None:
    model = run.model
    layers, heads = counted(model.num_layers, "layer"), counted(model.num_heads, "attention head")
    if degrees.num_devices > total:
        return f"needs more devices than there are: {degrees.num_devices}, there are {total}"
    if degrees.pipeline_parallel > model.num_layers:
        return f"{layers} cannot be divided into {degrees.pipeline_parallel} stages"
    virtual = run.parallel.virtual_stages
    if virtual != "auto" and degrees.pipeline_parallel * virtual > model.num_layers:
        return (
            f"{layers} cannot be divided into {virtual} stages on each of "
            f"{degrees.pipeline_parallel} ranks"
        )
    if model.num_heads % degrees.sequence_parallel:
        return (
            f"{heads} cannot be divided by a sequence-parallel group of {degrees.sequence_parallel}"
        )
    try:
        shard_heads(run, degree=degrees.sequence_parallel)
    except ValueError as error:
        return str(error)
    if samples is not None:
        if run.parallel.zero >= _SHARDED_GRADIENTS and degrees.data_parallel > 1:
            return (
                f"parallel.zero={run.parallel.zero} shards gradients over replicas, and those of "
                "data.samples=documents run programs of their own"
            )
        if degrees.data_parallel > samples:
            few = counted(samples, "sample")
            return f"{few} of a step for {degrees.data_parallel} replicas: one has none"
    elif run.train.sequences_per_step % degrees.data_parallel:
        return (
            f"train.sequences_per_step {run.train.sequences_per_step} is not a multiple of "
            f"{degrees.data_parallel} replicas"
        )
    return None


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
