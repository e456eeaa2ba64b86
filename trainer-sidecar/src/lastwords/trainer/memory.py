"""Hints to the kernel about memory that tensors lie in."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_MADV_HUGEPAGE = 14
_HUGE_BYTES = 2 * 1024 * 1024


def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


_madvise_free = _madvise()


def expect_use(tensor: torch.Tensor) -> None:
    """
    The tensor's memory, not touched so far, will be written soon and whole: give it in huge pages.

    That is a fault each 2 MiB instead of 4 KiB, which is most of what filling new memory takes. Where the kernel
    cannot, it stays as it is.
    """
    if tensor.device.type != "cpu" or type(tensor) is not torch.Tensor:
        return
    begin = -(-tensor.data_ptr() // _HUGE_BYTES) * _HUGE_BYTES
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // _HUGE_BYTES * _HUGE_BYTES
    if end > begin:
        _madvise_free(begin, end - begin, _MADV_HUGEPAGE)
