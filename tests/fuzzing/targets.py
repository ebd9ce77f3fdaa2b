"""Targets of fuzzing: every kind of file that users provide, and the options of pure commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sppo.checkpoint.manifest import find_damage, sum_files, write_manifest
from sppo.checkpoint.newest import find_checkpoint
from sppo.cli.app import app
from sppo.config.loading import check_run, load_run
from sppo.config.yaml_file import format_yaml, read_yaml
from sppo.data.preparation.columns import row_format
from sppo.data.preparation.documents import read_text
from sppo.data.preparation.ids_files import scan_ids
from sppo.data.preparation.prepare import prepare_tokens
from sppo.data.preparation.row_options import RowOptions
from sppo.data.preparation.rows import Row
from sppo.data.preparation.tokenizer_file import load_tokenizer_file, vocabulary_identity
from sppo.data.run_tokens import check_tokens
from sppo.data.sample_rows import TrainingData
from sppo.data.tokens import open_tokens
from sppo.hardware.file import hardware_json, read_hardware
from sppo.hardware.presets import PRESETS
from sppo.planning.estimate import estimate
from sppo.planning.plan import digest_of, plan_json, read_plan
from sppo.schedule.program_text import format_program, parse_program
from tests.data.rows import write_chatml_tokenizer
from tests.fuzzing.chat_targets import chat_templates
from tests.fuzzing.damage import (
    changed_bytes,
    changed_json,
    changed_trees,
    changed_words,
    json_text,
    nasty,
)

Case = Callable[[st.DrawFn, Path], None]
"""Reads one damaged input in a scratch directory of its target."""

RUN: dict[str, Any] = {
    "model": {
        "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "mlp_size": 64, "rope_theta": 10000.0, "norm_eps": 1e-5, "sliding_window": 16,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_positions": 64},
    },
    "data": {"tokens": "tokens", "shuffle": True},
    "sequence": {"length": 64, "num_subsequences": 2, "alignment": 8},
    "parallel": {"pipeline_parallel_degree": 2, "zero": 1, "timeout_s": 60, "schedule": "auto"},
    "activations": {"policy": "sppo", "offload_ratio": 0.5, "host_memory": "1GiB"},
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "warmup_steps": 2},
    "train": {"steps": 4, "sequences_per_step": 2, "dtype": "fp32", "z_loss": 1e-4},
    "checkpoint": {"every": 2, "keep": 2},
    "hardware": {"preset": "h100", "nodes": 1, "devices_per_node": 2},
}  # fmt: skip

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": True,
    "max_position_embeddings": 64, "attention_bias": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 32, "n_embd": 24, "n_layer": 2, "n_head": 4,
    "n_positions": 64, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    "n_inner": None, "attn_pdrop": 0.1,
}  # fmt: skip
WORDS = ("train.steps=3", "sequence.length=4Ki", "model={preset: tiny}", "parallel.zero=3",
         "activations.policy=auto", "model.rope_scaling={type: linear, factor: 2}", "a.b=1",
         "hardware=auto", "optimizer.betas=[0.9, 0.99]", "sequence.boundaries=[0, 32]",
         "data.sources={a: {tokens: b, weight: 1}}", "train.epochs=2",
         "sequence.length=longest")  # fmt: skip


def run_files(draw: st.DrawFn, directory: Path) -> None:
    """A run file with damaged values, and damaged overrides."""
    path = directory / "run.yaml"
    path.write_text(draw(changed_json(RUN)), encoding="utf-8")
    override = st.sampled_from(WORDS).flatmap(lambda word: changed_words(word, changes=1))
    load_run(path, draw(st.lists(override, max_size=2)))


def yaml_text(draw: st.DrawFn, directory: Path) -> None:
    """A run file with damaged bytes."""
    path = directory / "run.yaml"
    path.write_bytes(draw(changed_bytes(format_yaml(RUN).encode())))
    read_yaml(path)


def estimates(draw: st.DrawFn, directory: Path) -> None:
    """A prediction of memory for whatever run passes the checks."""
    raw = draw(changed_trees(RUN, changes=2))
    run = check_run(raw if isinstance(raw, dict) else {}, source="run.yaml")
    estimate(run, hardware=PRESETS["h100"])


@lru_cache(maxsize=1)
def _program() -> str:
    from sppo.schedule.program import generate

    return format_program(generate("seq1f1b", num_ranks=2, lengths=[[4, 4], [4, 4]]))


def programs(draw: st.DrawFn, directory: Path) -> None:
    """A hand-written program with damaged words."""
    text = "ranks 2 \nvirtual 1 \nstyle loop \n" + _program()
    parse_program(draw(changed_words(text)), source="program.txt")


@lru_cache(maxsize=1)
def _plan() -> dict[str, Any]:
    from sppo.planning.make_plan import make_plan
    from sppo.planning.search.solver import solve

    run = check_run(RUN | {"activations": {}}, source="run.yaml")
    solution = solve(run, hardware=PRESETS["h100"])
    assert solution.best is not None, "a tiny model fits"
    return plan_json(make_plan(run, solution.best))


def plans(draw: st.DrawFn, directory: Path) -> None:
    """A plan with damaged values, its digest mended in half of the cases."""
    path = directory / "plan.json"
    tree = draw(changed_trees(_plan()))
    if draw(st.booleans()) and isinstance(tree, dict):
        tree.pop("digest", None)
        tree["digest"] = digest_of(tree)
    path.write_text(json_text(tree), encoding="utf-8")
    read_plan(path)


def hardware_files(draw: st.DrawFn, directory: Path) -> None:
    """A hardware description with damaged values, and a prediction with what passes."""
    path = directory / "hardware.json"
    tree = hardware_json(PRESETS[draw(st.sampled_from(("h100", "laptop-cpu")))])
    path.write_text(draw(changed_json(tree)), encoding="utf-8")
    spec = read_hardware(path)
    run = check_run({**RUN, "activations": {}}, source="run.yaml")
    estimate(run, hardware=spec)


def model_configs(draw: st.DrawFn, directory: Path) -> None:
    """A config.json with damaged values."""
    text = draw(changed_json(draw(st.sampled_from((LLAMA, GPT2)))))
    (directory / "config.json").write_text(text, encoding="utf-8")
    model = {"from_hf": str(directory)}
    check_run({**RUN, "model": model, "sequence": {"length": 32}}, source="run.yaml")


@lru_cache(maxsize=1)
def _weights() -> tuple[Any, bytes, bytes]:
    """(model, a whole file, an index) of a tiny model without values that matter."""
    import torch
    from safetensors.torch import save

    from sppo.config.huggingface.model_config import model_fields
    from sppo.config.model import ModelConfig
    from sppo.model.huggingface.stored_tensors import hf_tensors

    model = ModelConfig.model_validate(model_fields(LLAMA))
    tensors = {t.full_name: torch.zeros(t.shape) for t in hf_tensors(model)}
    index = {"weight_map": dict.fromkeys(tensors, "part.safetensors")}
    return model, save(tensors), json.dumps(index).encode()


def weight_files(draw: st.DrawFn, directory: Path) -> None:
    """Safetensors with a damaged header, or behind a damaged index."""
    from sppo.model.huggingface.reading import open_hf_weights

    model, whole, index = _weights()
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    if draw(st.booleans()):
        header = 8 + int.from_bytes(whole[:8], "little")
        damaged = draw(changed_bytes(whole[:header])) + whole[header:]
        (directory / "model.safetensors").write_bytes(damaged)
    else:
        (directory / "part.safetensors").write_bytes(whole)
        text = draw(changed_bytes(index) | changed_json(json.loads(index)).map(str.encode))
        (directory / "model.safetensors.index.json").write_bytes(text)
    open_hf_weights(directory, model)


@lru_cache(maxsize=1)
def _token_files(folder: Path) -> Mapping[str, bytes]:
    """Contents of a small token directory."""
    ids = []
    for number, length in enumerate((1, 40, 1, 1, 60)):
        path = folder / f"made{number}.npy"
        np.save(path, np.arange(length) % 50)
        np.save(folder / f"made{number}.mask.npy", np.arange(length) % 3 > 0)
        ids.append(path)
    prepare_tokens(ids, tokenizer="ids", out=folder / "made", force=True)
    return {path.name: path.read_bytes() for path in (folder / "made").iterdir()}


def token_data(draw: st.DrawFn, directory: Path) -> None:
    """A token directory with one damaged file, read to its end."""
    files = dict(_token_files(directory))
    name = draw(st.sampled_from(sorted(files)))
    if name == "meta.json" and draw(st.booleans()):
        files[name] = draw(changed_json(json.loads(files[name]))).encode()
    else:
        files[name] = draw(changed_bytes(files[name]))
    if draw(st.booleans()):  # as from before document starts were summed
        files["meta.json"] = files["meta.json"].replace(b'"documents_sha256"', b'"x"')
    place = directory / "tokens"
    place.mkdir(exist_ok=True)
    for file, content in files.items():
        (place / file).unlink(missing_ok=True)
        (place / file).write_bytes(content)
    data = open_tokens(place)
    kinds = (
        {"data.isolate_documents": True},
        {"data.samples": "documents", "sequence.longer": "cut", "train.samples_per_step": 3},
        {"data.samples": "documents", "sequence.longer": "drop", "train.tokens_per_step": 20},
    )
    run = load_run({**RUN, "sequence": {"length": 8}, "train": {}}, draw(st.sampled_from(kinds)))
    check_tokens(run, data)
    training = TrainingData.of(run, data)
    training.row(training.step_samples(draw(st.integers(0, 9))))


def id_files(draw: st.DrawFn, directory: Path) -> None:
    """A damaged .npy file of ids, or of their loss mask."""
    path, mask = directory / "ids.npy", directory / "ids.mask.npy"
    np.save(path, np.arange(30, dtype=draw(st.sampled_from((np.uint8, np.int64, np.float32)))))
    np.save(mask, np.arange(30) % 2 > 0)
    damaged = draw(st.sampled_from((path, mask)))
    data = damaged.read_bytes()
    damaged.unlink()
    damaged.write_bytes(draw(changed_bytes(data[:128])) + data[128:])
    tokenizer = scan_ids([path], vocab_size=None, end_of_document="auto")
    for _ in tokenizer.encode_file(path):
        pass


def documents(draw: st.DrawFn, directory: Path) -> None:
    """A .jsonl file with a damaged line."""
    path = directory / "text.jsonl"
    line = draw(changed_json({"text": "some words", "id": 7, "meta": {"a": [1, 2]}}))
    data = line.encode("utf-8", "surrogatepass")
    path.write_bytes(b'{"text": "a"}\n' + draw(st.just(data) | changed_bytes(data)))
    for _ in read_text([path]):
        pass


ROWS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}], "train": False},
                  {"role": "assistant", "content": None, "reasoning_content": "why", "weight": 1,
                   "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}],
     "tools": [{"function": {"name": "f"}}], "chat_template_kwargs": {"x": 1}, "system": "s"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"prompt": [{"role": "user", "content": "q"}],
     "completion": [{"role": "assistant", "content": "a"}]},
    {"prompt": "q", "completion": "a"},
    {"instruction": "q", "input": "i", "output": "a", "history": [["q", "a"]]},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "loss_mask": [0, 1, 1]},
)  # fmt: skip


def rows(draw: st.DrawFn, directory: Path) -> None:
    """A damaged row of each format after a good one."""
    path = directory / "rows.jsonl"
    row = draw(st.sampled_from(ROWS))
    lines = [json_text(row).replace("\n", " "), draw(changed_json(row)).replace("\n", " ")]
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    is_chat = row_format(Row(row, "", 0), names={}).is_chat
    options = RowOptions(chat_template="chatml" if is_chat else None, allow_empty=True)
    model = str(write_chatml_tokenizer(directory / "model"))
    prepare_tokens([path], tokenizer=model, out=directory / "out", rows=options, force=True)


TOKENIZER: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "decoder": None,
    "added_tokens": [{"id": 3, "content": "</s>", "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False, "special": True}],
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
}  # fmt: skip


def tokenizers(draw: st.DrawFn, directory: Path) -> None:
    """A damaged tokenizer.json, and a damaged configuration beside it."""
    path = directory / "tokenizer.json"
    data = draw(changed_json(TOKENIZER)).encode()
    path.write_bytes(data)
    settings = draw(changed_json({"eos_token": {"content": "b"}}))
    (directory / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    vocabulary_identity(data)
    load_tokenizer_file(str(path), end_of_document="auto")


def checkpoints(draw: st.DrawFn, directory: Path) -> None:
    """A checkpoint with a damaged manifest, or damaged metadata behind a good one."""
    place = directory / "checkpoints" / "step_000002"
    place.mkdir(parents=True, exist_ok=True)
    metadata = {"step": 2, "config": RUN, "tokens_sha256": "0" * 64}
    forged = draw(st.booleans())
    text = draw(changed_json(metadata)) if forged else json_text(metadata)
    (place / "metadata.json").write_text(text, encoding="utf-8")
    (place / "__0_0.distcp").write_bytes(b"values")
    files = [place / "metadata.json", place / "__0_0.distcp"]
    write_manifest(place, sum_files(files))
    if not forged:
        manifest = place / "manifest.json"
        content = manifest.read_bytes()
        damaged = changed_json(json.loads(content)).map(str.encode) | changed_bytes(content)
        manifest.write_bytes(draw(damaged))
    find_damage(place)
    find_checkpoint(directory)


SIMULATE = (
    "schedule", "ranks", "virtual", "sequences", "subsequences", "forward", "backward",
    "weight", "unit_costs", "unit_sizes", "latency", "bandwidth", "message_size", "weight_size",
    "kv_size", "offload_ratio", "d2h", "h2d",
)  # fmt: skip
VALUES = ("0", "1", "2", "3", "-1", "1.5", "nan", "inf", "1e308", "1e-308", "sppo", "seq1f1b",
          "1,2", "full", "adaptive", "0.5", "x", "", "9" * 5000, "\x1b[31m", "99999999",
          "1e400")  # fmt: skip


def options(draw: st.DrawFn, directory: Path) -> None:
    """Keys of ``sppo simulate`` and words of ``sppo config check``, any values, in this process."""
    from typer.testing import CliRunner

    changes = st.dictionaries(st.sampled_from(SIMULATE), st.sampled_from(VALUES), max_size=4)
    usual = {"schedule": draw(st.sampled_from(("sppo", "seq1f1b", "gpipe"))),
             "ranks": "2", "sequences": "1", "subsequences": "4"}  # fmt: skip
    words = ["simulate", *(f"{key}={value}" for key, value in (usual | draw(changes)).items())]
    if draw(st.integers(0, 9)) == 9:
        words = ["config", "check", str(directory / "no.yaml"), str(draw(nasty))]
    words += ["--json"] * draw(st.booleans())
    words = [word.encode("utf-8", "replace").decode() for word in words]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 2, 3, 4), f"exit code {result.exit_code} of {words}"
    said = result.stderr.splitlines()
    assert all(line.isprintable() for line in said), f"{words}: {said}"
    assert result.exit_code == 0 or sum(map(len, said)) < 4000, f"{words}: {said}"
    if "--json" in words and result.exit_code == 0:
        json.loads(result.stdout, parse_constant=_refuse)


def _refuse(name: str) -> float:
    raise AssertionError(f"{name} in the output is no JSON")


TARGETS: Mapping[str, Case] = {
    case.__name__: case
    for case in (
        *(run_files, yaml_text, estimates, programs, plans, hardware_files, model_configs),
        *(weight_files, token_data, id_files, documents, rows, tokenizers, checkpoints, options),
        chat_templates,
    )
}
