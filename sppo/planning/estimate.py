"""Memory of a run, and counts of its model and of one sequence, predicted before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sppo.activations.policy import POLICIES, saved_bytes_per_token
from sppo.config.run import RunConfig
from sppo.cost.linear_attention.states import state_bytes
from sppo.cost.trainable import parameter_counts, trainable_of_run
from sppo.cost.workload import ACCUMULATION_BYTES, ELEMENT_BYTES, NUM_MOMENTS
from sppo.hardware.description import HardwareSpec
from sppo.planning.chosen_run import Draw, with_chosen_degrees
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.run_plan import executed_candidate
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.planning.validation_plan import ValidationPlan


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """Parameters of a model and bytes of one sequence, over all devices together.

    Attributes:
        parameters: Number of scalars.
        trained_parameters: Number of those that train.
        state_bytes_per_parameter: Bytes of weights, gradients and optimizer states per parameter
            that trains: 18 in bf16.
        frozen_bytes_per_parameter: Bytes of weights per frozen parameter.
        saved_bytes: Bytes of activations that this engine saves without K and V, by policy.
        kv_bytes: Bytes of K and V.
        kv_gradients_bytes: Bytes of the fp32 gradients of K and V.
        linear_state_bytes: Bytes of the states of linear attention behind one subsequence.
    """

    parameters: int
    trained_parameters: int
    state_bytes_per_parameter: int
    frozen_bytes_per_parameter: int
    saved_bytes: Mapping[str, int]
    kv_bytes: int
    kv_gradients_bytes: int
    linear_state_bytes: int

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer states."""
        trained, frozen = self.trained_parameters, self.parameters - self.trained_parameters
        return trained * self.state_bytes_per_parameter + frozen * self.frozen_bytes_per_parameter


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """Predicted memory of a run file.

    Attributes:
        run: Run configuration as written; of documents, with its longest samples as sequences.
        hardware: Description of the machine.
        counts: Counts of the model and one sequence.
        evaluated: Evaluated candidate, with memory by stage and the shortfall if it does not fit.
        chosen: Names of the keys that the solver chose.
        validation: Plan of the run's validations; None if it has none, or does not fit.
    """

    run: RunConfig
    hardware: HardwareSpec
    counts: ModelCounts
    evaluated: EvaluatedCandidate
    chosen: tuple[str, ...] = ()
    validation: ValidationPlan | None = None


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
    return Estimate(longest, hardware, model_counts(run), evaluated, chosen)


def model_counts(run: RunConfig) -> ModelCounts:
    """Return the parameters of the whole model and the bytes of one sequence."""
    model, length = run.model, run.sequence.length
    element = ELEMENT_BYTES[run.train.dtype]
    masters = ACCUMULATION_BYTES if element < ACCUMULATION_BYTES else 0
    moments = NUM_MOMENTS * ELEMENT_BYTES[run.optimizer.moments]
    kv_elements = 2 * model.kv_heads * model.head_dim * length * model.num_attention_layers
    trained, total = parameter_counts(model, trainable_of_run(run))
    return ModelCounts(
        parameters=total,
        trained_parameters=trained,
        state_bytes_per_parameter=element + ACCUMULATION_BYTES + masters + moments,
        frozen_bytes_per_parameter=element,
        saved_bytes={
            policy: length
            * saved_bytes_per_token(
                policy, model, layers=range(model.num_layers), element_bytes=element
            )
            for policy in POLICIES
        },
        kv_bytes=kv_elements * element,
        kv_gradients_bytes=kv_elements * ACCUMULATION_BYTES,
        linear_state_bytes=state_bytes(model, element, 1)
        * (model.num_layers - model.num_attention_layers),
    )
