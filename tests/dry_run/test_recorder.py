"""What the recorder says of Triton kernels is what their sources do."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.dry_run import recorder

KERNELS = Path(__file__).parents[2] / "sppo/kernels/triton"


def names(*trees):
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


def stored(function, functions):
    """Names of which addresses of ``tl.store`` are made, in functions that are called, too."""
    made_of, left, found = defaultdict(set), set(), set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for name in names(*node.targets):
                made_of[name] |= names(node.value)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "tl.store":
                left |= names(node.args[0])
            elif called in functions:
                helper = functions[called]
                written = stored(helper, functions)
                for parameter, value in zip(helper.args.args, node.args, strict=False):
                    left |= names(value) if parameter.arg in written else set()
    while left:
        name = left.pop()
        found.add(name)
        left |= made_of[name] - found
    return found


def test_kernels_write_what_is_said():
    written = {}
    for path in KERNELS.glob("*.py"):
        assert "tl.atomic" not in path.read_text()
        tree = ast.parse(path.read_text())
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        for name in functions:
            if name.endswith("_kernel"):
                pointers = {x.arg for x in functions[name].args.args if x.arg.endswith("_ptr")}
                written[name] = pointers & stored(functions[name], functions)
    assert written == recorder._WRITTEN
