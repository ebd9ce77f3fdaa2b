"""Values worth trying for the keys that a run file leaves open.

A key that is written in the run file is a condition; the solver chooses a key that is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, isqrt, prod

from sppo.config.base import MOST_SUBSEQUENCES
from sppo.config.run import DEGREES, RunConfig
from sppo.cost.candidate import Candidate
from sppo.cost.flops import partition_costs
from sppo.cost.sharding.heads import HeadShard, head_shard, tensor_shard
from sppo.cost.trainable import trainable_of_run
from sppo.hardware.description import DeviceSpec, HardwareSpec, NodeSpec, Tier
from sppo.hardware.presets import PRESETS
from sppo.planning.partition import boundaries_by_flops, boundaries_by_length, lengths_of
from sppo.schedule.orders.names import WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES
from sppo.units import counted

SUBSEQUENCE_TOKENS = {"cuda": (2048, 16384), "cpu": (1024, 4096)}
"""Least mean tokens of a subsequence worth trying, and the mean tokens on each of its ranks above
which little is gained, by device kind. The range for GPUs is the SPPO paper's sweet spot: below 2K
kernels are too small, above 16K nothing is gained."""
MOST_UNITS = 1 << 16
"""Most units (stages x subsequences x sequences) of a step of one replica: each is planned and
simulated by itself, in about 0.05 ms."""
CHOSEN_UNITS = 1 << 14
"""Most units of a step if there is a choice, since many steps are then planned: larger ones are
only tried if every choice makes as many, and of these only the first."""
CUT_UNIT = 16
"""Units as which one counts that may be cut over ranks (MSP): its program takes longer to make."""
_MANTISSAS = (4, 5, 6, 7)
_MOST_VIRTUAL_STAGES = 4
"""How many numbers of stages on a rank, other than one, are tried at most."""
_SHARDED_GRADIENTS = 2
"""ZeRO level from which replicas synchronize in every action, so all must run the same program."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of parallelism: one division of the devices."""

    data_parallel: int
    pipeline_parallel: int
    sequence_parallel: int

    @classmethod
    def of_run(cls, run: RunConfig) -> Degrees:
        """Return the degrees of a run configuration; degrees that it leaves out are 1."""
        parallel = run.parallel
        return cls(
            parallel.data_parallel_degree,
            parallel.pipeline_parallel_degree,
            parallel.sequence_parallel_degree,
        )

    @classmethod
    def of_candidate(cls, candidate: Candidate) -> Degrees:
        """Return the degrees of a candidate."""
        return cls(
            candidate.data_parallel_degree,
            candidate.pipeline_parallel_degree,
            candidate.workload.sequence_parallel_degree,
        )

    @property
    def num_devices(self) -> int:
        """Number of devices in use."""
        return self.data_parallel * self.pipeline_parallel * self.sequence_parallel

    @property
    def by_name(self) -> dict[str, int]:
        """Degrees by their names in the run file."""
        return {
            "sequence_parallel_degree": self.sequence_parallel,
            "pipeline_parallel_degree": self.pipeline_parallel,
            "data_parallel_degree": self.data_parallel,
        }

    def text(self) -> str:
        """Return the degrees as text, such as ``SP 8 · PP 4 · DP 1``."""
        return (
            f"SP {self.sequence_parallel} · PP {self.pipeline_parallel} · DP {self.data_parallel}"
        )


def asked_schedule(run: RunConfig) -> str:
    """Return the schedule that the run asks for; ``multiplexed: on`` stands for sppo_msp."""
    parallel = run.parallel
    is_msp = parallel.multiplexed == "on" and parallel.schedule == "auto"
    return "sppo_msp" if is_msp else parallel.schedule


def uses_msp(run: RunConfig) -> bool:
    """Return whether any key of the run asks for units sharded over pipeline ranks (MSP)."""
    return asked_schedule(run) == "sppo_msp"


