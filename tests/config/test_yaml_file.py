from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sppo.config.problems import ConfigError
from sppo.config.yaml_file import parse_yaml, read_yaml
from tests.tiers import examples


def parse(text):
    return parse_yaml(text, source="run.yaml")


def problem(text):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    (only,) = caught.value.problems
    return only


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("1.", 1.0),
        ("-2.5e+3", -2500.0),
        ("12", 12),
        ("+3", 3),
        ("010", 10),  # YAML 1.1 read this as eight
        ("09", 9),  # and failed here
        ("0x10", 16),
        ("1:30", "1:30"),  # YAML 1.1: 90
        ("2024-01-01", "2024-01-01"),  # YAML 1.1: a date
        ("32Ki", "32Ki"),
        ("null", None),
        ("~", None),
        ("~/data", "~/data"),
        ("", None),
        ("[0,5,9]", [0, 5, 9]),
    ],
)
def test_scalars(text, value):
    read = parse(text)
    assert read == value
    assert type(read) is type(value)


def test_a_key_given_twice_names_both_lines():
    twice = problem("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n")
    assert twice.path == "line 5"
    assert twice.rule == "key 'c' is given twice (first in line 3); keep one"


def test_a_merge_fills_and_given_keys_win():
    text = "a: &a {x: 1, y: 2}\nb: {in: &b {<<: *a, x: 3}}\nc: {<<: *b, z: 4}\n"
    assert parse(text)["b"]["in"] == {"x": 3, "y": 2}
    assert parse(text)["c"] == {"x": 3, "y": 2, "z": 4}


def test_a_key_given_twice_beside_a_merge_is_refused():
    assert "'x' is given twice" in problem("a: &a {x: 1}\nb: {<<: *a, x: 3, x: 4}\n").rule


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("a: [1\nb: 2", "line 2", "expected ',' or ']'"),
        ("a: b: c", "line 1", "mapping values are not allowed here"),
        ("a: 1\n---\nb: 2", "line 2", "a single document"),
        ("? [a]\n: 1", "line 1", "a key is a word"),
        ("a: {<<: 1}", "line 1", "expected a mapping"),
        ("a: !!python/object:os.system x", "line 1", "python/object"),
        ("a:\n\t- b", "line 2", "'\\t' that cannot start any token; indent with spaces"),
        ("a:\n  b: 1\n c: 2", "line 3", "; let the keys of a section begin in one column"),
        (
            "a: *nowhere",
            "line 1",
            "undefined alias 'nowhere'; put text that begins with * in quotes",
        ),
        ("a: " + "9" * 5000, "", "digits"),
        ("a: \0", "", "not YAML text"),
        ("[" * 500, "", "nested too deeply"),
        ("a: 'open", "line 1", "quoted scalar"),
    ],
)
def test_what_is_not_yaml(text, where, says):
    found = problem(text)
    assert found.path == where
    assert says in found.rule
    assert "\n" not in found.line()
    assert len(found.line()) < 200


@settings(max_examples=examples(50, all=100))
@given(st.text(alphabet=st.sampled_from("ab:-?[]{}<&*!|>'\"#%@,\n\t 0.~"), max_size=30) | st.text())
@example("? !!map\n: 1")
@example("<<: 1")
@example("<<: [1]")
@example("&a [*a]")
@example("!!int x")
@example("!!float x")
@example("!!bool x")
@example("!!timestamp x")
@example("!!binary x")
@example("!!omap [1]")
@example("!!set {[a]}")
@example("? !!null x\n")
@example("=: 1")
def test_any_text_is_a_value_or_a_config_error(text):
    with suppress(ConfigError):
        parse(text)


def read(path):
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    return str(caught.value)


def test_a_missing_file_names_its_neighbours_nearest_first(tmp_path):
    for name in ("aa.yaml", "run.yaml", "b.yml", "run.txt", "c.yaml", "d.yaml", "e.yaml"):
        (tmp_path / name).touch()
    text = read(tmp_path / "rnu.yaml")
    assert "no such file; beside it: run.yaml, " in text
    assert "run.txt" not in text
    assert text.count(".yaml, ") + text.count(".yml, ") <= 5


def test_other_files_that_cannot_be_read(tmp_path):
    assert "no such file" in read(tmp_path / "run.yaml")
    assert f"no directory {tmp_path / 'none'}" in read(tmp_path / "none/run.yaml")
    assert "Is a directory" in read(tmp_path)
    (tmp_path / "bad.yaml").write_bytes(b"a: \xff")
    assert "byte 3 is 0xff, which is not UTF-8" in read(tmp_path / "bad.yaml")
    assert "Not a directory" in read(tmp_path / "bad.yaml/run.yaml")


def test_only_a_mapping_is_a_run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("[1, 2]")
    assert "a mapping of sections" in read(path)
    path.write_text("")
    assert read_yaml(path) == {}
    path.write_text("# nothing yet\n")
    assert read_yaml(path) == {}
