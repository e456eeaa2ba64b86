"""Which rank a process below a wrapped command is."""

from __future__ import annotations

import pytest

from lastwords.trainer import attached
from lastwords.trainer.parts import StateError

JOB = {"LASTWORDS_WORKERS": "2", "LASTWORDS_PROCESSES_PER_WORKER": "2", "LASTWORDS_WORKER": "1"}


def _rank(monkeypatch: pytest.MonkeyPatch, **variables: str) -> int:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**JOB, **variables}.items():
        monkeypatch.setenv(name, value)
    return attached._own_rank()


def test_it_is_what_torchrun_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _rank(monkeypatch, RANK="2", WORLD_SIZE="4") == 2
    assert _rank(monkeypatch, RANK="3", WORLD_SIZE="4") == 3


NO_RANK = [
    ({}, "this worker is to have 2 ranks, but .* use torchrun in the command, or one rank per worker"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "made rank 0 of 2, and this worker is to have ranks 2 to 3 of 4.*--standalone"),
    ({"RANK": "1", "WORLD_SIZE": "4"}, "made rank 1 of 4"),
    ({"RANK": "2", "WORLD_SIZE": "8"}, "made rank 2 of 8"),
]


@pytest.mark.parametrize(("variables", "sentence"), NO_RANK)
def test_another_jobs_rank_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], sentence: str
) -> None:
    with pytest.raises(StateError, match=sentence):
        _rank(monkeypatch, **variables)


def test_without_a_wrapped_command_there_is_nothing_to_attach_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LASTWORDS_WRAPPED", raising=False)
    assert attached.attach() is None
