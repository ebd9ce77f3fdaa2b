"""The code of docs/data.md runs in the order of the page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from sppo.data.tokens import FORMAT_VERSION
from tests.conftest import call

TEXT = (Path(__file__).parents[2] / "docs/data.md").read_text()


def test_the_code_of_the_text_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks] == ["python", "bash", "bash"]
    for kind, code in blocks:
        if kind == "python":
            exec(code, {})
            continue
        result = call(*shlex.split(code)[1:])
        assert result.exit_code == 0, result.output
    meta = json.loads(Path("data/chat/meta.json").read_text())
    assert (meta["format_version"], meta["num_tokens"]) == (FORMAT_VERSION, 47)
    mask = list(Path("data/chat/loss_mask.bin").read_bytes())
    assert mask == [0] * 4 + [1] * 43
    for path in Path("data/chat").iterdir():
        assert f"| `{path.name}` |" in TEXT
