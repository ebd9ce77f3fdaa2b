"""Memory of a run as it stands, before it runs, beside what the SPPO paper counts for it.

The paper counts activations of a GPT in two ways: 32 B S H bytes per layer in its Table 2 and 38
B S H in section 5.1 (2 B S H elements of them K and V, that is 4 bytes). Both assume multi-head
attention, an MLP of four times the model's width, and every intermediate kept. What this engine
saves is less: norms, activation functions and the like are formed again on the way.

Legend: B sequences, S tokens of a sequence, H hidden size, L layers, K key/value heads, D head
size. Everything per model is for one sequence, B = 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sppo.activations.policy import POLICIES, saved_bytes_per_token
from sppo.config.run import RunConfig
from sppo.cost.layer import ACCUMULATION_BYTES, ELEMENT_BYTES
from sppo.cost.parameters import num_parameters
from sppo.hardware.description import HardwareSpec
from sppo.planning.chosen_run import with_chosen_degrees
from sppo.planning.run_plan import assess_run, scheduled
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate

TABLE_2_BYTES = 32
"""Per token, hidden unit and layer: SPPO paper, Table 2."""
SECTION_5_1_BYTES = 38
"""Bytes per token, hidden unit and layer: SPPO paper, section 5.1."""
_MOMENTS = 2


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """A model and one sequence of it, all devices together.

    Attributes:
        parameters: Trainable scalars.
        state_bytes_per_parameter: Weights, gradients, optimizer states: 18 in bf16.
        table_2_bytes: Activations as the paper's Table 2 counts them.
        section_5_1_bytes: Activations as its section 5.1 counts them.
        saved_bytes: Activations this engine keeps, by policy; K and V are not among them.
        kv_bytes: K and V.
        kv_gradients_bytes: Their fp32 gradients.
        multi_head_kv_bytes: K and V if every query head had its own.
    """

    parameters: int
    state_bytes_per_parameter: int
    table_2_bytes: int
    section_5_1_bytes: int
    saved_bytes: Mapping[str, int]
    kv_bytes: int
    kv_gradients_bytes: int
    multi_head_kv_bytes: int

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer states."""
        return self.parameters * self.state_bytes_per_parameter


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """Needs of a run as it stands.

    Attributes:
        run: Which.
        hardware: The machine it is held against.
        counts: Of its model and one sequence.
        evaluated: Its memory by stage, and where it does not fit.
        whole: The run with the keys that it leaves out, as the solver chooses them.
        chosen: Those keys.
    """

    run: RunConfig
    hardware: HardwareSpec
    counts: ModelCounts
    evaluated: EvaluatedCandidate
    whole: RunConfig
    chosen: tuple[str, ...] = ()


def estimate(run: RunConfig, *, hardware: HardwareSpec) -> Estimate:
    """Memory of `run` as training would plan it on this machine.

    Degrees that it leaves out are the solver's, and with them the cuts and the schedule.

    Raises:
        ValueError: a policy this machine cannot serve, more stages than layers, or sequences that
            cannot be divided evenly over the replicas.
    """
    whole = with_chosen_degrees(run, hardware=hardware)
    evaluated = scheduled(whole.run, assess_run(whole.run, hardware=hardware))
    return Estimate(run, hardware, model_counts(run), evaluated, whole.run, whole.chosen)


def model_counts(run: RunConfig) -> ModelCounts:
    """Return the FLOPs and bytes of the whole model and one sequence."""
    model, length = run.model, run.sequence.length
    element = ELEMENT_BYTES[run.train.dtype]
    masters = ACCUMULATION_BYTES if element < ACCUMULATION_BYTES else 0
    layer_tokens = length * model.num_layers
    unit = layer_tokens * model.hidden_size
    kv_elements = 2 * model.kv_heads * model.head_dim * layer_tokens
    return ModelCounts(
        parameters=num_parameters(model),
        state_bytes_per_parameter=element
        + ACCUMULATION_BYTES
        + _MOMENTS * ACCUMULATION_BYTES
        + masters,
        table_2_bytes=TABLE_2_BYTES * unit,
        section_5_1_bytes=SECTION_5_1_BYTES * unit,
        saved_bytes={
            policy: saved_bytes_per_token(policy, model, element_bytes=element) * layer_tokens
            for policy in POLICIES
        },
        kv_bytes=kv_elements * element,
        kv_gradients_bytes=kv_elements * ACCUMULATION_BYTES,
        multi_head_kv_bytes=kv_elements * element * model.group_size,
    )
