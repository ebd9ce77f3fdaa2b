import os
import re
import subprocess
import sys

import pytest

from sppo.cli.app import SUBCOMMANDS, subcommand
from sppo.version import __version__
from tests.conftest import call, succeed

ALL = [
    (),
    *((name,) for name in SUBCOMMANDS),
    *((name, inner) for name in SUBCOMMANDS for inner in getattr(subcommand(name), "commands", {})),
]
"""Every command and group as words."""


def test_help_names_the_commands(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = succeed("--help")
    for name in SUBCOMMANDS:
        first, *_ = subcommand(name).help.split("\n\n")
        assert re.search(rf" {name} +{re.escape(' '.join(first.split()))} ", text)


@pytest.mark.parametrize("words", ALL, ids=lambda words: " ".join(words) or "sppo")
def test_every_command_explains_itself(words):
    text = succeed(*words, "--help")
    assert "Usage: " in text
    assert "<bool>" not in text, "behind a flag stands no value"
    assert "<list[" not in text, "the name of an argument says what it is"
    assert "{" not in text.split("Usage: ")[1].splitlines()[0]
    assert len(text.splitlines()) <= 100


def test_a_shell_completes_commands(monkeypatch):
    """As bash asks for it, once `sppo --install-completion` was called."""
    asked = {"_SPPO_COMPLETE": "complete_bash", "COMP_WORDS": "sppo data st", "COMP_CWORD": "2"}
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv[0] = 'sppo'; from sppo.__main__ import main; main()",
    ]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout.split() == ["stats"], done.stderr


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (
            ["train", "run.yaml", "--steps", "3"],
            "a value of the run file is replaced by train.steps=VALUE",
        ),
        (["train", "run.yaml", "--max-length", "3"], "KEY=VALUE. Here it is sequence.length."),
        (
            ["solve", "run.yaml", "--optimizer.lr=1"],
            "a value of the run file is replaced by optimizer.lr=VALUE",
        ),
        (
            ["simulate", "run.yaml", "--dtype", "fp32"],
            "a value of the run file is replaced by train.dtype=VALUE",
        ),
    ],
)
def test_a_key_that_is_written_as_an_option_is_explained(words, written):
    text = " ".join(call(*words).stderr.replace("│", " ").split())
    assert f"No such option: {words[2].partition('=')[0]}; " in text
    assert written in text


def test_version():
    assert succeed("--version") == f"sppo {__version__}\n"


@pytest.mark.parametrize(
    "words", [["trian"], ["train"], ["train", "--steps", "3", "x"], ["config", "chek"]]
)
def test_misspelt_command_lines(words):
    result = call(*words)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr
    assert "Traceback" not in result.output


def test_a_number_out_of_range_is_refused_in_the_words_of_a_run_file():
    result = call("eval", "run.yaml", "--sequences", "0")
    assert result.exit_code == 2
    said = " ".join(result.stderr.replace("│", " ").split())
    assert "Invalid value for '--sequences': must be greater than or equal to 1" in said