def multiplexed_problem(run: RunConfig, *, degrees: Degrees) -> str | None:
    """Return the reason why training cannot shard units over pipeline ranks (MSP); None if it can.

    Every rank of a stage must hold all weights of the stage, to send them, and for a balance loss
    the loads of its experts in whole sequences. MSP runs all parts of a subsequence at the same
    time, and states of linear attention pass from one to the next. Schedule sppo_msp is allowed on
    one pipeline rank, where it cuts no unit; ``multiplexed: on`` is not.
    """
    parallel, (asked, other) = run.parallel, _msp_key(run)
    if run.data.samples == "documents":
        return (
            "multiplexed sequence partitioning cuts subsequences of one long sequence, and with "
            "data.samples=documents they hold many samples; leave parallel.multiplexed and "
            "parallel.schedule out"
        )
    if degrees.pipeline_parallel == 1:
        if parallel.multiplexed != "on":
            return None
        return (
            f"{asked} shards units over pipeline ranks, and there is one: raise "
            "parallel.pipeline_parallel_degree, or leave it out"
        )
    if run.routing.balance_loss:
        return (
            f"{asked} runs parts of a sequence on other pipeline ranks, and routing.balance_loss "
            f"needs the loads of all of it: write {other}, or routing.balance_loss=0 (with "
            "routing.bias_update to balance without a loss)"
        )
    if run.model.linear_attention is not None:
        return (
            f"{asked} runs parts of a subsequence at the same time, and model.linear_attention "
            f"needs the state behind one for the next: write {other}"
        )
    shards_weights = parallel.sequence_parallel == "megatron" and degrees.sequence_parallel > 1
    if shards_weights or parallel.zero == 3:
        return (
            f"{asked} lends whole weights to other pipeline ranks, and with "
            "parallel.sequence_parallel=megatron or parallel.zero=3 no rank has them: write "
            f"ulysses and parallel.zero=2, or {other}"
        )
    return None


def _msp_key(run: RunConfig) -> tuple[str, str]:
    """Return the key by which a run asks for MSP, and what to write to do without."""
    if run.parallel.multiplexed == "on":
        return "parallel.multiplexed=on", "parallel.multiplexed=off"
    return "parallel.schedule=sppo_msp", "another parallel.schedule"


def subsequence_problem(
    run: RunConfig, *, lengths: Sequence[int], degrees: Degrees, uses_msp: bool
) -> str | None:
    """Return a message if the shortest subsequence has too few tokens for all ranks; else None.

    Args:
        run: Validated run configuration.
        lengths: Tokens of each subsequence.
        degrees: Degrees of parallelism.
        uses_msp: Whether units are sharded over pipeline ranks (MSP).
    """
    shortest, degree, ranks = min(lengths), degrees.sequence_parallel, degrees.pipeline_parallel
    # A shard of one token may be rounded away.
    if uses_msp and ranks > 1 and shortest < 2 * degree * ranks:
        asked, other = _msp_key(run)
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
        ValueError: The degree does not divide the heads or another sharded dimension.
    """
    model = run.model
    if run.parallel.sequence_parallel == "megatron":
        return tensor_shard(model, degree=degree)
    linear = model.linear_attention
    if linear is not None and linear.key_heads % degree:
        raise ValueError(
            f"parallel.sequence_parallel_degree {degree}: the {linear.key_heads} key heads of "
            "model.linear_attention cannot be sharded evenly; use a divisor of "
            f"{linear.key_heads}"
        )
    return head_shard(model.num_heads, model.kv_heads, degree=degree)


def machine_asked_for(run: RunConfig, *, hardware: HardwareSpec) -> HardwareSpec:
    """Return the machine as the run may use it: limited tiers, and a suitable attention back end.

    Raises:
        ValueError: The run asks for a tier that the machine does not have.
    """
    asked, node = run.activations, hardware.node
    host, disk = node.host_memory_bytes, node.disk_bytes
    if asked.host_memory != "auto":
        host = min(host, asked.host_memory)
    if asked.disk_memory != "auto":
        # If the machine's description has no disk, its size is what the run file writes.
        disk = min(disk or asked.disk_memory, asked.disk_memory)
    # A disk is used only if the run names a directory, or on a GPU also if it asks for the tier.
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
        device=_device_of_documents(hardware.device) if has_documents(run) else hardware.device,
        node=with_disk(replace(node, host_memory_bytes=host), disk),
    )


def activation_tiers(run: RunConfig, *, hardware: HardwareSpec) -> tuple[Tier, ...]:
    """Return the tiers for offloaded activations, K and V, the nearest to the device first.

    Args:
        run: Validated run configuration.
        hardware: Description of the machine, with the tiers that the run may use.
    """
    if run.activations.tier != "auto":
        return (run.activations.tier,)
    rooms: dict[Tier, int] = {
        "host": hardware.node.host_memory_bytes,
        "disk": hardware.node.disk_bytes,
    }
    return tuple(tier for tier, room in rooms.items() if room) or ("device",)


def with_disk(node: NodeSpec, disk_bytes: int) -> NodeSpec:
    """Return the node with `disk_bytes` of disk; unmeasured rates are those of a laptop's disk."""
    if not disk_bytes:
        return replace(node, disk_bytes=0)
    rates = node if node.disk_write_bytes_per_s > 0 else PRESETS["laptop-cpu"].node
    return replace(
        node,
        disk_bytes=disk_bytes,
        disk_write_bytes_per_s=rates.disk_write_bytes_per_s,
        disk_read_bytes_per_s=rates.disk_read_bytes_per_s,
    )


