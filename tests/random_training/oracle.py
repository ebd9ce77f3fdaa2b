"""Expected results of a step: plain autograd in float64, and AdamW by its formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sppo.checkpoint.checkpoint import MODEL_PREFIX
from sppo.cost.parameters import is_decayed
from sppo.engine.unit import SequenceData
from sppo.kernels.cross_entropy import CROSS_ENTROPY
from sppo.kernels.labels import IGNORED_LABEL
from sppo.optim.adamw import STEP_KEY
from sppo.optim.fused_adamw import MOMENTS
from sppo.optim.learning_rate import learning_rate
from tests.engine.models import autograd_step, random_weights
from tests.engine.reference import merged, reference_logits, token_losses_of
from tests.random_training.case import DTYPES, Case
from tests.random_training.run_leg import Blocks, StepResult, places
from tests.random_training.samples import samples_alone

State = dict[str, Tensor]
"""Whole masters and moments by name, as a checkpoint has them, beside weights that are frozen."""

TOLERANCES = {"fp64": 1e-11, "fp32": 2e-4, "bf16": 0.35}
"""Of a gradient: the root mean square of its error, as a share of its own. With bf16 an error may
also be so many times that of plain autograd in bf16, for cancellation can leave little of a sum;
four layers on five counted tokens measured 0.25 with whatever engine, and autograd 0.1."""
_TIMES_AUTOGRAD = 8
_LEAST_SHARES = {"fp64": 1e-3, "fp32": 5e-3, "bf16": 3e-2}
"""A gradient that is zero but for rounding (GPT-2's key bias) is held to this share of the largest
root mean square of all."""
LOSS_TOLERANCES = {"fp64": 1e-11, "fp32": 2e-5, "bf16": 0.02}
"""Of a loss, as a share of it."""
_TOKEN_TOLERANCES = {"fp64": 0.0, "fp32": 0.0, "bf16": 0.3}
"""Of the loss of one token, whose logits are rounded; it averages out over many."""
_UPDATE_TOLERANCES = {"fp64": 1e-10, "fp32": 2e-5, "bf16": 2e-5}
"""Of what a step adds to the masters, which are fp32 beside bf16 weights, too."""


def first_state(case: Case) -> State:
    """Random masters and frozen weights, zero moments."""
    dtype = torch.float64 if case.dtype == "fp64" else torch.float32
    model, trainable = case.model.config(), case.trainable
    weights = random_weights(model, seed=case.seed, dtype=dtype, trainable=trainable)
    state = {MODEL_PREFIX + name: weight for name, weight in weights.items()}
    trained = {name: weight for name, weight in weights.items() if trainable.trains(name)}
    for moment in MOMENTS:
        state |= {f"optimizer.{moment}.{n}": torch.zeros_like(w) for n, w in trained.items()}
    return state | {STEP_KEY: torch.tensor(0)}


def _autograd_step(
    case: Case, weights: Mapping[str, Tensor], sequences: Sequence[SequenceData]
) -> tuple[Tensor, State]:
    """The loss, and the gradients of what trains."""
    loss, gradients = autograd_step(
        case.model.config(),
        weights,
        sequences,
        terms=case.terms,
        trainable=case.trainable,
        routing=case.routing,
        choice_biases=case.choice_biases,
    )
    return loss, {MODEL_PREFIX + name: gradient for name, gradient in gradients.items()}


def step_faults(
    case: Case, leg: int, step: int, *, before: State, ranks: Sequence[StepResult]
) -> tuple[list[str], State]:
    """What is wrong about one step, and the state after it.

    Args:
        case: the training.
        leg: number of its leg.
        step: number of the step in its leg.
        before: the state before the step.
        ranks: what each rank has of it.
    """
    model = case.model.config()
    compute = DTYPES[case.dtype]
    names = case.trainable.parameter_shapes(model)
    weights = {name: before[MODEL_PREFIX + name].to(compute).double() for name in names}
    sequences = step_sequences(case, leg, step)
    loss, gradients = _autograd_step(case, weights, sequences)
    counted = sum(data.num_valid for data in sequences)
    rounding = _TOKEN_TOLERANCES[case.dtype] * counted**-0.5
    found_losses = [rank.loss for rank in ranks]
    faults = list(_loss_faults(case, "loss", float(loss), found_losses, rounding=rounding))
    if case.legs[leg].evaluates:
        base = {**merged(weights, case.trainable), **case.choice_biases}
        for index, data in enumerate(sequences):
            faults += _label_faults(case, base, index, data, ranks)
    bounds = _bounds(case, weights, sequences, gradients)
    faults += _gradient_faults(gradients, bounds, [rank.gradients for rank in ranks])
    faults += [
        f"rank {number} executed {rank.executed}, its program is {rank.program}"
        for number, rank in enumerate(ranks)
        if rank.executed != rank.program
    ]
    found_gradients, missing = _assembled([rank.gradients for rank in ranks])
    after, missing_state = _assembled([rank.state for rank in ranks])
    missing += [*gradients.keys() - found_gradients.keys(), *missing_state]
    saved = {key for key in before if key in gradients or not key.startswith(MODEL_PREFIX)}
    if missing or after.keys() != saved:
        return [*faults, f"no rank has all of {missing}"], before
    after = before | after
    norm = float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt())
    found_norms = [rank.norm for rank in ranks]
    faults += _norm_faults(norm, found_gradients, found_norms, bounds=bounds)
    if not faults:  # a wrong gradient makes everything wrong behind it
        faults += _update_faults(case, step, before, found_gradients, after)
        faults += _copy_faults(case, after, ranks)
    return faults, after


def step_sequences(case: Case, leg: int, step: int) -> list[SequenceData]:
    """What a step trains on: whole sequences, or every sample by itself."""
    if case.samples is None:
        return case.sequences(leg, step)
    return samples_alone(case, leg, step)


def _loss_faults(
    case: Case, what: str, expected: float, found: Sequence[float], *, rounding: float
) -> Iterator[str]:
    tolerance = LOSS_TOLERANCES[case.dtype] * max(1.0, abs(expected)) + rounding
    for rank, value in enumerate(found):
        if not abs(value - expected) <= tolerance:
            yield f"{what} {value:.9g}, not {expected:.9g} (rank {rank})"


def _label_faults(
    case: Case,
    weights: Mapping[str, Tensor],
    index: int,
    data: SequenceData,
    ranks: Sequence[StepResult],
) -> Iterator[str]:
    """Every label that counts has one result, on one rank, of the step and of the evaluation."""
    valid = (data.labels_S != IGNORED_LABEL).nonzero().squeeze(1)
    with torch.no_grad():
        logits = reference_logits(case.model.config(), weights, data)[valid]
    labels = data.labels_S[valid]
    own = [rank for rank in ranks if rank.replica == index // len(rank.losses)]
    for what, terms, results in (
        ("trained", case.terms, [rank.losses for rank in own]),
        ("evaluated", CROSS_ENTROPY, [rank.evaluated for rank in own]),
    ):
        of_sequence = [result[index % len(result)] for result in results]
        positions = torch.cat([one.positions_L for one in of_sequence])
        order = positions.argsort()
        if positions[order].tolist() != valid.tolist():
            yield f"{what}: labels of sequence {index} at {positions.tolist()}"
            return
        losses = torch.cat([one.losses_L for one in of_sequence])[order].double()
        expected = token_losses_of(logits, labels, terms=terms)
        error = float((losses - expected).square().sum().sqrt())
        tolerance = LOSS_TOLERANCES[case.dtype] + _TOKEN_TOLERANCES[case.dtype]
        if not error <= tolerance * max(float(expected.square().sum().sqrt()), len(valid) ** 0.5):
            yield f"{what}: losses of the labels of sequence {index} are off by {error:.1e}"
        correct = torch.cat([one.correct_L for one in of_sequence])[order]
        if case.dtype == "fp64" and not torch.equal(correct, logits.argmax(1) == labels):
            yield f"{what}: correct predictions of sequence {index} are {correct.tolist()}"


def _norm_faults(
    expected: float, gradients: State, found: Sequence[float], *, bounds: Mapping[str, float]
) -> Iterator[str]:
    """The norm may be off by as much as the gradients together."""
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5
    for rank, value in enumerate(found):
        if not abs(value - exact) <= 1e-5 * exact:
            yield f"norm {value:.9g} of gradients with {exact:.9g} (rank {rank})"
    allowed = sum(g.numel() * bounds[name] ** 2 for name, g in gradients.items()) ** 0.5
    if not abs(exact - expected) <= allowed:
        yield f"norm {exact:.9g}, not {expected:.9g}"


def _bounds(
    case: Case,
    weights: Mapping[str, Tensor],
    sequences: Sequence[SequenceData],
    expected: Mapping[str, Tensor],
) -> dict[str, float]:
    """Largest root mean square that the error of each gradient may have."""
    sizes = {name: _rms(gradient) for name, gradient in expected.items()}
    least = _LEAST_SHARES[case.dtype] * max(sizes.values())
    bounds = {n: TOLERANCES[case.dtype] * max(size, least) for n, size in sizes.items()}
    if case.dtype == "bf16":
        narrow = {name: weight.bfloat16() for name, weight in weights.items()}
        _, rough = _autograd_step(case, narrow, sequences)
        for key, gradient in rough.items():
            error = _rms(gradient.double() - expected[key])
            bounds[key] = max(bounds[key], _TIMES_AUTOGRAD * error)
    return bounds


def _gradient_faults(
    expected: Mapping[str, Tensor], bounds: Mapping[str, float], ranks: Sequence[Blocks]
) -> Iterator[str]:
    for rank, blocks in enumerate(ranks):
        errors = [
            (_rms(block.tensor.double() - expected[name][places(block)]) / bounds[name], name)
            for name, own in blocks.items()
            for block in own
        ]
        wrong = sorted((error, name) for error, name in errors if not error <= 1.0)
        if wrong:
            error, name = wrong[-1]
            yield (
                f"gradients of rank {rank}: {len(wrong)} of {len(errors)} wrong, "
                f"{name.removeprefix(MODEL_PREFIX)} by {error:.1e} of what is allowed"
            )


def _update_faults(
    case: Case, step: int, before: State, gradients: State, after: State
) -> Iterator[str]:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2) on the gradients that were found."""
    config, count = case.optimizer, int(before[STEP_KEY]) + 1
    lr = learning_rate(step, config=config, total_steps=100)
    wide = {name: gradient.double() for name, gradient in gradients.items()}
    norm = float(torch.stack([g.square().sum() for g in wide.values()]).sum().sqrt())
    scale = min(1.0, config.clip_norm / (norm + 1e-6)) if config.clip_norm else 1.0
    if int(after[STEP_KEY]) != count:
        yield f"step {int(after[STEP_KEY])} in the state, not {count}"
    first_beta, second_beta = config.betas
    tolerance = _UPDATE_TOLERANCES[case.dtype]
    for key, gradient in wide.items():
        name = key.removeprefix(MODEL_PREFIX)
        g, old = gradient * scale, before[key].double()
        m, v = (before[f"optimizer.{moment}.{name}"].double() for moment in MOMENTS)
        m = first_beta * m + (1 - first_beta) * g
        v = second_beta * v + (1 - second_beta) * g.square()
        root = (v / (1 - second_beta**count)).sqrt()
        decay = config.weight_decay if is_decayed(name) else 0.0
        change = -lr * m / (1 - first_beta**count) / (root + config.eps) - lr * decay * old
        expected = {key: old + change}
        expected |= {f"optimizer.{x}.{name}": t for x, t in zip(MOMENTS, (m, v), strict=True)}
        for what, value in expected.items():
            error = float((after[what].double() - value).abs().max())
            if not error <= tolerance * float(value.abs().max() + 1e-6):
                yield f"{what} is off by {error:.2e} after the update"


def _copy_faults(case: Case, state: State, ranks: Sequence[StepResult]) -> Iterator[str]:
    """Every rank's weights must be the masters, rounded."""
    for number, rank in enumerate(ranks):
        for name, blocks in rank.weights.items():
            for block in blocks:
                master = state[name][places(block)].to(block.tensor.dtype)
                if not torch.equal(master, block.tensor):
                    yield f"rank {number} goes on with another {name} than was updated"


def _assembled(ranks: Sequence[Blocks]) -> tuple[State, list[str]]:
    """Whole tensors out of the blocks of all ranks, and the names of those with holes."""
    whole: State = {}
    covered: dict[str, Tensor] = {}
    for rank in ranks:
        for name, block in ((name, block) for name, blocks in rank.items() for block in blocks):
            if name not in whole:
                whole[name] = torch.zeros(block.global_shape, dtype=block.tensor.dtype)
                covered[name] = torch.zeros(block.global_shape, dtype=torch.bool)
            whole[name][places(block)] = block.tensor
            covered[name][places(block)] = True
    return whole, [name for name, mask in covered.items() if not bool(mask.all())]


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())
