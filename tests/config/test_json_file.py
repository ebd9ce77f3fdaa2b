"""JSON of any kind is read, or refused in one line that names file, place and rule."""

import json
from pathlib import Path

import pytest

from sppo.config.json_file import JsonError, parse_json, read_json


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Long paths are cut in messages."""
    monkeypatch.chdir(tmp_path)


def refused(text):
    path = Path("some.json")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(JsonError) as caught:
        read_json(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.isprintable()
    assert len(message) < len(str(path)) + 200
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("words", ["[]", ('{"a": ', "}")])
def test_deep_nesting(words):
    text = words[0] * 100_000 + "1" + words[1] * 100_000
    assert refused(text) == "nested too deeply"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b": NaN}', "NaN is not JSON: write a number, or null"),
        ('["NaN", -Infinity]', "-Infinity is not JSON: write a number, or null"),
        ("[1, 1e400]", "1e400 is beyond every number that can be computed with"),
        ('{"a": 1' + "0" * 400 + "}", "a number of 401 digits; at most 300 can be read"),
        ("1" * 5000, "a number of 5000 digits; at most 300 can be read"),
        ('{"a": {"b\\n": 1, "b\\n": 2}}', r"key 'b\n' stands twice in one object; keep one"),
        ("{", "not JSON: Expecting property name enclosed in double quotes (line 1, column 2)"),
        ("[1,\n 2", "not JSON: Expecting ',' delimiter (line 2, column 3)"),
        ("", "not JSON: Expecting value (line 1, column 1)"),
        (b'{"a": "\xff"}', "byte 7 is 0xff, which is not UTF-8 text"),
        (
            b"\xef\xbb\xbf{}",
            "not JSON: Unexpected UTF-8 BOM (decode using utf-8-sig) (line 1, column 1)",
        ),
    ],
)
def test_what_is_refused(text, message):
    assert refused(text) == message


def test_a_file_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("sppo.config.json_file._MOST_BYTES", 10)
    assert refused("[1,2,3,4,5,6]") == "larger than 10 B"


def test_values_are_those_of_json():
    text = '{"a": [1, -2.5e3, true, null, "\\u00e9"], "b": {}, "c": 123456789012345678901}'
    assert parse_json(text, source="x") == json.loads(text)


def test_without_strictness_other_values_are_taken():
    line = b'{"text": "a", "score": NaN, "id": ' + b"7" * 5000 + b', "id": 1e999}'
    assert parse_json(line, source="x", strict=False)["text"] == "a"
    with pytest.raises(JsonError, match="x:3: nested too deeply"):
        parse_json(" " + "[" * 3000 + "]" * 3000, source="x:3", strict=False)


def test_a_line_may_begin_with_a_byte_order_mark():
    assert parse_json(b'\xef\xbb\xbf{"text": "a"}', source="x", strict=False) == {"text": "a"}
