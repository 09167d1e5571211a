"""A sweep's copy on a local file system and on a local S3 server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from accelopt_ray.outcome import UserError
from accelopt_ray.sweep.folder import IDENTITY_NAME
from accelopt_ray.sweep.mirror import Mirror
from accelopt_ray.trajectory import TrajectoryWriter, read_table


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Address of a server that speaks S3; credentials are made up."""
    server_module = pytest.importorskip("moto.server", reason="moto is not installed")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    made_up = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true"}
    before = {name: os.environ.get(name) for name in made_up}
    os.environ.update(made_up)
    endpoint = f"{host}:{port}"
    filesystem = pafs.S3FileSystem(
        endpoint_override=endpoint, scheme="http", region="us-east-1", allow_bucket_creation=True
    )
    filesystem.create_dir("bucket")
    yield endpoint
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    server.stop()


@pytest.fixture(params=["file", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/copy"
    endpoint = request.getfixturevalue("s3")
    return f"s3://bucket/{tmp_path.name}?scheme=http&region=us-east-1&endpoint_override={endpoint}"


def _files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_sweep_comes_back_from_its_copy_as_it_was(tmp_path: Path, uri: str) -> None:
    local = tmp_path / "local"
    mirror = Mirror(local, uri)
    assert not mirror.pull()
    writer = TrajectoryWriter(local / "run" / "trajectory", "run-1")
    writer.write("sources", [{"task": "silu", "iteration": 0, "source": "def kernel(): pass"}])
    (local / IDENTITY_NAME).write_text("{}", encoding="utf-8")
    (local / ".lock").write_text("", encoding="utf-8")
    mirror.push()
    writer.write("sources", [{"task": "silu", "iteration": 1, "source": "def kernel(): return 1"}])
    mirror.push()

    again = tmp_path / "again"
    assert Mirror(again, uri).pull()
    expected = _files(local)
    del expected[".lock"]
    assert _files(again) == expected
    assert len(read_table(again / "run", "sources")) == 2


def test_what_was_withdrawn_or_rewritten_is_so_in_the_copy(tmp_path: Path, uri: str) -> None:
    local = tmp_path / "local"
    (local / "run").mkdir(parents=True)
    (local / IDENTITY_NAME).write_text("{}", encoding="utf-8")
    (local / "run" / "gone").write_text("1", encoding="utf-8")
    (local / "run" / "changed").write_text("before", encoding="utf-8")
    mirror = Mirror(local, uri)
    mirror.push()
    (local / "run" / "gone").unlink()
    (local / "run" / "changed").write_text("after, and longer", encoding="utf-8")
    mirror.push()
    again = tmp_path / "again"
    Mirror(again, uri).pull()
    assert set(_files(again)) == {IDENTITY_NAME, "run/changed"}
    assert _files(again)["run/changed"] == b"after, and longer"


def test_local_work_that_is_ahead_of_its_copy_is_not_overwritten(tmp_path: Path, uri: str) -> None:
    local = tmp_path / "local"
    local.mkdir()
    (local / IDENTITY_NAME).write_text("old", encoding="utf-8")
    Mirror(local, uri).push()
    (local / IDENTITY_NAME).write_text("newer", encoding="utf-8")
    mirror = Mirror(local, uri)
    assert mirror.pull()
    assert (local / IDENTITY_NAME).read_text(encoding="utf-8") == "newer"
    mirror.push()
    Mirror(tmp_path / "again", uri).pull()
    assert (tmp_path / "again" / IDENTITY_NAME).read_text(encoding="utf-8") == "newer"


@pytest.mark.parametrize("uri", ["nonsense://x/y", "s3://bucket/x?colour=red"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, uri: str) -> None:
    with pytest.raises(UserError, match="cannot use --output"):
        Mirror(tmp_path / "local", uri)
