"""Which exceptions are only the echo of another rank's death."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lastwords.trainer import errors

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41234"

TABLE = [
    (RuntimeError(GLOO), True),
    (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/buffer.cc:82] Timed out waiting 1800000ms"), True),
    (RuntimeError("Application timeout caused pair closure"), True),
    (RuntimeError("Rank 1 failed to pass monitoredBarrier in 30000 ms"), True),
    (dist.DistNetworkError("The client socket has timed out after 300000ms"), True),
    (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
    (dist.DistStoreError("wait timeout after 1000ms, keys: /default_pg/0//cpu//0/1"), True),
    (dist.DistBackendError("NCCL error: ncclRemoteError: A call failed possibly due to a network error"), True),
    (dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"), True),
    (dist.DistBackendError("ncclInvalidUsage: Duplicate GPU detected"), False),
    (dist.DistBackendError("ncclUnhandledCudaError: Call to CUDA function failed."), False),
    (dist.DistNetworkError("The server socket has failed to listen: EADDRINUSE, address already in use"), False),
    (RuntimeError("Detected mismatch between collectives on ranks."), False),
    (RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed."), False),
    (RuntimeError("CUDA out of memory"), False),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    (ConnectionResetError("[Errno 104] Connection reset by peer"), False),
    (TimeoutError("download"), False),
    (ValueError(GLOO), False),
    (KeyboardInterrupt(), False),
]


@pytest.mark.parametrize(("error", "secondary"), TABLE, ids=lambda value: str(value)[:60])
def test_each_error_is_told_apart(error: BaseException, secondary: bool) -> None:
    assert errors.is_secondary(error) is secondary


def test_the_first_error_of_a_chain_decides() -> None:
    def caught(first: BaseException, then: BaseException, *, explicit: bool = False) -> BaseException:
        try:
            try:
                raise first
            except BaseException as error:
                if explicit:
                    raise then from error
                raise then  # noqa: B904 - the context is what is tested
        except BaseException as error:
            return error

    assert errors.is_secondary(caught(RuntimeError(GLOO), ValueError("training failed"), explicit=True))
    assert errors.is_secondary(caught(RuntimeError(GLOO), KeyError("in the handler")))
    assert errors.is_secondary(caught(RuntimeError(GLOO), SystemExit(1)))
    # A script's own error, after which it still tried a barrier with peers that had gone.
    assert not errors.is_secondary(caught(ValueError("bad data"), RuntimeError(GLOO)))


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not errors.is_secondary(first)


def test_names_are_qualified_but_for_builtins() -> None:
    assert errors.name(ValueError()) == "ValueError"
    assert errors.name(dist.DistNetworkError("x")) == "torch.distributed.DistNetworkError"
