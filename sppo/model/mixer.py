"""Token mixer of a layer: the half that lets tokens read earlier ones, behind one interface.

A mixer is given the tokens after the norm of its input, and its output is added to the residual
stream. With sharded weights (Megatron) tokens are gathered, and outputs and gradients of tokens are
terms of a sum over the ranks.

Legend: C tokens, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from sppo.model.gradients import GradientSink

Saved = dict[str, Tensor]
"""Tensors of one layer that forward saved, or that backward has recomputed, by name."""
Save = Callable[..., None]
"""Function that is given tensors as keywords, and saves those that a plan names."""
Inputs = Callable[[int], Tensor]
"""Function that returns the mixer's input of the tokens from a number on."""


class Mixer(Protocol):
    """Token mixer of one layer for the tokens of a subsequence."""

    def forward(self, n1_CE: Tensor, save: Save) -> Tensor:
        """Return the output ``[C, E]``, in new memory, and keep what later subsequences read."""
        ...

    def recompute_missing_rows(self, saved: Saved, cut: Mapping[str, int], inputs: Inputs) -> None:
        """Recompute the last rows of each of the mixer's tensors that ``saved`` has in part.

        Args:
            saved: Saved tensors of the layer.
            cut: Number of rows of those saved in part.
            inputs: Input of the mixer.
        """
        ...

    def output(self, saved: Saved, inputs: Inputs, *, first: int = 0) -> Tensor:
        """Return the output of the tokens from number ``first`` on, in new memory.

        Tensors of ``saved`` that it needs have all rows; the others are recomputed and added.
        """
        ...

    def begin_backward(self, n1_CE: Tensor, saved: Saved) -> None:
        """Recompute in ``saved`` what is to be there before the MLP's backward."""
        ...

    def backward(
        self, dy_CE: Tensor, n1_CE: Tensor, saved: Saved, gradients: GradientSink
    ) -> Tensor:
        """Return the gradient of ``n1_CE``, in new memory.

        Args:
            dy_CE: Gradient of the output.
            n1_CE: Input of the mixer.
            saved: Saved tensors of the layer after :meth:`begin_backward`. The mixer's are removed.
            gradients: Sink of the gradients of the weights, which owns all operands.
        """
        ...

    def recompute_kv(self, n1_CE: Tensor) -> None:
        """Keep again the keys and values that later subsequences read, as in :meth:`forward`."""
        ...


def token_dimension(name: str) -> int:
    """Return the dimension of the saved tensor ``name`` along which its tokens lie."""
    return 1 if name == "lse" else 0
