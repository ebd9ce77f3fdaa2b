"""Fine-tune on answers alone beside TRL's trainer, from chats to a Hugging Face checkpoint.

Both prepare the same rows with the same template and do five steps of four rows in fp32. Losses
agree to 1e-5, and every tensor of the result to 1e-4 of its largest value.
"""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sppo.config.yaml_file import format_yaml
from sppo.report.metrics import read_metrics
from tests.conftest import succeed
from tests.data.chats import template, write_tokenizer

pytestmark = pytest.mark.exhaustive

STEPS, ROWS, LR = 5, 4, 0.01


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Go to a directory with a model, its tokenizer and chats; return the chats."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "model", template("qwen3_training"))
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained("model")),
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained("model")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Repeat {number}"},
                {"role": "assistant", "content": f"{number}" * (1 + number % 7)},
                {"role": "user", "content": "Again?" * (number % 3)},
                {"role": "assistant", "content": "é no"},
            ]
        }
        for number in range(STEPS * ROWS)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def trained_by_trl(rows):
    """Return the loss of each step, and the weights, of TRL's trainer."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    losses = []

    class Trainer(trl.SFTTrainer):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(dataset)

        def compute_loss(self, *args, **kwargs):
            found = super().compute_loss(*args, **kwargs)
            losses.append(float((found[0] if isinstance(found, tuple) else found).detach()))
            return found

    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained("model"),
        train_dataset=datasets.Dataset.from_list(rows),
        args=trl.SFTConfig(
            output_dir="trl",
            assistant_only_loss=True,
            max_length=None,
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            adam_epsilon=1e-5,
            weight_decay=0.1,
            max_grad_norm=1.0,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
        ),
    )
    trainer.train()
    return losses, trainer.model.state_dict()


def test_five_steps_are_those_of_trl(place):
    succeed("data", "prepare", "--tokenizer", "model", "--out", "data", "chats.jsonl")
    run = {
        "model": {"from_hf": "model"},
        "data": {"tokens": "data", "samples": "documents", "shuffle": False},
        "sequence": {"length": 256, "num_subsequences": 3},
        "optimizer": {"lr": LR, "betas": [0.9, 0.95], "eps": 1e-5, "schedule": "constant"},
        "train": {"steps": STEPS, "samples_per_step": ROWS, "dtype": "fp32", "output": "out"},
    }
    Path("run.yaml").write_text(format_yaml(run))
    succeed("train", "run.yaml")
    succeed("convert", "to-hf", "out", "exported")
    ours = [metrics.loss for metrics in read_metrics(Path("out/metrics.jsonl"))]
    losses, expected = trained_by_trl(place)
    assert ours == pytest.approx(losses, rel=1e-5)
    weights = AutoModelForCausalLM.from_pretrained("exported", dtype=torch.float32).state_dict()
    assert weights.keys() == expected.keys()
    for name, theirs in expected.items():
        worst = (weights[name] - theirs).abs().max() / theirs.abs().max()
        assert worst <= 1e-4, name
