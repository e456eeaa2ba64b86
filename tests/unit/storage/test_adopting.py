"""A job that begins with a checkpoint of another one: in a folder, in an object store, from one to the other."""

from __future__ import annotations

import pathlib

import pytest

from lastwords.storage import adopting, base
from lastwords.storage.adopting import NoSourceError
from lastwords.storage.checkpoints import CheckpointError, JobCheckpoints
from lastwords.storage.retention import Keep
from tests.processes.storage import s3
from tests.unit.storage import support
from tests.unit.storage.support import Place


@pytest.fixture(params=["folder to folder", "s3 to folder", "folder to s3"])
def pair(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> tuple[Place, JobCheckpoints]:
    """Where another job's checkpoints are, and a job that has none."""
    folder = Place(str(tmp_path / "old"), "links")
    new = str(tmp_path / "new")
    if request.param != "folder to folder":
        server: s3.Server = request.getfixturevalue("s3_server")
        place = Place(server.prefix(), "s3")
        folder, new = (place, new) if request.param == "s3 to folder" else (folder, place.root)
    job = JobCheckpoints.at(new, "ns", "new-job")
    job.claim("uid-2")
    return folder, job


def test_the_newest_good_one_is_copied_whole_and_becomes_the_jobs_own(pair: tuple[Place, JobCheckpoints]) -> None:
    place, job = pair
    for step in (5, 10, 20):
        support.save(place.job(), step=step)
    place.job().reject(support.identify(20), "damaged")
    source = f"{place.root}/ns/job"
    assert adopting.adopt(job, source) == support.identify(10)
    assert job.verify(support.identify(10)) == []
    assert [info.id for info in job.list_checkpoints()] == [support.identify(10)]
    assert {name.rpartition("/")[2] for name in place.files(10)} == set(
        job.store.list("ns/new-job/step-000000000010-a1")
    )
    # Once: what the job makes of it is never mixed with what the other one does later.
    support.save(place.job(), step=30)
    job.delete(support.identify(10))
    assert adopting.adopt(job, source) is None
    assert job.list_checkpoints() == []


def test_one_checkpoint_can_be_named(pair: tuple[Place, JobCheckpoints]) -> None:
    place, job = pair
    for step in (5, 10):
        support.save(place.job(), step=step)
    assert adopting.adopt(job, f"{place.root}/ns/job/{support.identify(5).folder}") == support.identify(5)
    assert job.verify(support.identify(5)) == []


def test_a_job_that_has_checkpoints_keeps_to_them(pair: tuple[Place, JobCheckpoints]) -> None:
    place, job = pair
    support.save(place.job(), step=50)
    other = support.plan(7)
    job.write_plan(other)
    for rank in (0, 1):
        job.write_part(other, rank, support.sources(other), b"r")
    job.commit(other)
    assert adopting.adopt(job, f"{place.root}/ns/job") is None
    assert [info.id.step for info in job.list_checkpoints()] == [7]


def test_what_is_no_source_is_said(pair: tuple[Place, JobCheckpoints]) -> None:
    place, job = pair
    with pytest.raises(NoSourceError, match="no committed checkpoint of a job is in .*/ns/job; name <storage>"):
        adopting.adopt(job, f"{place.root}/ns/job")
    support.write(place.job(), support.plan())
    with pytest.raises(NoSourceError, match="no checkpoint was committed there"):
        adopting.adopt(job, f"{place.root}/ns/job/{support.identify(10).folder}")
    with pytest.raises(NoSourceError, match="not the folder of a job"):
        adopting.adopt(job, "s3://bucket")


def test_a_damaged_source_leaves_no_checkpoint_and_a_later_try_is_whole(pair: tuple[Place, JobCheckpoints]) -> None:
    place, job = pair
    support.save(place.job())
    path = next(name for name in place.files() if "rank-" in name and name.endswith(".safetensors"))
    body = base.read(place.store(), path)
    assert body is not None
    place.store().write(path, [body[:-1] + b"x"], len(body))
    with pytest.raises(CheckpointError, match="block 0 is damaged"):
        adopting.adopt(job, f"{place.root}/ns/job")
    assert job.list_checkpoints() == []
    place.store().write(path, [body], len(body))
    assert adopting.adopt(job, f"{place.root}/ns/job") == support.identify(10)
    assert job.verify(support.identify(10)) == []
    job.retain(Keep(last=1), ())
    assert job.list_folders() == [support.identify(10)]
