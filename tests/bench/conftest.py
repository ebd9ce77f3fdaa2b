"""What benchmarks compute with: operands on the CPU, taken once, and a small layer."""

import pytest

from sppo.bench.operands import Operands
from sppo.bench.overlap import MeasuredLayer
from sppo.config.model import ModelConfig


@pytest.fixture
def small():
    """A layer that takes a moment."""
    model = ModelConfig(
        vocab_size=64, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, mlp_size=128
    )
    return MeasuredLayer("small", model, "bf16")


@pytest.fixture(scope="package")
def operands():
    return Operands("cpu")
