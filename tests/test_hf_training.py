"""Train from a Hugging Face checkpoint to a Hugging Face checkpoint, as a user does it.

transformers and torch.optim.AdamW do the same five steps on whole sequences, or on whole documents
that are isolated from each other. Every tensor of the result agrees to 1e-4 of its largest value.
Gradients of the two differ by rounding, about 1e-6; an eps of 1e-5 on both sides keeps Adam from
blowing that up where a gradient is nearly zero (a first step moves by lr * g / (|g| + eps)). Up to
2e-6 is measured.
"""

import json
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from sppo.kernels.labels import IGNORED_LABEL
from sppo.report.metrics import read_records
from sppo.report.validation import VALIDATION_FILE, ValidationMetrics
from tests.conftest import succeed
from tests.model.hf_models import LLAMA3, tiny_hf_model
from tests.tiers import default_of
from tests.training.jobs import trained
from tests.training.whole_runs.test_parallel_runs import ONE, overrides

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
LENGTH = 61
STEPS = 5
LR = 0.01
BOUNDARIES = (0, 1, 14, 22, 23, 40, 58, LENGTH)  # seven, uneven, two of one token
WARM_UP_COSINE = (0.5, 1.0, 0.868198, 0.55, 0.231802)
"""Share of the rate in each step: two steps up, then half a cosine down to a tenth at step 5,
which is not taken."""


@dataclass(frozen=True)
class Case:
    family: str
    options: dict = field(default_factory=dict)
    cut: str = "boundaries"
    policy: str = "retain"
    rates: tuple = (1.0,) * STEPS
    sequences_per_step: int = 1
    answers: bool = False
    """Whether only every second run of nine tokens counts."""
    documents: tuple = (100,)
    """Starts of the documents after the first."""
    dtype: str = "fp32"
    eps: float = 1e-5
    shape: tuple = ONE
    """Degrees of data, pipeline and sequence parallelism."""
    keys: dict = field(default_factory=dict)
    """Further keys of the run file, by their paths."""
    adapter: dict = field(default_factory=dict)
    """Section ``adapter``, if any."""


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# hf_models: 24 or 26 wide with six heads of ten on two key/value heads, where a family allows it.
CASES = {
    "llama, tied, yarn": Case(
        "llama",
        {"tie_word_embeddings": True, "attention_bias": False, "rope_scaling": YARN},
        policy="recompute",
    ),
    "llama, llama3, one key head": Case(
        "llama", {"rope_scaling": LLAMA3, "num_key_value_heads": 1}, policy="keep_attention"
    ),
    "qwen2, window": Case(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        cut="even",
        policy="keep_attention",
    ),
    "qwen3, tied": Case("qwen3", cut="flops", policy="keep_attention", rates=WARM_UP_COSINE),
    "mistral": Case("mistral", cut="flops", sequences_per_step=2, policy="recompute"),
    "gpt2": Case("gpt2", cut="flops", rates=WARM_UP_COSINE, sequences_per_step=2),
    "gpt2, untied, exact gelu": Case(
        "gpt2", {"activation_function": "gelu", "tie_word_embeddings": False}, policy="recompute"
    ),
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stream_of(case):
    """Token ids for every step of a case."""
    count = STEPS * case.sequences_per_step * LENGTH + 1
    return np.random.default_rng(7).integers(0, 61, size=count, dtype=np.uint16)


def mask_of(case):
    """Return a mask of the tokens that count as labels."""
    places = np.arange(len(stream_of(case)))
    return places // 9 % 2 > 0 if case.answers else places >= 0


def starts_of(case):
    """Return a mask of the tokens that begin an isolated document."""
    places = np.arange(len(stream_of(case)))
    return np.isin(places, case.documents if "data.isolate_documents" in case.keys else ())


def samples_of(case):
    """Tokens, labels and starts of isolated documents of all sequences, ``[sequences, LENGTH]``."""
    stream = torch.from_numpy(stream_of(case).astype(np.int64))
    starts = torch.from_numpy(starts_of(case))
    counts = torch.from_numpy(mask_of(case)) & ~starts
    labels = stream.masked_fill(~counts, IGNORED_LABEL)
    return [rows.view(-1, LENGTH) for rows in (stream[:-1], labels[1:], starts[:-1])]


def sequence_settings(cut):
    if cut == "boundaries":
        return {"length": LENGTH, "boundaries": list(BOUNDARIES)}
    partition = {"even": "length", "flops": "flops"}[cut]
    return {"length": LENGTH, "num_subsequences": 7, "alignment": 1, "partition": partition}


def run_file(case, directory):
    decays = case.rates == WARM_UP_COSINE
    settings = {
        "model": {"from_hf": str(directory / "ours")},
        "data": {"tokens": str(directory / "tokens"), "shuffle": False},
        "sequence": sequence_settings(case.cut),
        "activations": {"policy": case.policy},
        "optimizer": {
            "lr": LR,
            "betas": [0.9, 0.95],
            "eps": case.eps,
            "weight_decay": 0.3,
            "clip_norm": 0.5,
            "schedule": "cosine" if decays else "constant",
            "warmup_steps": 2 if decays else 0,
            "final_lr_ratio": 0.1 if decays else 0.0,
        },
        "train": {
            "steps": STEPS,
            "sequences_per_step": case.sequences_per_step,
            "dtype": case.dtype,
            "output": str(directory / "run"),
        },
        "validation": {"every": STEPS, "sets": {"all": {"tokens": str(directory / "tokens")}}},
    }
    if case.adapter:
        settings["adapter"] = case.adapter
    path = directory / "run.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return path


def prepared(directory, documents, masks=()):
    """Import the published model, and prepare documents of ids, with loss masks if any."""
    paths = [directory / f"document{index:02}.npy" for index in range(len(documents))]
    for path, ids in zip(paths, documents, strict=True):
        np.save(path, ids)
    for path, mask in zip(paths, masks, strict=False):
        np.save(path.with_suffix(".mask.npy"), mask)
    succeed("convert", "from-hf", directory / "published", directory / "ours")
    prepare = ("data", "prepare", "--tokenizer", "ids", "--vocab-size", 61)
    succeed(*prepare, "--out", directory / "tokens", *paths)


def exported(directory):
    """Export what was trained, which is the same after it was read and written again; the model."""
    succeed("convert", "to-hf", directory / "run", directory / "exported")
    succeed("convert", "from-hf", directory / "exported", directory / "again")
    for pattern in ("config.json", "*.safetensors*"):
        files = [path.read_bytes() for path in sorted((directory / "exported").glob(pattern))]
        again = [path.read_bytes() for path in sorted((directory / "again").glob(pattern))]
        assert again == files != [], pattern
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory / "exported", attn_implementation="eager", experts_implementation="eager"
    )


