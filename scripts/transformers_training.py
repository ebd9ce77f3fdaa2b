"""Training of a Llama-shaped model with transformers, for comparison with SPPO.

Attention is torch's, the loss and AdamW over fp32 master weights are SPPO's, so that the sides
differ in how they hold and recompute activations. As a command, the script trains with activation
checkpointing on the GPU if there is one, and prints a line of JSON: seconds and loss of every step,
and peak memory.

    python scripts/transformers_training.py llama-3.2-1b --tokens tokens --length 65536 --steps 3
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from option_types import positive  # beside this file
from torch import Tensor

from sppo.config.optimizer import OptimizerConfig
from sppo.kernels.cross_entropy import linear_cross_entropy_with_gradient
from sppo.optim.adamw import AdamW


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: float) -> Any:
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        losses, _, dhidden = linear_cross_entropy_with_gradient(
            hidden, weight, labels, scale=scale, dweight_VE=dweight
        )
        context.save_for_backward(dhidden, dweight.to(weight.dtype))
        return losses.sum() * scale

    @staticmethod
    def backward(context: Any, dloss: Any) -> Any:
        dhidden, dweight = context.saved_tensors
        return dhidden * dloss.to(dhidden.dtype), dweight * dloss.to(dweight.dtype), None, None


def tiled_loss(hidden: Tensor, weight: Tensor, labels: Tensor, *, scale: float) -> Tensor:
    """Return `scale` times the summed loss, in tiles as in SPPO's engine but under autograd."""
    loss: Tensor = _TiledLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, scale
    )
    return loss


class TransformersTraining:
    """Model in bf16 with its optimizer, for training on one sequence.

    Args:
        config: Configuration of a Llama in transformers.
        tokens: Tokens of the sequence and the token after it, on the device that computes.
        checkpointing: Recompute every layer in backward.
    """

    def __init__(self, config: Any, tokens: Tensor, *, checkpointing: bool) -> None:
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        self._model = LlamaForCausalLM._from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation="sdpa", dtype=torch.bfloat16
        ).to(tokens.device)
        self._model.train()
        if checkpointing:
            self._model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        self._inputs, self._labels = tokens[None, :-1], tokens[1:]
        self._weights = {n: p.data for n, p in self._model.named_parameters()}
        self._gradients = {
            n: torch.zeros_like(w, dtype=torch.float32) for n, w in self._weights.items()
        }
        self._optimizer = AdamW(self._weights, config=OptimizerConfig())

    def step(self) -> float:
        """Run one training step and return the loss."""
        loss = self._loss()
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self._model.named_parameters():
            assert parameter.grad is not None, f"{name} got no gradient"
            self._gradients[name].copy_(parameter.grad)
            parameter.grad = None
        self._optimizer.step(self._gradients, lr=3e-4)
        return float(loss.detach())

    def _loss(self) -> Tensor:
        hidden = self._model.model(self._inputs, use_cache=False).last_hidden_state[0]
        return tiled_loss(
            hidden, self._model.lm_head.weight, self._labels, scale=1 / len(self._labels)
        )


def trained(preset: str, *, tokens: Path, length: int, steps: int) -> dict[str, Any]:
    """Train a preset with activation checkpointing.

    Args:
        preset: Name of a Llama, as in ``model.preset``.
        tokens: Directory of token data.
        length: Length of the sequence, from the first token.
        steps: Number of steps, all on the same sequence.

    Returns:
        Seconds and loss of each step, and peak bytes of tensors on a GPU; 0 on a CPU.
    """
    from transformers import LlamaConfig

    from sppo.config import ModelConfig
    from sppo.config.huggingface.model_config import hf_config
    from sppo.config.model.presets import PRESETS
    from sppo.data.tokens import open_tokens

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LlamaConfig(**hf_config(ModelConfig(**PRESETS[preset]), dtype="bf16"))
    stored = open_tokens(tokens).tokens[: length + 1].astype("int64")
    training = TransformersTraining(config, torch.from_numpy(stored).to(device), checkpointing=True)
    found: dict[str, Any] = {"step_s": [], "loss": []}
    for _ in range(steps):
        begin = time.perf_counter()
        found["loss"].append(training.step())
        found["step_s"].append(time.perf_counter() - begin)
    on_gpu = device.type == "cuda"
    return {**found, "device_peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0}


def main() -> int:
    """Parse arguments, train, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", help="model, as in model.preset")
    parser.add_argument("--tokens", type=Path, required=True, help="directory of token data")
    parser.add_argument("--length", type=positive, required=True, help="tokens of the sequence")
    parser.add_argument("--steps", type=positive, default=3)
    options = parser.parse_args()
    found = trained(
        options.preset, tokens=options.tokens, length=options.length, steps=options.steps
    )
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
