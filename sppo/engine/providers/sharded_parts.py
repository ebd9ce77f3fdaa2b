"""Parts of a model whose parameters or gradients are sharded by rows over ranks between uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.engine.providers.weights import (
    WeightPart,
    format_of,
    names_by_part,
    streamed_peak_bytes,
)
from sppo.parallel.row_layout import RowLayout, Shapes


class ShardedParts:
    """Common base of providers of parts that are whole only while they are used or in flight.

    At most two layers (one in use, one in flight), or the largest part outside the layers, are
    whole at once. Every rank of a group runs the same program, and so sends the same messages.

    Args:
        rows: This rank's rows of every parameter of its stages, or of its gradient sum, by global
            name.
        shapes: Shapes of the whole parameters by global name.
        groups: Communicator of the ranks over which each parameter is sharded, by global name;
            parameters without one are whole on this rank.
    """

    def __init__(
        self,
        rows: Mapping[str, Tensor],
        *,
        shapes: Shapes,
        groups: Mapping[str, ProcessGroup],
    ) -> None:
        self.dtype, self.device = format_of(rows)
        self._rows, self._shapes, self._groups = rows, shapes, groups
        self._parts = names_by_part(rows)
        self._part_bytes = {part: self._padded_bytes(part) for part in self._parts}
        self.room_bytes = max(
            (1 + isinstance(part, int)) * size for part, size in self._part_bytes.items()
        )
        self._peak_bytes = 0

    def take_peak_bytes(self) -> int:
        """Return the peak bytes of whole parts plus streamed rows since the last call."""
        peak, self._peak_bytes = self._peak_bytes, 0
        return peak + streamed_peak_bytes(self._rows)

    def _count(self, held_bytes: int) -> None:
        self._peak_bytes = max(self._peak_bytes, held_bytes)

    def _messages(self, part: WeightPart) -> Iterator[tuple[ProcessGroup, Shapes]]:
        """Yield the messages of a part: one per group, and outside the layers one per parameter.

        Each is a communicator, and the shapes of the whole parameters in the message.
        """
        messages: dict[object, tuple[ProcessGroup, dict[str, tuple[int, ...]]]] = {}
        for name in self._parts[part].values():
            if name in self._groups:
                group = self._groups[name]
                key = group if isinstance(part, int) else name
                messages.setdefault(key, (group, {}))[1][name] = self._shapes[name]
        yield from messages.values()

    def _padded_bytes(self, part: WeightPart) -> int:
        elements = sum(
            group.size() * RowLayout.of(shapes, ranks=group.size()).elements
            for group, shapes in self._messages(part)
        )
        return elements * self.dtype.itemsize

    def _by_local_name(self, part: WeightPart, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a part, sharded ones of ``whole``, by the names in the part."""
        return {
            local: whole[name] if name in whole else self._rows[name]
            for local, name in self._parts[part].items()
        }