def lines_of(directory):
    """Lines of metrics.jsonl."""
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def train_ours(case, directory, ranks=None):
    """Import, prepare, train, in the rank pool if there are several; the lines of metrics.jsonl."""
    masks = np.split(mask_of(case), case.documents) if case.answers else ()
    prepared(directory, np.split(stream_of(case), case.documents), masks)
    path, keys = run_file(case, directory), [f"{key}={value}" for key, value in case.keys.items()]
    if case.shape == ONE:
        assert "7 subsequences of " in succeed("train", path, *keys)
    else:
        arguments = overrides(case.shape, STEPS, **case.keys)
        ranks.run(trained, directory, arguments, ranks=math.prod(case.shape))
    return lines_of(directory)


def optimizer_of(model, eps=1e-5):
    """AdamW that decays matrices, also stacked ones, and neither vectors nor stacked biases."""
    decays = {p: p.dim() >= 2 and "bias" not in name for name, p in model.named_parameters()}
    return torch.optim.AdamW(
        [
            {"params": [p for p, yes in decays.items() if yes], "weight_decay": 0.3},
            {"params": [p for p, yes in decays.items() if not yes], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(0.9, 0.95),
        eps=eps,
    )


def train_theirs(case, model, *, penalty=lambda: 0.0, after_step=lambda: None):
    """Five steps in place, with a penalty beside the loss; (loss, gradient norm) of each."""
    optimizer = optimizer_of(model, case.eps)
    metrics = []
    batches = zip(*(rows.split(case.sequences_per_step) for rows in samples_of(case)), strict=True)
    for rate, samples in zip(case.rates, batches, strict=True):
        loss = mean_loss(model, *samples)
        optimizer.zero_grad()
        (loss + penalty()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = LR * rate
        optimizer.step()
        after_step()
        metrics.append((float(loss.detach()), float(norm)))
    return metrics


def mean_loss(model, tokens, labels, starts):
    """Mean over the labels that count, of each isolated document by itself."""
    logits = [
        model(document[None]).logits[0]
        for row, begins in zip(tokens, starts, strict=True)
        for document in row.tensor_split(begins.nonzero()[:, 0])
        if len(document)
    ]
    return torch.nn.functional.cross_entropy(torch.cat(logits), labels.flatten())


def assert_same_metrics(lines, expected, *, tolerance=1e-5):
    assert [line["step"] for line in lines] == list(range(1, len(expected) + 1))
    for line, (loss, norm) in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(loss, rel=tolerance)
        assert line["grad_norm"] == pytest.approx(norm, rel=10 * tolerance)
    assert max(norm for _, norm in expected) > 0.5, "clipping has to be at work"


@torch.no_grad()
def loss_of(case, model):
    """Mean loss of a model over all sequences."""
    return float(mean_loss(model, *samples_of(case)))


def validations(directory):
    """Loss of each validation, by its step."""
    records = read_records(directory / "run" / VALIDATION_FILE, ValidationMetrics)
    return {record.step: record.loss for record in records}


def assert_same_weights(actual, expected, before, *, tolerance=TOLERANCE, buffers=()):
    """Every tensor: the same value, and one that five steps have changed, but for buffers."""
    assert actual.keys() == expected.keys()
    errors = {name: distance(actual[name], value) for name, value in expected.items()}
    assert max(errors.values()) <= tolerance, errors
    weights = expected.keys() - set(buffers)
    changes = {name: distance(before[name], expected[name]) for name in weights}
    assert min(changes.values()) >= 100 * TOLERANCE, changes


def distance(value, expected):
    """Largest difference as a share of the largest value."""
    return float((value - expected).abs().max() / expected.abs().max())


def check(case, directory, ranks=None, theirs_beside=lambda model: {}):
    theirs, _ = tiny_hf_model(case.family, seed=11, **case.options)
    theirs.save_pretrained(directory / "published", max_shard_size="20KB")
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    at_start = loss_of(case, theirs)
    lines = train_ours(case, directory, ranks)
    ours = exported(directory)
    assert type(ours) is type(theirs)
    steps = train_theirs(case, theirs, **theirs_beside(theirs))
    assert_same_metrics(lines, steps)
    assert min(norm for _, norm in steps) > 0.5, "clipping has to be at work in every step"
    buffers = [name for name, _ in theirs.named_buffers()]
    assert_same_weights(ours.state_dict(), theirs.state_dict(), before, buffers=buffers)
    expected = {0: at_start, STEPS: loss_of(case, ours)}
    assert validations(directory) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "name", default_of(CASES, "llama, tied, yarn", "qwen2, window", "qwen3, tied", "gpt2")
)
def test_five_steps_are_those_of_transformers(name, tmp_path):
    check(CASES[name], tmp_path)
