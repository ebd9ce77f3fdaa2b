"""flash-attn 2, 3 and 4, and the copy of flash-attn 2 inside torch, as rectangle kernels.

Each version of flash-attn is a separate package; the functions below its autograd classes take and
return lse, and are imported at their first use. Required are flash-attn 2.7 or later, a flash-attn
3 with ``window_size_left``, and a flash-attn 4 with ``return_lse``.
:mod:`sppo.kernels.attention.choice` runs a small case before it chooses one of these kernels.

Operands of the packages have a leading batch dimension of one, or none if the offsets of documents
are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sppo.kernels.attention.rectangle_attention import RectangleCall

_Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class FlashPackage:
    """Rectangle kernel over one package, by the names and arguments in which packages differ."""

    module: str
    functions: tuple[str, str]
    """Forward and backward of one rectangle."""
    document_functions: tuple[str, str] | None
    """Forward and backward of several rectangles; None if there are none for every device."""
    no_window: int | None = -1
    """Size of the window on either side that hides no key."""
    lse_name: str = "softmax_lse"
    causal_name: str = "causal"
    """Name of backward's argument; forward's is ``causal``."""
    takes_gradients: bool = True
    """Whether backward writes to tensors that it is given, or else returns new ones."""
    forward_options: Mapping[str, Any] = field(default_factory=dict)
    backward_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def takes_documents(self) -> bool:
        """True if a call may compute several rectangles."""
        return self.document_functions is not None

    def forward(self, call: RectangleCall) -> tuple[Tensor, Tensor]:
        """Return (o_cND, lse_Nc)."""
        o, lse, *_ = self._function(call, 0)(
            *_batched(call, call.q_cND, call.k_tKD, call.v_tKD),
            **self._arguments(call),
            causal=call.causal,
            **self.forward_options,
        )
        return _unbatched(call, o), _unbatched(call, lse)

    def backward(
        self, call: RectangleCall, do_cND: Tensor, o_cND: Tensor, lse_Nc: Tensor
    ) -> _Gradients:
        """Return (dq, dk, dv)."""
        operands = {"q": call.q_cND, "k": call.k_tKD, "v": call.v_tKD}
        named = {"dout": do_cND, **operands, "out": o_cND, self.lse_name: lse_Nc}
        if self.takes_gradients:
            dq, dk, dv = (
                torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in operands.values()
            )
            named |= {"dq": dq, "dk": dk, "dv": dv}
        results = self._function(call, 1)(
            **dict(zip(named, _batched(call, *named.values()), strict=True)),
            **self._arguments(call),
            **{self.causal_name: call.causal},
            **self.backward_options,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        if not self.takes_gradients:
            dq, dk, dv = (_unbatched(call, x) for x in results[:3])
        return dq, dk, dv

    def _function(self, call: RectangleCall, index: int) -> Any:
        names = self.functions if call.documents is None else self.document_functions
        assert names is not None, "takes one document at a time"
        return getattr(import_module(self.module), names[index])

    def _arguments(self, call: RectangleCall) -> dict[str, Any]:
        """Return the arguments that forward and backward of all packages call alike."""
        left, right = (self.no_window,) * 2 if call.window is None else (call.window - 1, 0)
        arguments: dict[str, Any] = {
            "softmax_scale": call.scale,
            "window_size_left": left,
            "window_size_right": right,
        }
        if call.documents is not None:
            arguments |= {
                "cu_seqlens_q": call.documents.queries,
                "cu_seqlens_k": call.documents.keys,
                "max_seqlen_q": call.documents.most_queries,
                "max_seqlen_k": call.documents.most_keys,
            }
        return arguments


_NO_EXTRAS = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}
_NAMES = ("_flash_attn_forward", "_flash_attn_backward")
FLASH_ATTN_2 = FlashPackage(
    "flash_attn.flash_attn_interface",
    _NAMES,
    ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
    forward_options={**_NO_EXTRAS, "return_softmax": False},
    backward_options=_NO_EXTRAS,
)
FLASH_ATTN_3 = FlashPackage("flash_attn_interface", _NAMES, _NAMES, causal_name="is_causal")
"""For compute capability 9.0."""
FLASH_ATTN_4 = FlashPackage(
    "flash_attn.cute.interface",
    ("_flash_attn_fwd", "_flash_attn_bwd"),
    None,
    no_window=None,
    lse_name="lse",
    takes_gradients=False,
    forward_options={"return_lse": True},
)
"""For compute capabilities 9 to 11. Only recent versions support documents in backward, and not on
every device."""


class TorchFlash:
    """Rectangle kernel over ``aten::_flash_attention_forward``, torch's copy of flash-attn 2."""

    takes_documents = True

    def forward(self, call: RectangleCall) -> tuple[Tensor, Tensor]:
        """Return (o_cND, lse_Nc)."""
        o, lse, *_ = torch.ops.aten._flash_attention_forward(
            *_batched(call, call.q_cND, call.k_tKD, call.v_tKD),
            *_torch_offsets(call),
            0.0,
            call.causal,
            False,
            **_torch_options(call),
        )
        return _unbatched(call, o), _unbatched(call, lse)

    def backward(
        self, call: RectangleCall, do_cND: Tensor, o_cND: Tensor, lse_Nc: Tensor
    ) -> _Gradients:
        """Return (dq, dk, dv)."""
        no_dropout = torch.empty(2, dtype=torch.uint64, device=do_cND.device)  # never read
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *_batched(call, do_cND, call.q_cND, call.k_tKD, call.v_tKD, o_cND, lse_Nc),
            *_torch_offsets(call),
            0.0,
            call.causal,
            no_dropout,
            no_dropout[0],
            **_torch_options(call),
        )
        return _unbatched(call, dq), _unbatched(call, dk), _unbatched(call, dv)


def _torch_offsets(call: RectangleCall) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return the arguments (cum_seq_q, cum_seq_k, max_q, max_k) of torch's operators."""
    documents = call.documents
    if documents is None:
        return None, None, call.q_cND.shape[0], call.k_tKD.shape[0]
    return documents.queries, documents.keys, documents.most_queries, documents.most_keys


def _torch_options(call: RectangleCall) -> dict[str, Any]:
    left, right = (None, None) if call.window is None else (call.window - 1, 0)
    return {"scale": call.scale, "window_size_left": left, "window_size_right": right}


def _batched(call: RectangleCall, *operands: Tensor) -> tuple[Tensor, ...]:
    """Return operands with a batch dimension of one, or unchanged if there are documents."""
    return operands if call.documents is not None else tuple(x.unsqueeze(0) for x in operands)


def _unbatched(call: RectangleCall, result: Tensor) -> Tensor:
    """Return ``result`` without the batch dimension that :func:`_batched` added."""
    return result if call.documents is not None else result[0]
