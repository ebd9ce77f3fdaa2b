"""Text files that users hand in: UTF-8, and no larger than what they are read for."""

from __future__ import annotations

from pathlib import Path

from sppo.quoting import one_line
from sppo.units import format_bytes


class NotTextError(ValueError):
    """A file that is not the text it should be.

    Attributes:
        rule: that it breaks, without the name of the file.
    """

    def __init__(self, path: Path, rule: str) -> None:
        self.rule = rule
        super().__init__(f"{one_line(path)}: {rule}")


def read_text_file(path: Path, *, most_bytes: int) -> str:
    """Return the text in `path`; a file without end, such as a device, is refused in time.

    Args:
        path: of the file.
        most_bytes: that it may hold.

    Raises:
        NotTextError: not UTF-8, too large, or a path that no file can have.
        OSError: it cannot be read.
    """
    if "\0" in str(path):
        raise NotTextError(path, "a path holds no zero byte")
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise NotTextError(path, f"larger than {format_bytes(most_bytes)}")
    try:
        # As text files are read everywhere: every line end is a newline.
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise NotTextError(path, f"{where}, which is not UTF-8 text") from None
