"""Rows of saved tensors: those that leave the device, and those that stay."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sppo.model.mixer import Saved, token_dimension


def cut(
    saved: Saved, offloaded_rows: Mapping[str, int], retained_rows: Mapping[str, int]
) -> dict[str, Saved]:
    """Remove the named tensors from ``saved``; return views of "offloaded" and "retained" rows."""
    offloaded: Saved = {}
    retained: Saved = {}
    for name in {**offloaded_rows, **retained_rows}:
        tensor, dim, first = saved.pop(name), token_dimension(name), offloaded_rows.get(name, 0)
        if first:
            offloaded[name] = tensor.narrow(dim, 0, first)
        if name in retained_rows:
            retained[name] = tensor.narrow(dim, first, retained_rows[name])
    return {"offloaded": offloaded, "retained": retained}


def join(offloaded: Saved, retained: Saved) -> Saved:
    """Return the saved rows of tensors that :func:`cut` divided, each as one tensor again."""
    joined = {**offloaded, **retained}
    for name in offloaded.keys() & retained.keys():
        joined[name] = torch.cat([offloaded[name], retained[name]], dim=token_dimension(name))
    return joined
