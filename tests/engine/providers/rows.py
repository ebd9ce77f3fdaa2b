"""Flat rows of a model for tests of providers: one for each layer and each outer parameter."""

import torch

from sppo.parallel.flat_row import FlatRow


def layouts_of(shapes, *, ranks=1, rank=0):
    """Layouts of the rows of these parameters, by ``layers.3`` or the name of the parameter."""
    grouped = {}
    for name, shape in shapes.items():
        owner, index, *_ = name.split(".")
        key = f"{owner}.{index}" if owner == "layers" else name
        grouped.setdefault(key, {})[name] = shape
    return {key: FlatRow(own, ranks=ranks, rank=rank) for key, own in grouped.items()}


def rows_of(tensors, layouts):
    """Whole rows of these tensors."""
    dtype = next(iter(tensors.values())).dtype
    rows = {
        key: torch.zeros(layout.padded_elements, dtype=dtype) for key, layout in layouts.items()
    }
    for key, layout in layouts.items():
        for name, view in layout.views(rows[key]).items():
            view.copy_(tensors[name])
    return rows
