"""The environment of a rank process: torch's standard variables and Lastwords' own. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lastwords.protocol import environment as names

_READ_AT_LOAD = (
    "PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "TORCH_", "PYTORCH_", "CUDA_",
    "NVIDIA_", "HIP_", "ROCR_", "NCCL_", "ATEN_", "TRITON_", "LASTWORDS_WINDOWS", "LANG", "LC_", "TZ",
)  # fmt: skip
"""Beginnings of names that interpreter and libraries read once, when they are loaded."""


def base(inherited: Mapping[str, str], *, uid: str, launcher: str, worker: int, volume: str) -> dict[str, str]:
    """What every process that the launcher makes gets, a standby included."""
    result = dict(inherited)
    result.setdefault("OMP_NUM_THREADS", "1")
    # NCCL's watchdog would abort a rank before its state could be copied.
    result.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    result.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    result[names.WORKER_UID] = uid
    result[names.LAUNCHER] = launcher
    result[names.WORKER] = str(worker)
    result[names.VOLUME] = volume
    return result


def of_rank(
    common: Mapping[str, str], added: Mapping[str, str], *, rank: int, ranks: tuple[int, ...], attempt: int
) -> dict[str, str]:
    """
    Environment of `rank`, one of this worker's `ranks`, in `attempt`; `common` is from `base`.

    MASTER_ADDR and MASTER_PORT are missing: the runner sets them once the attempt's store is known.
    """
    result = {**common, **added}
    worker = int(result[names.WORKER])
    local_world = len(ranks)
    workers = int(result.get(names.WORKERS, "1"))
    world = str(workers * local_world)
    result.update(
        {
            names.ATTEMPT: str(attempt),
            names.PROCESSES_PER_WORKER: str(local_world),
            "RANK": str(rank),
            "LOCAL_RANK": str(ranks.index(rank)),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": str(local_world),
            "GROUP_RANK": str(worker),
            "GROUP_WORLD_SIZE": str(workers),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": world,
            "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
        }
    )
    result.setdefault("TORCHELASTIC_MAX_RESTARTS", str(attempt - 1))
    result.setdefault("TORCHELASTIC_RUN_ID", "lastwords")
    return result


def of_wrapped(given: Mapping[str, str], *, ranks: tuple[int, ...], attempt: int, store_address: str) -> dict[str, str]:
    """
    Environment of a wrapped command, which is to make this worker's `ranks` in `attempt`; `given` is from `base`.

    `PET_…` are the defaults of a torchrun in it: that joins the attempt and restarts nothing by itself. Where the
    worker has one rank only, the command may also be that rank without any torchrun.
    """
    host, _, port = store_address.rpartition(":")
    result = dict(given)
    if len(ranks) == 1:
        result = of_rank(given, {}, rank=ranks[0], ranks=ranks, attempt=attempt)
    workers = result.setdefault(names.WORKERS, "1")
    result.update(
        {
            names.ATTEMPT: str(attempt),
            names.WRAPPED: "1",
            names.PROCESSES_PER_WORKER: str(len(ranks)),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "PET_NNODES": workers,
            "PET_NPROC_PER_NODE": str(len(ranks)),
            "PET_NODE_RANK": result[names.WORKER],
            "PET_MASTER_ADDR": host,
            "PET_MASTER_PORT": port,
            "PET_RDZV_BACKEND": "static",
            "PET_RDZV_ID": f"lastwords-{attempt}",
            "PET_MAX_RESTARTS": "0",
        }
    )
    return result


def at_load(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of it that only takes effect when a process starts: a standby made with another one is of no use."""
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_LOAD)}
