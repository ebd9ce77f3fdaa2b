"""Train from a Hugging Face checkpoint to a Hugging Face checkpoint, as a user does it.

transformers and torch.optim.AdamW do the same five steps on whole sequences. Every tensor of the
result agrees to 1e-4 of its largest value. Gradients of the two differ by rounding, about 1e-6; an
eps of 1e-5 on both sides keeps Adam from blowing that up where a gradient is nearly zero (a first
step moves by lr * g / (|g| + eps)). Up to 2e-6 is measured.
"""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tests.conftest import succeed
from tests.model.hf_models import tiny_hf_model
from tests.tiers import default_of, exhaustive
from tests.training.whole_runs.test_parallel_runs import run_on

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
LENGTH = 61
NUM_LAYERS = 3
"""Of all models of hf_models."""
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
    layer_by_layer: bool = False
    """A virtual stage for every layer, whose K and V are on a disk between its two passes."""


# hf_models: 24 or 26 wide with six heads of ten on two key/value heads, where a family allows it.
CASES = {
    "llama": Case("llama"),
    "llama, tied": Case(
        "llama", {"tie_word_embeddings": True, "attention_bias": False}, policy="recompute"
    ),
    "qwen2": Case("qwen2", cut="even", policy="keep_attention"),
    "qwen2, tied": Case("qwen2", {"tie_word_embeddings": True}, rates=WARM_UP_COSINE),
    "qwen3": Case("qwen3", {"tie_word_embeddings": False}, sequences_per_step=2),
    "qwen3, tied": Case("qwen3", cut="flops", policy="keep_attention", rates=WARM_UP_COSINE),
    "mistral": Case("mistral", cut="flops", sequences_per_step=2, policy="recompute"),
    "mistral, tied": Case("mistral", {"tie_word_embeddings": True}, policy="keep_attention"),
    "gpt2": Case("gpt2", cut="flops", rates=WARM_UP_COSINE, sequences_per_step=2),
    "gpt2, untied": Case("gpt2", {"tie_word_embeddings": False}, policy="recompute"),
    "qwen3, layer by layer": Case(
        "qwen3", policy="keep_attention", sequences_per_step=2, layer_by_layer=True
    ),
    "mistral, layer by layer": Case("mistral", policy="offload_all", layer_by_layer=True),
    "gpt2, layer by layer": Case(
        "gpt2", cut="flops", policy="recompute", rates=WARM_UP_COSINE, layer_by_layer=True
    ),
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stream_of(case):
    """Token ids for every step of a case, as two documents."""
    count = STEPS * case.sequences_per_step * LENGTH + 1
    ids = np.random.default_rng(7).integers(0, 61, size=count, dtype=np.uint16)
    return np.split(ids, [100])


def sequence_settings(cut):
    if cut == "boundaries":
        return {"length": LENGTH, "boundaries": list(BOUNDARIES)}
    partition = {"even": "length", "flops": "flops"}[cut]
    return {"length": LENGTH, "num_subsequences": 7, "alignment": 1, "partition": partition}


def order_settings(case, directory):
    """Sections of a run file that say in which order layers run and where K and V wait."""
    if not case.layer_by_layer:
        return {"activations": {"policy": case.policy}}
    spill = directory / "spill"
    spill.mkdir()
    return {
        "parallel": {"virtual_stages": NUM_LAYERS},
        "activations": {"policy": case.policy, "kv": "offload", "disk": str(spill)},
    }


def run_file(case, directory):
    decays = case.rates == WARM_UP_COSINE
    settings = {
        "model": {"from_hf": str(directory / "ours")},
        "data": {"tokens": str(directory / "tokens"), "shuffle": False},
        "sequence": sequence_settings(case.cut),
        **order_settings(case, directory),
        "optimizer": {
            "lr": LR,
            "betas": [0.9, 0.95],
            "eps": 1e-5,
            "weight_decay": 0.3,
            "clip_norm": 0.5,
            "schedule": "cosine" if decays else "constant",
            "warmup_steps": 2 if decays else 0,
            "final_lr_ratio": 0.1 if decays else 0.0,
        },
        "train": {
            "steps": STEPS,
            "sequences_per_step": case.sequences_per_step,
            "dtype": "fp32",
            "output": str(directory / "run"),
        },
    }
    path = directory / "run.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return path


def prepared(directory, documents):
    """Import the published model, and prepare documents, given as (ids, loss mask or None)."""
    paths = []
    for index, (ids, mask) in enumerate(documents):
        paths.append(directory / f"document{index:02}.npy")
        np.save(paths[-1], ids)
        if mask is not None:
            np.save(directory / f"document{index:02}.mask.npy", mask)
    succeed("convert", "from-hf", directory / "published", directory / "ours")
    prepare = ("data", "prepare", "--tokenizer", "ids", "--vocab-size", 61)
    succeed(*prepare, "--out", directory / "tokens", *paths)


def exported(directory):
    """Export what was trained; the model and the lines of metrics.jsonl."""
    succeed("convert", "to-hf", directory / "run", directory / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory / "exported")
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return model, [json.loads(line) for line in lines]


def train_ours(case, directory):
    """Import, prepare, train, export; the exported model and the lines of metrics.jsonl."""
    prepared(directory, [(ids, None) for ids in stream_of(case)])
    assert "7 subsequences of " in succeed("train", run_file(case, directory))
    return exported(directory)


def optimizer_of(model):
    """AdamW that decays matrices and nothing else."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.3},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(0.9, 0.95),
        eps=1e-5,
    )


def train_theirs(case, model):
    """Five steps in place; (loss, gradient norm) of each."""
    optimizer = optimizer_of(model)
    stream = torch.from_numpy(np.concatenate(stream_of(case)).astype(np.int64))
    metrics = []
    for step, rate in enumerate(case.rates):
        first = step * case.sequences_per_step
        starts = [(first + k) * LENGTH for k in range(case.sequences_per_step)]
        tokens = torch.stack([stream[s : s + LENGTH] for s in starts])
        labels = torch.stack([stream[s + 1 : s + 1 + LENGTH] for s in starts])
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = LR * rate
        optimizer.step()
        metrics.append((float(loss.detach()), float(norm)))
    return metrics


def assert_same_metrics(lines, expected):
    assert [line["step"] for line in lines] == list(range(1, len(expected) + 1))
    for line, (loss, norm) in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert norm > 0.5, "clipping has to be at work"


def assert_same_weights(ours, theirs, before):
    """Every tensor: the same value, and one that five steps have changed."""
    expected, actual = theirs.state_dict(), ours.state_dict()
    assert actual.keys() == expected.keys()
    errors = {
        name: float((actual[name] - value).abs().max() / value.abs().max())
        for name, value in expected.items()
    }
    assert max(errors.values()) <= TOLERANCE, errors
    changes = {
        name: float((value - before[name]).abs().max() / value.abs().max())
        for name, value in expected.items()
    }
    assert min(changes.values()) >= 100 * TOLERANCE, changes


def assert_kv_of_all_layers_but_the_last_left(case, directory):
    """K and V of a step, in fp32, went to the disk and came back."""
    config = json.loads((directory / "published" / "config.json").read_text())
    copies = json.loads((directory / "run" / "run_summary.json").read_text())["copies"]
    width = config.get("n_embd") or config["num_key_value_heads"] * config["head_dim"]
    tokens = case.sequences_per_step * LENGTH
    assert copies["out_bytes"]["kv"] == copies["back_bytes"]["kv"]
    assert copies["out_bytes"]["kv"] == (NUM_LAYERS - 1) * tokens * 2 * width * 4


def check(case, directory):
    theirs, _ = tiny_hf_model(case.family, seed=11, **case.options)
    theirs.save_pretrained(directory / "published", max_shard_size="20KB")
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    ours, lines = train_ours(case, directory)
    assert type(ours) is type(theirs)
    assert_same_metrics(lines, train_theirs(case, theirs))
    assert_same_weights(ours, theirs, before)
    if case.layer_by_layer:
        assert_kv_of_all_layers_but_the_last_left(case, directory)


ONE_OF_EACH_FAMILY = (
    *("llama, tied", "qwen2", "qwen3, tied", "mistral", "gpt2"),
    "qwen3, layer by layer",
)


@pytest.mark.parametrize("name", default_of(CASES, *ONE_OF_EACH_FAMILY))
def test_five_steps_are_those_of_transformers(name, tmp_path):
    check(CASES[name], tmp_path)


SAMPLE_STEPS, SAMPLES_PER_STEP, LONGEST = 4, 3, 47
DOCUMENTS = (30, 2, 48, 17, 70, 3, 5, 41, 8, 23, 11)
"""Tokens of each. The one beyond the longest sample is cut, which makes twelve samples."""


def masked_documents():
    """(ids, whether predicting each counts): as of questions and answers, and one without."""
    random = np.random.default_rng(5)
    found = []
    for index, tokens in enumerate(DOCUMENTS):
        ids = random.integers(0, 61, size=tokens, dtype=np.uint16)
        mask = random.random(tokens) < 0.6
        mask[-1] = True
        found.append((ids, None if index == 2 else mask))
    return found


def samples_of_documents():
    """Token ids of each sample with its last label, and which labels count."""
    found = []
    for ids, mask in masked_documents():
        counts = np.ones(len(ids), dtype=bool) if mask is None else mask
        for start in range(0, len(ids) - 1, LONGEST):
            own = slice(start, min(start + LONGEST, len(ids) - 1) + 1)
            found.append((ids[own].astype(np.int64), counts[own]))
    assert len(found) == SAMPLE_STEPS * SAMPLES_PER_STEP
    return found


def samples_file(directory, more):
    """A run file of the samples in their order."""
    settings = {
        "model": {"from_hf": str(directory / "ours")},
        "data": {"tokens": str(directory / "tokens"), "samples": "documents", "shuffle": False},
        "sequence": {"length": LONGEST, "num_subsequences": 5, "alignment": 1},
        "optimizer": {
            "lr": LR, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.3, "clip_norm": 0.5,
            "schedule": "constant", "warmup_steps": 0,
        },
        "train": {
            "steps": SAMPLE_STEPS,
            "samples_per_step": SAMPLES_PER_STEP,
            "dtype": "fp32",
            "output": str(directory / "run"),
        },
        **more,
    }  # fmt: skip
    path = directory / "run.yaml"
    path.write_text(json.dumps(settings))
    return path


def train_theirs_alone(model):
    """Train sample by sample in place: losses add up to the mean of a step's labels."""
    optimizer, samples, metrics = optimizer_of(model), samples_of_documents(), []
    for step in range(SAMPLE_STEPS):
        own = samples[step * SAMPLES_PER_STEP :][:SAMPLES_PER_STEP]
        counted = sum(int(counts[1:].sum()) for _, counts in own)
        optimizer.zero_grad()
        total = 0.0
        for ids, counts in own:
            tokens = torch.from_numpy(ids)
            labels = tokens[1:].masked_fill(~torch.from_numpy(counts[1:]), -100)
            logits = model(tokens[None, :-1]).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / counted
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        metrics.append((total, float(norm)))
    return metrics


SAMPLE_CASES = {
    "llama": ("llama", {}),
    "gpt2, recomputed": ("gpt2", {"activations": {"policy": "recompute"}}),
    "mistral": ("mistral", {}),
    "qwen3, layer by layer": ("qwen3", {"parallel": {"virtual_stages": NUM_LAYERS}}),
}


@pytest.mark.parametrize("pipeline_ranks", [2, *exhaustive(1)])
@pytest.mark.parametrize("name", default_of(SAMPLE_CASES, "gpt2, recomputed"))
def test_samples_train_as_transformers_does_one_by_one(name, pipeline_ranks, tmp_path, ranks):
    family, more = SAMPLE_CASES[name]
    if pipeline_ranks > 1:
        more = {key: value for key, value in more.items() if key != "parallel"}
    theirs, _ = tiny_hf_model(family, seed=11)
    theirs.save_pretrained(tmp_path / "published", max_shard_size="20KB")
    before = {key: value.clone() for key, value in theirs.state_dict().items()}
    prepared(tmp_path, masked_documents())
    run = samples_file(tmp_path, more)
    if pipeline_ranks == 1:
        succeed("train", run)
    else:
        run_on(ranks, tmp_path, (1, 2, 1), SAMPLE_STEPS, tmp_path / "run")
    ours, lines = exported(tmp_path)
    assert_same_metrics(lines, train_theirs_alone(theirs))
    assert_same_weights(ours, theirs, before)
