"""The environment of a rank is torch's standard one."""

from __future__ import annotations

from lastwords.launcher import rank_environment


def _base(**inherited: str) -> dict[str, str]:
    return rank_environment.base(inherited, uid="u", launcher="l", worker=1, volume="/v")


def test_torchs_standard_variables_are_set() -> None:
    environment = rank_environment.of_rank(
        _base(PATH="/bin"), {"LASTWORDS_WORKERS": "3", "EXTRA": "1"}, rank=3, ranks=(2, 3), attempt=4
    )
    expected = {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "6", "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "3", "OMP_NUM_THREADS": "1", "EXTRA": "1", "PATH": "/bin",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0",
        "LASTWORDS_VOLUME": "/v", "LASTWORDS_ATTEMPT": "4", "LASTWORDS_WORKER": "1", "LASTWORDS_WORKERS": "3",
        "LASTWORDS_PROCESSES_PER_WORKER": "2", "LASTWORDS_WORKER_UID": "u", "LASTWORDS_LAUNCHER": "l",
    }  # fmt: skip
    assert expected.items() <= environment.items()
    assert {"TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"} <= environment.keys()
    assert "GLOO_SOCKET_IFNAME" not in environment


def test_a_wrapped_command_gets_torchruns_defaults_and_names_a_rank_only_where_there_is_one() -> None:
    given = {
        **_base(PATH="/bin", PET_MAX_RESTARTS="9"),
        "LASTWORDS_WORKERS": "2",
        "LASTWORDS_PROCESSES_PER_WORKER": "2",
    }
    several = rank_environment.of_wrapped(given, ranks=(2, 3), attempt=4, store_address="10.0.0.1:4000")
    expected = {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "4000", "PET_MAX_RESTARTS": "0", "PET_RDZV_BACKEND": "static", "MASTER_PORT": "4000",
        "LASTWORDS_WRAPPED": "1", "LASTWORDS_ATTEMPT": "4", "PATH": "/bin",
    }  # fmt: skip
    assert expected.items() <= several.items()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & several.keys()
    given["LASTWORDS_PROCESSES_PER_WORKER"] = "1"
    single = rank_environment.of_wrapped(given, ranks=(1,), attempt=4, store_address="10.0.0.1:4000")
    assert {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "PET_NPROC_PER_NODE": "1"}.items() <= single.items()


def test_what_the_user_set_stays() -> None:
    environment = _base(OMP_NUM_THREADS="4", TORCH_NCCL_ASYNC_ERROR_HANDLING="1", TORCH_NCCL_ENABLE_MONITORING="1")
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == environment["TORCH_NCCL_ENABLE_MONITORING"] == "1"


def test_only_variables_that_are_read_at_load_make_a_standby_useless() -> None:
    base = _base(OMP_NUM_THREADS="1")
    rank = rank_environment.of_rank(base, {"LASTWORDS_WORKERS": "2"}, rank=0, ranks=(0,), attempt=1)
    assert rank_environment.at_load(base) == rank_environment.at_load(rank)
    for name in ("OMP_NUM_THREADS", "PYTHONHASHSEED", "LD_PRELOAD", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"):
        other = rank_environment.of_rank(base, {name: "7"}, rank=0, ranks=(0,), attempt=1)
        assert rank_environment.at_load(base) != rank_environment.at_load(other)
