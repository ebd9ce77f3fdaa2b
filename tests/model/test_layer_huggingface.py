"""Loss and gradients of the cut sequence against transformers, the same weights on both sides.

The families as they are by default: tests/test_hf_training.py.

In float32 each side is off by its own rounding: 1e-5 of a tensor's largest value (a hundred units
in the last place; up to 7e-6 is measured, and 2e-5 in six layers with norms of their outputs, which
multiply it). In float64 GPT-2 has to agree to 1e-10; the other
families compute norms and rotary positions in float32 whatever their dtype, and hybrids the whole
rule of linear attention. What these casts cost is shown apart: without them, hybrids agree to
1e-11.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from sppo.engine.unit import SequenceData
from sppo.kernels.labels import IGNORED_LABEL
from sppo.model.huggingface.reading import open_hf_weights
from tests.engine.models import engine_step
from tests.model.hf_models import HYBRIDS, LLAMA3, tiny_hf_model
from tests.tiers import default_of

transformers = pytest.importorskip("transformers")

CUTS = (0, 1, 14, 30, 31, 47)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CASES = [
    ("llama", {"rope_scaling": LLAMA3, "num_key_value_heads": 1}),
    ("llama", {"rope_scaling": YARN, "tie_word_embeddings": True}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("gpt2", {"activation_function": "gelu", "tie_word_embeddings": False}),
    ("smollm3", {}),
    ("phi3", {}),
    ("granite", {}),
    ("olmo2", {}),
    ("olmo3", {}),
    ("arcee", {}),
    ("exaone4", {"num_hidden_layers": 4}),
    ("gemma3_text", {"num_hidden_layers": 3}),
    ("glm4", {}),
    ("gpt_oss", {}),
]


def their_step(theirs, tokens, labels):
    logits = theirs(tokens[None]).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL)
    loss.backward()
    return loss.detach()


def gradients_in_our_layout(theirs, model, directory):
    """Their gradients, written and read as if they were weights: the layouts differ."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(directory)
    return open_hf_weights(directory, model)


def assert_same(family, options, tmp_path, *, dtype, tolerance, theirs_in=nullcontext):
    """Assert that a step agrees, where transformers computes in a context of its own."""
    with theirs_in():
        theirs, model = tiny_hf_model(family, seed=3, **options)
    theirs.to(dtype)
    theirs.save_pretrained(tmp_path / "weights")
    weights = open_hf_weights(tmp_path / "weights", model)
    assert weights["embed.weight"].dtype is dtype
    generator = torch.Generator().manual_seed(5)
    stream = torch.randint(0, model.vocab_size, (48,), generator=generator)
    labels = stream[1:].clone()
    labels[[3, 29]] = IGNORED_LABEL
    data = SequenceData(stream[:-1], labels)
    loss, gradients = engine_step(model, weights, [data], [CUTS], policy="keep_attention")
    with theirs_in():
        expected_loss = their_step(theirs, stream[:-1], labels)
    assert abs(float(loss - expected_loss)) <= tolerance * float(expected_loss)
    expected = gradients_in_our_layout(theirs, model, tmp_path / "gradients")
    assert gradients.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        # GPT-2's key bias has no gradient but noise.
        scale = max(float(gradient.abs().max()), 1e-2 * largest)
        error = float((gradients[name] - gradient).abs().max()) / scale
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize(("family", "options"), CASES)
def test_loss_and_gradients_in_float32(family, options, tmp_path):
    assert_same(family, options, tmp_path, dtype=torch.float32, tolerance=1e-5)


@contextmanager
def wide_casts():
    """Casts of transformers to float32 are casts to float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@pytest.mark.parametrize("family", default_of(HYBRIDS, "qwen3_next"))
def test_hybrids_in_float64_differ_by_the_casts_of_transformers(family, tmp_path):
    wide, narrow = ({"dtype": torch.float64, "theirs_in": how} for how in (wide_casts, nullcontext))
    assert_same(family, {}, tmp_path / "wide", tolerance=1e-11, **wide)
    assert_same(family, {}, tmp_path / "narrow", tolerance=1e-5, **narrow)
    with pytest.raises(AssertionError):
        assert_same(family, {}, tmp_path / "narrow", tolerance=1e-8, **narrow)


def test_gpt2_in_float64(tmp_path):
    assert_same("gpt2", {}, tmp_path, dtype=torch.float64, tolerance=1e-10)
