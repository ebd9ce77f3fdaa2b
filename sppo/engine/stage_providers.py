"""What a stage takes to run a unit: weights, sinks of gradients, keys and values, and the ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sppo.engine.attention.kv_store import KVStore, StoredKV
from sppo.engine.model_ends import Ends
from sppo.engine.providers.gradients import GradientProvider, gradients_of
from sppo.engine.providers.weights import PartProvider
from sppo.engine.unit import Unit
from sppo.model.gradients import GradientSink, GradientSum


@dataclass(slots=True)
class StageProviders:
    """Providers of the units that the rank of a stage runs alone; MSP shards have others.

    Attributes:
        weights: Provider of the parameters of the layers, in the compute dtype.
        gradients: Provider of buffers to add gradients to; None for evaluation only.
        store: Store of keys and values of the rank.
        ends: Embedding and head.
    """

    weights: PartProvider
    gradients: GradientProvider | None
    store: KVStore
    ends: Ends

    def begin(self, unit: Unit, layers: Sequence[int], *, forward: bool) -> None:
        """Prepare for a pass of ``unit`` through ``layers``, in this order.

        Does nothing here: the layers of all units were announced at the start of the step.
        """

    @contextmanager
    def sink(self, unit: Unit, layer: int) -> Iterator[GradientSink]:
        """Yield the sink of a layer's gradients, which are in the sums on exit."""
        assert self.gradients is not None, "training needs gradient buffers"
        with gradients_of(self.gradients, layer) as totals:
            yield GradientSum(totals)

    def kv(self, unit: Unit, layer: int) -> StoredKV:
        """Return the keys and values that the queries of ``unit`` see in a layer."""
        return StoredKV(self.store, layer, unit.sequence, unit.span)