def has_documents(run: RunConfig) -> bool:
    """Return whether attention is restricted to tokens of the same document."""
    return run.data.samples == "documents" or run.data.isolate_documents


def _device_of_documents(device: DeviceSpec) -> DeviceSpec:
    """Return the device with an attention back end other than cuDNN, which has no document mask."""
    other = "flash_attn_2"
    if device.attention_backend != "cudnn" or other not in device.published_backends:
        return device
    return replace(device, attention_backend=other)


def degrees_to_try(
    run: RunConfig,
    *,
    hardware: HardwareSpec,
    samples: int | None = None,
    across_nodes: bool = False,
) -> tuple[list[Degrees], dict[Degrees, str]]:
    """Return the divisions of the machine that the run allows, and why others cannot work.

    Sequence parallelism stays inside a node unless the run asks for more, because every layer waits
    for its exchanges; but nothing else divides the working set of the longest sequences. Devices
    may stay unused if the model has too few layers, or a step too few sequences.

    Args:
        run: Validated run configuration.
        hardware: Description of the machine.
        samples: Fewest samples of a step, for runs of samples: at most this many replicas share
            them. None for runs of sequences, which replicas share evenly.
        across_nodes: Return the divisions with sequence parallelism over several nodes instead, if
            the run leaves its degree open.

    Raises:
        ValueError: The degrees of the run need more devices than the machine has, or the run asks
            for units sharded over pipeline ranks (MSP) and no possible degrees allow it.
    """
    given, total = run.parallel.model_fields_set, hardware.num_devices
    fixed: dict[str, int] = {name: getattr(run.parallel, name) for name in DEGREES if name in given}
    asked = prod(fixed.values())
    if asked > total:
        raise ValueError(
            f"{' x '.join(f'parallel.{name} {value}' for name, value in fixed.items())} needs "
            f"{asked} devices, and {hardware.name} has {total}: lower a degree, or raise "
            "hardware.nodes"
        )
    possible: list[Degrees] = []
    refused: dict[Degrees, str] = {}
    for sequence in _sequence_degrees(hardware, fixed=fixed, across_nodes=across_nodes):
        for pipeline in _pipeline_degrees(run, room=total // sequence, fixed=fixed):
            room = total // sequence // pipeline
            data = _data_degree(run, room=room, fixed=fixed, samples=samples)
            degrees = Degrees(data, pipeline, sequence)
            if degrees.num_devices > total:
                needed = degrees.num_devices
                refused[degrees] = f"needs {needed} devices, and there are {total}"
                continue
            problems = degree_problems(run, degrees=degrees, samples=samples)
            _, reason = next(problems, (None, None))
            if reason is None:
                possible.append(degrees)
            else:
                refused[degrees] = reason
    if uses_msp(run) and refused and not (possible or across_nodes):
        shares = {one: refused[one] != multiplexed_problem(run, degrees=one) for one in refused}
        most_stages = min(refused, key=lambda one: (shares[one], -one.pipeline_parallel))
        raise ValueError(refused[most_stages])
    return possible, refused


def subsequence_counts_to_try(
    run: RunConfig, *, hardware: HardwareSpec, sequence_parallel: int = 1
) -> tuple[int, ...]:
    """Return the values of N (num_subsequences) worth trying, ascending.

    Unless the run fixes N, these are quarter steps between powers of two, and 1, 2 and 4.

    Args:
        run: Validated run configuration.
        hardware: Description of the machine.
        sequence_parallel: Ranks that share each subsequence.
    """
    sequence = run.sequence
    if sequence.boundaries is not None:
        return (len(sequence.boundaries) - 1,)
    if sequence.num_subsequences != "auto":
        return (sequence.num_subsequences,)
    if run.parallel.schedule in WHOLE_SEQUENCES:
        return (1,)
    shortest, longest = SUBSEQUENCE_TOKENS[hardware.device.kind]
    fewest = min(MOST_SUBSEQUENCES, ceil(sequence.length / (longest * sequence_parallel)))
    most = min(MOST_SUBSEQUENCES, max(1, sequence.length // shortest))
    steps = {m << k for k in range(20) for m in _MANTISSAS} | {1, 2, 3}
    chosen = {n for n in steps if fewest <= n <= most}
    # Kernels of small models take hardly longer for more tokens.
    few = {n for n in (1, 2, 4) if n <= most}
    return tuple(sorted(chosen | few | {min(fewest, most)}))


def exceeds_sweet_spot(candidate: Candidate) -> bool:
    """Return whether ranks have more tokens of a subsequence than are known to gain anything."""
    workload = candidate.workload
    _, longest = SUBSEQUENCE_TOKENS[workload.hardware.device.kind]
    shards = len(candidate.lengths) * workload.sequence_parallel_degree
    return sum(candidate.lengths) > longest * shards


def units_problem(candidate: Candidate, *, most: int) -> str | None:
    """Return a message if a step of one replica has more than `most` units; else None.

    Units that may be cut over ranks (MSP) count as `CUT_UNIT` each.
    """
    units, cut = candidate.num_units, ""
    if candidate.schedule == "sppo_msp" and candidate.pipeline_parallel_degree > 1:
        most, cut = most // CUT_UNIT, " if they may be cut over pipeline ranks (MSP)"
    if units <= most:
        return None
    counts = (
        (candidate.sequences, "sequence"),
        (len(candidate.lengths), "subsequence"),
        (candidate.num_stages, "stage"),
    )
    return (
        f"a step of {' x '.join(counted(*count) for count in counts)} has {units} units, more than "
        f"the {most} that are planned{cut}: lower train.sequences_per_step, "
        "sequence.num_subsequences or parallel.virtual_stages, or raise "
        "parallel.data_parallel_degree"
    )


def virtual_stages_to_try(run: RunConfig, *, num_ranks: int) -> tuple[int, ...]:
    """Return the numbers of stages on each of `num_ranks` pipeline ranks worth trying, ascending.

    Unless the run fixes the number, these are one and some divisors of a rank's layers with
    attention, so stages have equally many of them. One is left out if the run asks to offload or
    recompute K and V.
    """
    asked = run.parallel.virtual_stages
    if asked != "auto":
        return (asked,)
    if asked_schedule(run) not in ("auto", *WITH_VIRTUAL_STAGES):
        return (1,)
    several = divisors(run.model.num_attention_layers // num_ranks)[1:]
    last, steps = len(several) - 1, _MOST_VIRTUAL_STAGES - 1
    chosen = {several[last * step // steps] for step in range(steps + 1) if several}
    # With one stage on a rank, K and V are always in use and cannot leave the device.
    fewest = [] if chosen and places_kv(run) else [1]
    return (*fewest, *sorted(chosen))


def places_kv(run: RunConfig) -> bool:
    """Return whether the run asks to offload or recompute K and V, which few orders can.

    Layers with a sliding window recompute theirs in every order.
    """
    asked = run.activations.kv
    return asked == "offload" or (asked == "recompute" and not run.model.has_windows)


def cut_sequence(run: RunConfig, *, num_subsequences: int, num_stages: int) -> tuple[int, ...]:
    """Return the tokens of each of `num_subsequences` subsequences, by the run's partition.

    Raises:
        ValueError: There are more subsequences than tokens.
    """
    sequence = run.sequence
    if sequence.boundaries is not None:
        return lengths_of(sequence.boundaries)
    length, alignment = sequence.length, sequence.alignment
    if sequence.partition == "length" or (sequence.partition == "auto" and num_stages == 1):
        return lengths_of(
            boundaries_by_length(length, num_subsequences=num_subsequences, alignment=alignment)
        )
    linear, quadratic = partition_costs(
        run.model, trainable_of_run(run), label_share=run.data.label_share or 1.0
    )
    cuts = boundaries_by_flops(
        length,
        num_subsequences=num_subsequences,
        linear=linear,
        quadratic=quadratic,
        alignment=alignment,
    )
    return lengths_of(cuts)


def _sequence_degrees(
    hardware: HardwareSpec, *, fixed: dict[str, int], across_nodes: bool
) -> list[int]:
    node = hardware.node.num_devices
    if "sequence_parallel_degree" in fixed:
        return [] if across_nodes else [fixed["sequence_parallel_degree"]]
    if across_nodes:
        return [node * nodes for nodes in divisors(hardware.num_nodes)[1:]]
    return [*divisors(node)]


def _pipeline_degrees(run: RunConfig, *, room: int, fixed: dict[str, int]) -> list[int]:
    if room < 1:
        return []
    if "pipeline_parallel_degree" in fixed:
        return [fixed["pipeline_parallel_degree"]]
    # Try degrees that give stages equal layers, and degrees that leave no device unused.
    equal = {n for n in divisors(run.model.num_layers) if n <= room}
    return sorted(equal | set(divisors(room)))


def _data_degree(run: RunConfig, *, room: int, fixed: dict[str, int], samples: int | None) -> int:
    """Return the most replicas that fit in `room` and can share the sequences or samples."""
    if "data_parallel_degree" in fixed:
        return fixed["data_parallel_degree"]
    if samples is not None:
        return 1 if run.parallel.zero >= _SHARDED_GRADIENTS else max(1, min(room, samples))
    sequences = run.train.sequences_per_step
    return max(n for n in divisors(sequences) if n <= max(1, room))


def degree_problems(
    run: RunConfig, *, degrees: Degrees, samples: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (key of ``parallel``, rule) for each degree that does not divide the model or step.

    Args:
        run: Validated run configuration.
        degrees: Degrees of parallelism.
        samples: Fewest samples of a step, which replicas share; None if that is not known.
    """
    parallel, layers, ranks = run.parallel, run.model.num_layers, degrees.pipeline_parallel
    if ranks > layers:
        yield (
            "pipeline_parallel_degree",
            f"parallel.pipeline_parallel_degree {ranks}: every stage needs a layer, and the model "
            f"has {layers}; use at most that many",
        )
    elif parallel.virtual_stages != "auto" and ranks * parallel.virtual_stages > layers:
        yield (
            "virtual_stages",
            f"parallel.virtual_stages {parallel.virtual_stages} on {ranks} ranks: every stage "
            f"needs a layer, and the model has {layers}; use at most {layers // ranks}",
        )
    try:
        shard_heads(run, degree=degrees.sequence_parallel)
    except ValueError as error:
        yield "sequence_parallel_degree", str(error)
    share = _share_problem(run, replicas=degrees.data_parallel, samples=samples)
    if share is not None:
        replicas = f"parallel.data_parallel_degree {degrees.data_parallel}"
        yield "data_parallel_degree", f"{replicas}: {share}"
    multiplexed = multiplexed_problem(run, degrees=degrees) if uses_msp(run) else None
    if multiplexed is not None:
        yield "multiplexed" if parallel.multiplexed == "on" else "schedule", multiplexed


def _share_problem(run: RunConfig, *, replicas: int, samples: int | None) -> str | None:
    """Return the reason why replicas cannot share a step, and what to change; None if they can."""
    sequences = run.train.sequences_per_step
    if run.data.samples != "documents" and sequences % replicas:
        return f"train.sequences_per_step {sequences} cannot be divided evenly; make it a multiple"
    if samples is not None and replicas > samples:
        return f"a step may have only {counted(samples, 'sample')}, and every replica needs one"
    return None


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of `number`, ascending."""
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))
