"""Digest of the weights of a Hugging Face directory, in milliseconds. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from sppo.config.model import ModelConfig
from sppo.model.huggingface.files import check_headers

_SAMPLE_BYTES = 4096


def weights_digest(directory: Path, model: ModelConfig) -> str:
    """Return a SHA-256 of the names, shapes and types of a model's tensors, and of samples of each.

    Samples are the first and the last 4 KiB, so a training that changes every tensor is found and
    a few flipped bytes are not. The division of tensors into files does not matter, nor does a
    vocabulary projection that a tied model stores as well.

    Raises:
        ValueError: As in :func:`.files.check_headers`.
        OSError: A file cannot be read.
    """
    digest, headers = hashlib.sha256(), dict[Path, tuple[int, dict[str, Any]]]()
    for name, tensor in sorted(check_headers(directory, model).tensors.items()):
        if tensor.path not in headers:
            headers[tensor.path] = _header(tensor.path)
        values, header = headers[tensor.path]
        begin, end = (values + offset for offset in header[tensor.key]["data_offsets"])
        digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
        with tensor.path.open("rb") as file:
            for start in (begin, max(begin, end - _SAMPLE_BYTES)):
                size = min(_SAMPLE_BYTES, end - start)
                digest.update(os.pread(file.fileno(), size, start))
    return digest.hexdigest()


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the offset of the values in a safetensors file, and its header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))
