"""Reading of text files from users: UTF-8, with an upper bound of the size."""

from __future__ import annotations

from pathlib import Path

from sppo.quoting import one_line
from sppo.units import format_bytes


class NotTextError(ValueError):
    """File that is not readable as UTF-8 text; the message names the file and the rule."""


def read_text_file(path: Path, *, most_bytes: int) -> str:
    """Return the text in `path`; an endless file, such as a device, is refused.

    Args:
        path: Path of the file.
        most_bytes: Largest accepted size.

    Raises:
        NotTextError: The file is not UTF-8 or too large, or no file can have this path.
        OSError: The file cannot be read.
    """
    name = one_line(path)
    if "\0" in str(path):
        raise NotTextError(f"{name}: a path holds no zero byte")
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise NotTextError(f"{name}: larger than {format_bytes(most_bytes)}")
    try:
        # Universal newlines, as in text mode.
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise NotTextError(f"{name}: {where}, which is not UTF-8 text") from None
