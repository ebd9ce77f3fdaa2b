"""Weight parts whose flat rows of weights or gradients are sharded over ranks between uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.engine.providers.row_views import Rows
from sppo.engine.providers.weights import (
    WeightPart,
    format_of,
    names_by_part,
    streamed_peak_bytes,
)
from sppo.parallel.flat_row import FlatRow
from sppo.parallel.row_messages import RowMessage


class ShardedParts:
    """Common base of providers of parts that are whole only while they are used or in flight.

    At most two layers (one in use, one in flight), or the largest part outside the layers, are
    whole at once. Every rank of a group runs the same program, and so sends the same messages.

    Args:
        shards: This rank's interval of the row of each weight part, or of its gradient sums, by
            key.
        layouts: Layouts of the rows by key.
        groups: Communicator of the ranks over which each row is sharded, by key; rows without one
            are whole on this rank.
    """

    def __init__(
        self,
        shards: Rows,
        *,
        layouts: Mapping[str, FlatRow],
        groups: Mapping[str, ProcessGroup],
    ) -> None:
        self._shards, self._layouts, self._groups = shards, layouts, groups
        self.dtype, self.device = format_of(shards)
        self._names = names_by_part(name for layout in layouts.values() for name in layout.shapes)
        keys = {name: key for key, layout in layouts.items() for name in layout.shapes}
        self._keys = {
            part: [*dict.fromkeys(keys[name] for name in names.values())]
            for part, names in self._names.items()
        }
        self._part_bytes = {
            part: sum(layouts[key].padded_elements for key in own if key in groups)
            * self.dtype.itemsize
            for part, own in self._keys.items()
        }
        self.room_bytes = max(
            (1 + isinstance(part, int)) * size for part, size in self._part_bytes.items()
        )
        self._peak_bytes = 0

    def take_peak_bytes(self) -> int:
        """Return the peak bytes of whole parts plus streamed shards since the last call."""
        peak, self._peak_bytes = self._peak_bytes, 0
        return peak + streamed_peak_bytes(self._shards)

    def _count(self, held_bytes: int) -> None:
        self._peak_bytes = max(self._peak_bytes, held_bytes)

    def _messages(self, part: WeightPart, allocate: Callable[..., Tensor]) -> list[RowMessage]:
        """Return a message for each sharded row of a part, with a row that ``allocate`` makes."""
        found = []
        for key in self._keys[part]:
            if key in self._groups:
                layout = self._layouts[key]
                row = allocate(layout.padded_elements, dtype=self.dtype, device=self.device)
                found.append(RowMessage(key, layout, self._groups[key], whole=row))
        return found

    def _views(self, part: WeightPart, messages: Iterable[RowMessage]) -> dict[str, Tensor]:
        """Return the tensors of a part, sharded ones of ``messages``, by the names in the part."""
        rows = {key: self._shards[key] for key in self._keys[part] if key not in self._groups}
        rows |= {message.key: message.whole for message in messages}
        views = {
            n: v for key, row in rows.items() for n, v in self._layouts[key].views(row).items()
        }
        return {local: views[name] for local, name in self._names[part].items()}
