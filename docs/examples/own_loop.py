"""A training loop of one's own: gradients of long sequences by SPPO, the update by torch.

The engine adds the gradient of the mean loss to buffers by name, in any number of subsequences;
what is done with them is yours. Learns the source of the standard json module, byte by byte:

    python docs/examples/own_loop.py
"""

import inspect
import json

import sppo  # before torch, so that threads which wait for work sleep

# isort: split
import torch

LENGTH, NUM_SUBSEQUENCES, STEPS = 4096, 4, 8


def main() -> None:
    """Train for a few steps and print the losses."""
    run = sppo.load_run(
        {"model": {"preset": "tiny"}, "data": {"tokens": "unused"}, "sequence": {"length": LENGTH}}
    )
    text = torch.tensor(list(inspect.getsource(json).encode()))[: LENGTH + 1]
    sequence = sppo.SequenceData(text[:-1], text[1:])
    boundaries = [k * LENGTH // NUM_SUBSEQUENCES for k in range(NUM_SUBSEQUENCES + 1)]

    weights = sppo.initial_weights(run.model, seed=0)
    gradients = sppo.zero_gradients(weights)
    engine = sppo.Engine(run.model, weights=weights, gradients=gradients, policy="recompute")
    optimizer = torch.optim.AdamW(weights.values(), lr=2e-3)
    for name, weight in weights.items():
        weight.grad = gradients[name]

    for step in range(1, STEPS + 1):
        optimizer.zero_grad(set_to_none=False)
        result = engine.accumulate([sequence], [boundaries])
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        print(f"step {step} | loss {float(result.total_loss) / result.num_valid:.3f}")


if __name__ == "__main__":
    main()
