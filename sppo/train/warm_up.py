"""One step of a tiny model before anything is measured.

The first step of a process loads libraries, starts threads and compiles kernels: tens of MiB and
tenths of a second that belong to no bucket and no phase of a run. After this they are part of the
baseline.
"""

from __future__ import annotations

import torch

from sppo.config import RunConfig
from sppo.config.model import ModelConfig
from sppo.engine.single import SingleRankEngine
from sppo.engine.unit import SequenceData
from sppo.model.gradients import zero_gradients
from sppo.model.initialize import initial_weights
from sppo.train.optimizer import AdamW, clip_, global_norm
from sppo.train.state import DTYPES

_TOKENS = 64
_SIZES = {
    "preset": None,
    "from_hf": None,
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_size": 16,
    "mlp_size": 32,
    "max_positions": 2 * _TOKENS,
    "sliding_window_first_layer": 0,
}


def warm_up(run: RunConfig) -> None:
    """Train one step of a tiny model with the kinds of layers that `run` has; nothing is kept."""
    model = run.model.model_copy(update=_SIZES)
    weights = {
        name: weight.to(DTYPES[run.train.dtype])
        for name, weight in initial_weights(model, seed=0).items()
    }
    gradients = zero_gradients(weights)
    engine = SingleRankEngine(model, weights=weights, gradients=gradients, policy="keep_attention")
    optimizer = AdamW(weights, config=run.optimizer)
    engine.accumulate([_sequence(model)], [(0, _TOKENS, 2 * _TOKENS)])
    clip_(gradients, norm=global_norm(gradients), clip_norm=run.optimizer.clip_norm or 1.0)
    optimizer.step(gradients, lr=0.0)


def _sequence(model: ModelConfig) -> SequenceData:
    tokens = torch.arange(2 * _TOKENS + 1) % model.vocab_size
    return SequenceData(tokens[:-1], tokens[1:])
