"""
Where checkpoints are: a folder, or the URL of a prefix in an object store. Nothing is touched here.

    /folder   file:///folder   s3://bucket/prefix   gs://bucket/prefix   az://container/prefix
"""

from __future__ import annotations

import os

from lastwords.storage.base import StorageError, Store
from lastwords.storage.posix import PosixStore

_OBJECTS = ("s3", "gs", "az")


class PlaceError(ValueError):
    """Not a place for checkpoints; the text says which there are."""


def normal(where: str) -> str:
    """An absolute path, or a URL without a slash at its end. Raises PlaceError."""
    scheme, mark, rest = where.partition("://")
    if not mark:
        return os.path.abspath(where)
    if scheme == "file":
        if not rest.startswith("/"):
            raise PlaceError(f"{where}: file:// takes an absolute path, such as file:///checkpoints")
        return os.path.abspath(rest)
    if scheme not in _OBJECTS:
        known = ", ".join(f"{name}://" for name in ("file", *_OBJECTS))
        raise PlaceError(f"{where}: {scheme}:// is not known; checkpoints go to a folder, or to {known}")
    path = rest.strip("/")
    if not path or any(part in ("", ".", "..") for part in path.split("/")):
        raise PlaceError(f"{where}: name a bucket and a prefix, such as {scheme}://bucket/prefix")
    return f"{scheme}://{path}"


def is_folder(where: str) -> bool:
    """Whether this place is a folder of a file system. `where`: as `normal` gives it."""
    return "://" not in where


def parent(where: str) -> str | None:
    """One level up; None above a bucket or the root."""
    if is_folder(where):
        return os.path.dirname(where) if where != "/" else None
    above = where.rpartition("/")[0]
    return None if above.endswith("/") else above


def open_store(where: str) -> Store:
    """The store there. `where`: as `normal` gives it. Raises StorageError when there can be none."""
    if is_folder(where):
        return PosixStore(where)
    try:
        from lastwords.storage import objects
    except ImportError as error:
        raise StorageError(f"{where} needs the package obstore ({error}): pip install 'lastwords[agent]'") from None
    return objects.connect(where)
