"""Detection of text files: every encoding of text is read, binary files are refused."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from sppo.data.preparation.text_files import why_binary

GERMAN = "Grüße aus Köln, für 5 \u20ac.\r\n" * 40
RUSSIAN = "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!\n" * 40
JAPANESE = "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3002\n" * 40


def _packed(kind: str) -> bytes:
    """A binary file of ``kind`` as programs write it."""
    buffer, text = io.BytesIO(), GERMAN.encode()
    if kind == "npy":
        np.save(buffer, np.arange(100))
    elif kind == "pt":
        torch.save(torch.zeros(3), buffer)
    elif kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("a.txt", text)
    elif kind == "tar":
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("a.txt"))
    elif kind == "random":
        return np.random.default_rng(0).integers(1, 256, 4096, dtype=np.uint8).tobytes()
    else:
        return {"gz": gzip, "bz2": bz2, "xz": lzma}[kind].compress(text)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["npy", "pt", "zip", "tar", "random", "gz", "bz2", "xz"])
def test_what_programs_write_is_binary(kind: str) -> None:
    assert why_binary(_packed(kind)) is not None


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (GERMAN, "utf-8"),
        (GERMAN, "utf-8-sig"),
        (GERMAN, "utf-16"),
        (GERMAN, "utf-32"),
        (GERMAN, "cp1252"),
        (RUSSIAN, "koi8-r"),
        (RUSSIAN, "cp1251"),
        (JAPANESE, "shift-jis"),
        (JAPANESE, "euc-jp"),
        (JAPANESE, "iso2022-jp"),
        (JAPANESE, "gb18030"),
        ("\x1b[1mbold\x1b[0m\f\b", "ascii"),
        ("", "ascii"),
    ],
)
def test_what_people_write_is_text(text: str, encoding: str) -> None:
    data = text.encode(encoding)
    for end in (len(data), len(data) // 2 + 1):  # what is read may end inside a character
        assert why_binary(data[:end]) is None


def test_half_of_utf16_is_said_to_be_what_it_is() -> None:
    assert why_binary(GERMAN.encode("utf-16-le")) == "byte 1 is NUL"
