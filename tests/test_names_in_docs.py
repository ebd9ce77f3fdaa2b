"""Names of the code in the explanations: one that the code no longer has is refused."""

import re
from functools import cache

import pytest

from tests.documents import ROOT, blocks

PAGES = sorted((ROOT / "docs/explanation").glob("*.md"))
ELSEWHERE = {"router_aux_loss_coef", "NCCL_BUFFSIZE"}
"""Names of transformers and NCCL."""
_CODE = re.compile(r"^```text\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"[\w./]+\.(?:json|png|txt|yaml|py)|tests/\w+")
_NAME = re.compile(r"\b(?:\w*[a-z]\w*_\w+|_\w*[a-z]\w*|[A-Z]+_[A-Z_]+|[A-Z][a-z]+[A-Z]\w+)\b")


@cache
def modules():
    """Text of every module, by path."""
    return {path: path.read_text() for path in (ROOT / "sppo").rglob("*.py")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_are_those_of_the_code(page):
    code = " ".join(map(" ".join, _CODE.findall(page.read_text())))
    known = {*re.findall(r"\w+", " ".join([*modules().values(), *map(str, modules())]))}
    assert not {*_NAME.findall(_FILE.sub("", code))} - known - ELSEWHERE


def test_modules_have_the_names_that_the_planner_page_gives_them():
    tree = blocks(ROOT / "docs/explanation/planner.md")[0].text
    named = re.findall(r"(\w+)\.(\w+)", tree)
    assert len(named) > 12
    for module, name in named:
        texts = [text for path, text in modules().items() if path.stem == module]
        assert any(re.search(rf"^(?:def|class) {name}\b", text, re.M) for text in texts), name
