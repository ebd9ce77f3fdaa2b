"""Weight parts of a rank's stages, and the flat rows of weights or gradient sums that hold them.

A part is one layer, the parameters before the layers, or the parameters after the layers. It has
one row for each group of ranks that hold the same values, in which either all parameters train or
all are frozen, and outside of the layers one for each parameter. There are no sums of gradients of
frozen parameters, so a part may have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.engine.providers.streamed_rows import StreamedRows
from sppo.parallel.flat_row import FlatRow
from sppo.parallel.row_messages import RowMessage

WeightPart = int | Literal["embedding", "head"]
"""Weights taken together: an int is the layer of that index in the model, "embedding" the embedding
and learned positions, "head" the final norm and the projection to the vocabulary."""
Rows = Mapping[str, Tensor]
"""Rows by key on the device, or :class:`StreamedRows`, which come to it."""


class PartRows(Mapping[str, Tensor]):
    """Rows of a rank; a mapping of global names to parameters, as views of whole rows.

    If rows are sharded, a part is whole only while it is used or in flight: at most two layers (one
    in use, one in flight), or the largest part outside the layers, at once.

    Args:
        rows: Whole rows, or of those with a group this rank's shards.
        layouts: Layouts by key of all rows of the rank, of which ``rows`` may have only some.
        groups: Communicator of the ranks over which each row is sharded, by key.
    """

    def __init__(
        self,
        rows: Rows,
        layouts: Mapping[str, FlatRow],
        groups: Mapping[str, ProcessGroup],
    ) -> None:
        self.rows, self._layouts, self._groups = rows, layouts, groups
        self._streamed = rows if isinstance(rows, StreamedRows) else None
        first = self._streamed or next(iter(rows.values()), torch.empty(0))
        self.dtype, self.device = first.dtype, first.device
        every = {name: key for key, layout in layouts.items() for name in layout.shapes}
        here = {*rows}
        self._keys = {name: key for name, key in every.items() if key in here}
        self._names = {
            part: {local: name for local, name in own.items() if name in self._keys}
            for part, own in names_by_part(every).items()
        }
        stay = [] if self._streamed is not None else [k for k in rows if k not in groups]
        self._resident: Mapping[str, Tensor] = {
            name: view for key in stay for name, view in layouts[key].views(rows[key]).items()
        }
        """Parameters that are whole all the time: a view costs the host some microseconds."""
        sharded = {part: self._sharded_keys(part) for part in self._names}
        self.part_bytes = {
            part: sum(layouts[key].padded_elements for key in keys) * self.dtype.itemsize
            for part, keys in sharded.items()
        }
        """Bytes of the sharded rows of each part when they are whole."""
        self.room_bytes = max(
            (1 + isinstance(part, int)) * size for part, size in self.part_bytes.items()
        )
        """Most bytes of sharded rows that are whole at once."""
        self._peak_bytes = 0

    @classmethod
    def of(
        cls, parameters: Mapping[str, Tensor], *, every: Mapping[str, Tensor] | None = None
    ) -> PartRows:
        """Return contiguous parameters that stay on the device, each with a row of its own.

        Every use looks them up in ``parameters``, whose entries may be replaced between steps.

        Args:
            parameters: Parameters by global name.
            every: All parameters of the rank, if ``parameters`` are only some of them.
        """
        shapes = {name: tuple(p.shape) for name, p in (every or parameters).items()}
        layouts = {name: FlatRow({name: shape}) for name, shape in shapes.items()}
        found = cls({name: p.view(-1) for name, p in parameters.items()}, layouts, {})
        found._resident = parameters
        return found

    def __getitem__(self, name: str) -> Tensor:
        """Return a parameter; compute issued from now on waits for a streamed row."""
        if name in self._resident:
            return self._resident[name]
        key = self._keys[name]
        return self._layouts[key].view(self.rows[key], name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names."""
        return iter(self._keys)

    def __len__(self) -> int:
        """Return the number of all names."""
        return len(self._keys)

    def rows_of(self, layer: int) -> list[Tensor]:
        """Return the rows of a layer, in the order of their first parameters."""
        return [self.rows[key] for key in self._keys_of(layer)]

    def messages(self, part: WeightPart, allocate: Callable[..., Tensor]) -> list[RowMessage]:
        """Return a message for each sharded row of a part, with a row that ``allocate`` makes.

        Every rank of a group runs the same program, and so sends the same messages.
        """
        found = []
        for key in self._sharded_keys(part):
            layout = self._layouts[key]
            row = allocate(layout.padded_elements, dtype=self.dtype, device=self.device)
            found.append(RowMessage(key, layout, self._groups[key], whole=row))
        return found

    def views(self, part: WeightPart, messages: Iterable[RowMessage] = ()) -> dict[str, Tensor]:
        """Return the tensors of a part, sharded ones of ``messages``, by the names in the part."""
        whole = {message.key: message.whole for message in messages}
        found = {}
        for local, name in self._names[part].items():
            key = self._keys[name]
            found[local] = self._layouts[key].view(whole[key], name) if key in whole else self[name]
        return found

    def are_here(self, part: WeightPart) -> bool:
        """Return whether the sharded rows of a part are on the device, or being copied to it."""
        return self._streamed is None or self._streamed.has(self._sharded_keys(part))

    def count_whole(self, num_bytes: int) -> None:
        """Note the bytes of sharded rows that are whole."""
        self._peak_bytes = max(self._peak_bytes, num_bytes)

    def take_peak_bytes(self) -> int:
        """Return the peak bytes of whole sharded rows plus streamed rows since the last call."""
        peak, self._peak_bytes = self._peak_bytes, 0
        return peak + (0 if self._streamed is None else self._streamed.take_peak_bytes())

    def _sharded_keys(self, part: WeightPart) -> list[str]:
        return [key for key in self._keys_of(part) if key in self._groups]

    def _keys_of(self, part: WeightPart) -> Iterable[str]:
        return dict.fromkeys(self._keys[name] for name in self._names[part].values())


def names_by_part(names: Iterable[str]) -> dict[WeightPart, dict[str, str]]:
    """Return the global names of each part's parameters, by the names that ``take`` uses.

    Args:
        names: Global names of all parameters of a rank's stages. If there is a final norm without a
            projection ("head.weight"), the embedding is also part of the head.
    """
    parts: dict[WeightPart, dict[str, str]] = {}
    for name in names:
        owner, rest = name.split(".", 1)
        if owner == "layers":
            index, local = rest.split(".", 1)
            parts.setdefault(int(index), {})[local] = name
        elif owner in ("embed", "positions"):
            parts.setdefault("embedding", {})[name] = name
        else:
            parts.setdefault("head", {})[name] = name
    if "head" in parts and "head.weight" not in parts["head"]:
        parts["head"]["embed.weight"] = "embed.weight"
    return parts
