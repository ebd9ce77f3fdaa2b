"""Memory of a run, predicted before it runs, beside the counts of the SPPO paper.

The paper counts activations of a GPT in two ways: 32 B S H bytes per layer in its Table 2, and 38
B S H bytes in section 5.1 (of which K and V have 2 B S H elements, 4 B S H bytes). Both assume
multi-head attention, an MLP of four times the hidden size, and that every intermediate is kept.
This engine saves less: backward recomputes norms, activation functions and the like.

Legend: B sequences, S tokens of a sequence, H hidden size, L layers, K key/value heads, D head
size. All figures of a model are for one sequence, B = 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sppo.activations.policy import POLICIES, saved_bytes_per_token
from sppo.config.run import RunConfig
from sppo.cost.layer import ACCUMULATION_BYTES, ELEMENT_BYTES
from sppo.cost.parameters import num_parameters
from sppo.hardware.description import HardwareSpec
from sppo.planning.chosen_run import Draw, with_chosen_degrees
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.run_plan import executed_candidate
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate

TABLE_2_BYTES = 32
"""Bytes per token, hidden unit and layer: SPPO paper, Table 2."""
SECTION_5_1_BYTES = 38
"""Bytes per token, hidden unit and layer: SPPO paper, section 5.1."""
_MOMENTS = 2


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """Parameters of a model and bytes of one sequence, over all devices together.

    Attributes:
        parameters: Number of trainable scalars.
        state_bytes_per_parameter: Bytes of weights, gradients and optimizer states per parameter:
            18 in bf16.
        table_2_bytes: Bytes of activations as counted in Table 2 of the SPPO paper.
        section_5_1_bytes: Bytes of activations as counted in section 5.1 of the SPPO paper.
        saved_bytes: Bytes of activations that this engine saves without K and V, by policy.
        kv_bytes: Bytes of K and V.
        kv_gradients_bytes: Bytes of the fp32 gradients of K and V.
        multi_head_kv_bytes: Bytes of K and V if every query head had its own key/value head.
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
        """Bytes of weights, gradients and optimizer states."""
        return self.parameters * self.state_bytes_per_parameter


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """Predicted memory of a run file.

    Attributes:
        run: Run configuration as written; of documents, with its longest samples as sequences.
        hardware: Description of the machine.
        counts: Counts of the model and one sequence.
        evaluated: Evaluated candidate, with memory by stage and the shortfall if it does not fit.
        whole: Run configuration with the keys that the solver chose.
        chosen: Names of the keys that the solver chose.
    """

    run: RunConfig
    hardware: HardwareSpec
    counts: ModelCounts
    evaluated: EvaluatedCandidate
    whole: RunConfig
    chosen: tuple[str, ...] = ()


def estimate(run: RunConfig, *, hardware: HardwareSpec, draw: Draw | None = None) -> Estimate:
    """Return the memory of `run` as training would plan it on a machine.

    Args:
        run: Validated run configuration.
        hardware: Machine to plan for.
        draw: See :func:`sppo.planning.chosen_run.with_chosen_degrees`, which chooses the degrees,
            the cuts and the schedule of a run that leaves out degrees.

    Raises:
        ValueError: The machine does not support the policy, there are more stages than layers, or
            the replicas cannot share the sequences evenly.
    """
    whole, chosen = with_chosen_degrees(run, hardware=hardware, draw=draw)
    evaluated = executed_candidate(whole, hardware=hardware)
    longest = run_of_longest_samples(run)
    return Estimate(longest, hardware, model_counts(run), evaluated, whole, chosen)


def model_counts(run: RunConfig) -> ModelCounts:
    """Return the parameters of the whole model and the bytes of one sequence."""
    model, length = run.model, run.sequence.length
    element = ELEMENT_BYTES[run.train.dtype]
    masters = ACCUMULATION_BYTES if element < ACCUMULATION_BYTES else 0
    layer_tokens = length * model.num_layers
    unit = layer_tokens * model.hidden_size
    kv_elements = 2 * model.kv_heads * model.head_dim * layer_tokens
    return ModelCounts(
        parameters=num_parameters(model),
        state_bytes_per_parameter=element + (1 + _MOMENTS) * ACCUMULATION_BYTES + masters,
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
