"""Calls of the CUDA path agree with the installed torch, and the script reports differences."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/torch_signatures.py"
SOURCES = sorted((ROOT / "sppo").rglob("*.py"))


@pytest.fixture(scope="module")
def names():
    return runpy.run_path(str(SCRIPT))


@pytest.mark.filterwarnings("ignore")
def test_the_installed_torch_takes_every_call(names, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT.name])
    names["main"]()
    assert re.search(r"calls as expected, 0 different\n$", capsys.readouterr().out)


def test_every_operator_and_function_of_the_sources_is_compared(names):
    schemas = (*names["CUDA_OPERATORS"], *names["CPU_OPERATORS"])
    operators = {schema.partition("(")[0].partition(".")[0] for schema in schemas}
    for path in SOURCES:
        text = path.read_text()
        called = set(re.findall(r"torch\.ops\.aten\.(\w+)\(", text))
        called |= set(re.findall(r"torch\.(_foreach_\w+)\(", text))
        assert called <= operators, f"{path}: add {called - operators} to {SCRIPT.name}"
        functions = set(re.findall(r"\b(?:torch\.|self\.)?_?cuda\.(\w+)\(", text)) - {"cuda"}
        missing = {name for name in functions if f"cuda.{name}" not in names["CALLS"]}
        assert not missing, f"{path}: add {missing} to {SCRIPT.name}"


def test_a_schema_that_takes_less_is_different(names):
    differs = names["operator_difference"]
    assert differs("_foreach_zero_(Tensor(a!)[] self) -> ()") is None
    assert "is now" in differs("_foreach_zero_(Tensor(a!)[] self, bool fast=False) -> ()")
    assert differs("_no_such_operator(Tensor self) -> Tensor") == "is not there"


def test_arguments_that_are_not_taken_are_different(names):
    differs, call = names["call_difference"], names["Call"]
    assert differs(torch.cuda.Event, call(0, ("blocking",))) is None
    assert "it takes" in differs(torch.cuda.Event, call(0, ("colour",)))
    assert "it takes" in differs(torch.distributed.new_group, call(1, ("no_such",)))
    assert differs(None, call()) == "is not there"


def test_a_difference_ends_the_script_with_an_error(names, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT.name])
    monkeypatch.setitem(names["ATTRIBUTES"], "cuda.Event", ("no_such_method",))
    with pytest.raises(SystemExit, match="1"):
        names["main"]()
    assert "torch.cuda.Event.no_such_method: is not there" in capsys.readouterr().out
