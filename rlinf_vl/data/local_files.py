"""Files that rows name, and the encodings in which rows hold them as text."""

import base64
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rlinf_vl.data.unusable import ImageError, shorten


def file_inside(root: Path | None, name: str, noun: str) -> Path:
    """Return the path of a file that a row names, relative to `root`.

    Args:
        root: the dataset's folder, which the path may not leave; None if it has none.
        name: the path, or a file:// URL.
        noun: "image" or "video", for error messages.

    Raises:
        ImageError: there is no such file in the folder.
    """
    if name[:7].lower() == "file://":
        name = unquote(urlsplit(name).path)
    quoted_name, kind = repr(shorten(name)), unreadable(noun)
    if root is None:
        raise ImageError(
            kind,
            f"{quoted_name} is neither base64 of {_article(noun)} nor, as the dataset has no "
            "folder, a path",
        )
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()):
            raise ImageError(
                "path leaves the dataset's folder",
                f"path {quoted_name} leads out of the dataset's folder {root}; "
                f"name the one that all {noun}s are in as data.image_root",
            )
        if not path.is_file():  # excludes devices and pipes, too
            raise ImageError(
                kind, f"{quoted_name} is neither base64 of {_article(noun)} nor a file in {root}"
            )
    except ImageError:
        raise
    except (OSError, ValueError, RuntimeError) as e:  # bad name, no permission, a loop of links
        raise ImageError(kind, f"path {quoted_name} in {root} can't be read: {e}") from e
    return path


def unreadable(noun: str) -> str:
    """Return the kind under which rows are counted whose file can't be read."""
    return f"{noun} file can't be read"


def decode_base64(text: str) -> bytes | None:
    """Return the bytes that a text encodes, whitespace aside; None if it is no base64."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        return None


def decode_data_uri(text: str, kind: str) -> bytes:
    """Return the bytes of a data URI.

    Raises:
        ImageError: it is not one of base64; `kind` is the error's.
    """
    header, _, payload = text.partition(",")
    if not header.lower().endswith(";base64"):
        raise ImageError(kind, f"data URI {header[:60]!r} isn't ';base64,…'")
    if (data := decode_base64(payload)) is None:
        raise ImageError(kind, f"data URI {header[:60]!r}: what follows is not base64")
    return data


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
