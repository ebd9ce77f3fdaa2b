"""Engine with weights and gradients in another tier, and copies that arrive late."""

from __future__ import annotations

import torch

from sppo.cost.parameters import parameter_shapes
from sppo.engine.engine import Engine
from sppo.engine.providers.gradients import GradientProvider
from sppo.engine.providers.part_rows import PartRows
from sppo.engine.providers.streamed_rows import StreamedGradients, StreamedWeights
from sppo.engine.providers.weights import WeightProvider
from sppo.model.gradients import zero_gradients
from sppo.parallel.flat_row import FlatRow
from sppo.parallel.megatron import WeightSharding


class LateLane:
    """Copies run when they are waited for and not before; until then targets are NaN."""

    def __init__(self):
        self._waiting = []

    def host_memory(self, name, size_bytes):
        return torch.full((size_bytes,), 0xFF, dtype=torch.uint8)

    def computed(self, tensors):
        return None

    def out(self, copies, *, after):
        for target, _ in copies:
            target.fill_(float("nan"))
        return _Late(self._waiting, list(copies))

    back = out

    def before_compute(self, event):
        event.exception()

    def close(self):
        while self._waiting:
            self._waiting[0].exception()
        return True


class _Late:
    def __init__(self, waiting, copies):
        self._waiting, self._copies = waiting, copies
        waiting.append(self)

    def exception(self):
        """Run this and what was asked for before it."""
        while self in self._waiting:
            for target, source in self._waiting.pop(0)._copies:
                target.copy_(source)


def names_of_stages(model, pipeline):
    """Names of the parameters of each stage of a rank."""
    sharding = WeightSharding(model)
    return {stage: [*sharding.shapes(layers)] for stage, layers in pipeline.layers(model).items()}


class Streamed:
    """As :class:`tests.engine.models.Trained`; weights and gradients live in another tier."""

    def __init__(self, model, weights, *, pipeline):
        stages = names_of_stages(model, pipeline)
        how = {"stages": stages, "device": torch.device("cpu"), "lane": LateLane()}
        self.gradients = zero_gradients(weights)
        for total in self.gradients.values():
            total.fill_(float("nan"))  # of the step before
        layouts = {name: FlatRow({name: s}) for name, s in parameter_shapes(model).items()}
        self.weights = StreamedWeights({n: w.view(-1) for n, w in weights.items()}, **how)
        self.sums = StreamedGradients({n: g.view(-1) for n, g in self.gradients.items()}, **how)
        self.engine = Engine(
            model,
            weights=WeightProvider(PartRows(self.weights, layouts, {})),
            gradients=GradientProvider(PartRows(self.sums, layouts, {})),
            pipeline=pipeline,
            debug=True,
        )

    def step(self, sequences, cuts, **options):
        """Mean loss and gradients of one step from zero."""
        done = self.engine.accumulate(sequences, cuts, **options)
        self.sums.arrive()
        gradients = {name: gradient.clone() for name, gradient in self.gradients.items()}
        return done.total_loss / done.num_valid, gradients
