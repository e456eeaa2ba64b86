"""Hints to the kernel about memory that is going to be written."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

_MADV_POPULATE_WRITE = 23


def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


_advise_free = _madvise()


def populate(address: int, nbytes: int) -> None:
    """
    Have the pages of this memory made at once; their contents stay. Where the kernel cannot, nothing happens.

    In one call that is cheaper than a fault for each page. Huge pages would be cheaper still where free ones lie about,
    and several times dearer where the kernel has to make room for them first: after a fault, in memory that has
    been in use for long, it mostly has.
    """
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    _advise_free(begin, address + nbytes - begin, _MADV_POPULATE_WRITE)
