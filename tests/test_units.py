import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo.units import (
    counted,
    format_bytes,
    format_count,
    format_duration,
    format_tokens,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("32Ki", 32768),
        ("1.5M", 1_500_000),
        ("1.001k", 1001),  # 1000.9999999999999 as a float
        ("0.1M", 100_000),
        ("1.5Ki", 1536),
        ("16_384", 16384),
        (" 12 Ki ", 12288),
        ("3K", 3000),
        ("9007199254740993k", 9007199254740993 * 1000),  # beyond a float's integers
        (4096, 4096),
        (0, 0),
        (1e3, 1000),
    ],
)
def test_sizes(text, value):
    assert parse_size(text) == value


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("7.9h", 28440), (" 2 d", 172800), (5, 5)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "1y", "-1h", "1h30m", True, None, "9" * 50])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="is not a duration; write one such as 90s"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("32KI", "not a size"),
        ("Ki", "not a size"),
        ("", "not a size"),
        ("1.2.3", "not a size"),
        ("-5", "not a size"),
        ("1__0", "not a size"),
        ("_1", "not a size"),
        ("1e3", "not a size"),
        ("٣", "not a size"),
        ("9" * 5000, "not a size"),
        ("1.1Ki", "not a whole number"),
        (1.5, "not a whole number"),
        (-1, "negative"),
        (True, "not a size"),
        (None, "not a size"),
        ([1], "not a size"),
        ({"a": 1}, "not a size"),
        (b"1", "not a size"),
        (math.inf, "finite"),
        (-math.inf, "finite"),
        (math.nan, "finite"),
    ],
)
def test_what_is_no_size(text, says):
    with pytest.raises(ValueError, match=says) as caught:
        parse_size(text)
    assert len(str(caught.value)) < 150


@given(st.integers(0, 1 << 22), st.sampled_from(["", "k", "M", "Ki", "Mi", "Gi", "Ti"]))
def test_suffixes_multiply(number, suffix):
    factor = {"": 1, "k": 10**3, "M": 10**6, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    assert parse_size(f"{number}{suffix}") == parse_size(f"{number}{suffix}B")
    assert parse_size(f"{number}{suffix}") == number * factor[suffix]


@given(st.integers(0, 1 << 60))
def test_tokens_are_read_back_as_printed(count):
    assert parse_size(format_tokens(count)) == count


@given(st.integers(0, 1 << 50))
def test_bytes_are_printed_to_a_tenth_of_their_unit(count):
    number, unit = format_bytes(count).split(" ")
    scale = parse_size(f"1{unit}")
    assert abs(float(number) * scale - count) <= 0.05 * scale + 1e-9


@given(st.text())
def test_any_text_is_a_size_or_a_value_error(text):
    with suppress(ValueError):
        assert parse_size(text) >= 0


def test_printed():
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 30, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3.0 TiB",
    ]
    assert [format_tokens(n) for n in (0, 1000, 1024, 32768, 1 << 20, (1 << 20) + 1)] == [
        "0",
        "1000",
        "1Ki",
        "32Ki",
        "1Mi",
        "1048577",
    ]
    assert [format_count(n) for n in (12, 41234, 1.2e6, 7e9)] == ["12", "41.2k", "1.2M", "7.0B"]
    assert [format_duration(s) for s in (0.0015, 2.345, 75, 12345)] == [
        "1.5 ms",
        "2.35 s",
        "1m15s",
        "3h26m",
    ]


def test_rounding_never_prints_a_whole_of_the_next_unit_in_a_smaller_one():
    assert [format_duration(s) for s in (59.996, 0.99999)] == ["1m00s", "1.00 s"]
    assert [format_count(n) for n in (999.99, 999_960)] == ["1.0k", "1.0M"]
    assert format_bytes(1023.99 * 1024) == "1.0 MiB"


def test_nouns_are_counted():
    shown = [counted(n, "rank") for n in (0, 1, 2, 1024)]
    assert shown == ["0 ranks", "1 rank", "2 ranks", "1,024 ranks"]
