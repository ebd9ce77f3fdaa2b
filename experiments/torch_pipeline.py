"""A Llama-shaped stage for torch's pipelining; used by :mod:`experiments.pipelining`.

Plain modules under autograd in bf16; backward recomputes nothing. Attention is torch's flash kernel
for CPUs. K/V heads are repeated before the kernel, because its backward takes much longer with
shared heads. The loss is computed in tiles together with its gradient, as in SPPO's engine, so that
the logits of a long sequence never exist at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers_training import tiled_loss  # of scripts/, which experiments.harness adds

from sppo.config import ModelConfig
from sppo.cost.stage_layers import layers_of_stages
from sppo.model.initialize import initial_weights
from sppo.model.rope import rotary_table


class TorchPipeline:
    """One rank of torch's GPipe (one sequence per step) or 1F1B (two or more).

    Args:
        model: Shape of the model.
        tokens_MT: Tokens of M sequences, each with one more token than its length: the last is a
            label.
        rank: Rank in the default process group, which is the pipeline.
    """

    gradient_bytes = 0
    """Bytes of gradients between steps: none, because a step allocates them."""

    def __init__(self, model: ModelConfig, tokens_MT: Tensor, *, rank: int) -> None:
        self._inputs_MS, self._labels_MS = tokens_MT[:, :-1], tokens_MT[:, 1:]
        stages = dist.get_world_size()
        self._is_first, self._is_last = rank == 0, rank == stages - 1
        self._stage = _Stage(model, rank=rank, num_stages=stages).bfloat16()
        weights = initial_weights(model, seed=0)
        self._stage.load_state_dict({name: weights[name] for name in self._stage.state_dict()})
        self._schedule = _schedule(self._stage, model, self._inputs_MS, rank=rank, stages=stages)
        self._loss = 0.0

    def step(self) -> None:
        """Run forward and backward of the mean loss of all sequences."""
        losses: list[Tensor] = []
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # no fallback to another kernel
            self._schedule.step(
                *((self._inputs_MS,) if self._is_first else ()),
                target=self._labels_MS if self._is_last else None,
                losses=losses,
                return_outputs=False,
            )
        self._loss = float(torch.stack(losses).detach().sum()) if self._is_last else 0.0

    def findings(self) -> dict[str, Any]:
        """Return figures of the last step, and free its gradients."""
        gradients = [p.grad.float() for p in self._stage.parameters() if p.grad is not None]
        norm = float(torch.stack(list(torch._foreach_norm(gradients))).norm())
        self._stage.zero_grad(set_to_none=True)
        name = "GPipe" if len(self._inputs_MS) == 1 else "1F1B"
        return {"schedule": name, "loss": self._loss, "gradient_norm": norm}


def _schedule(
    module: _Stage, model: ModelConfig, inputs_MS: Tensor, *, rank: int, stages: int
) -> Any:
    """Return a schedule for given shapes, so that no step is spent on finding them.

    The schedule is GPipe for a single micro-batch: torch's 1F1B needs at least as many as stages.
    """
    sequences, length = inputs_MS.shape
    hidden = torch.empty(1, length, model.hidden_size, dtype=torch.bfloat16, device="meta")
    hidden.requires_grad_()
    stage = PipelineStage(
        module,
        stage_index=rank,
        num_stages=stages,
        device=torch.device("cpu"),
        input_args=inputs_MS[:1].to("meta") if rank == 0 else hidden,
        output_args=hidden,
    )
    kind = ScheduleGPipe if sequences == 1 else Schedule1F1B
    loss = partial(module.loss, scale=1.0 / (sequences * length))
    return kind(stage, sequences, loss_fn=loss, scale_grads=False)


class _Stage(nn.Module):
    """Embedding and layers, or layers and final norm; parameters are named as in SPPO's engine."""

    def __init__(self, model: ModelConfig, *, rank: int, num_stages: int) -> None:
        super().__init__()
        self._model = model
        layers = layers_of_stages(model, num_ranks=num_stages)[rank]
        if rank == 0:
            self.embed = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleDict({str(index): _Layer(model) for index in layers})
        if rank == num_stages - 1:
            self.final_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
            self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden ``[1, S, E]`` from tokens ``[1, S]`` on the first stage, or from hidden."""
        positions = torch.arange(x.shape[1])
        rotation = self._model.layer_type(0).rotation
        assert rotation is not None, "compared models rotate q and k"
        table = rotary_table(self._model, rotation, positions, dtype=torch.bfloat16)
        cos, sin = (
            torch.cat([half, half], -1).squeeze(1).bfloat16() for half in (table.cos, table.sin)
        )
        if hasattr(self, "embed"):
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return self.final_norm(x) if hasattr(self, "final_norm") else x

    def loss(self, hidden_1SE: Tensor, labels_1S: Tensor, *, scale: float) -> Tensor:
        """Return ``scale`` times the summed loss of one sequence."""
        loss: Tensor = tiled_loss(hidden_1SE[0], self.head.weight, labels_1S[0], scale=scale)
        return loss


class _Layer(nn.Module):
    """Transformer layer in plain torch."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self._size, self._groups = model.head_dim, model.num_heads // model.kv_heads
        hidden, keys = model.hidden_size, model.kv_heads * model.head_dim
        queries = model.num_heads * model.head_dim
        self.attention_norm = nn.RMSNorm(hidden, eps=model.norm_eps)
        self.q = nn.Linear(hidden, queries, bias=False)
        self.k = nn.Linear(hidden, keys, bias=False)
        self.v = nn.Linear(hidden, keys, bias=False)
        self.o = nn.Linear(queries, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=model.norm_eps)
        self.gate = nn.Linear(hidden, model.mlp_size, bias=False)
        self.up = nn.Linear(hidden, model.mlp_size, bias=False)
        self.down = nn.Linear(model.mlp_size, hidden, bias=False)

    def forward(self, x_1SE: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        """Return the output of the layer."""
        n = self.attention_norm(x_1SE)
        q = _turned(self._heads(self.q(n)), cos_SD, sin_SD)
        k = _turned(self._heads(self.k(n)), cos_SD, sin_SD)
        k, v = self._repeated(k), self._repeated(self._heads(self.v(n)))
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x: Tensor = x_1SE + self.o(o.transpose(1, 2).flatten(2))
        n = self.mlp_norm(x)
        added: Tensor = self.down(functional.silu(self.gate(n)) * self.up(n))
        return x + added

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self._size).transpose(1, 2)

    def _repeated(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self._groups, dim=1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    turned: Tensor = x * cos + torch.cat([-second, first], -1) * sin
    return turned
