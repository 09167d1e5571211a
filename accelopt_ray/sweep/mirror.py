"""A copy of a sweep's folder where pyarrow's filesystems reach: an S3 bucket, a shared disk.

The sweep works in a local folder, since its locks and renames need one; the copy is what outlives the head. Parts of a
trajectory hardly ever change once written, so bringing the copy up to date costs what is new.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from accelopt_ray.outcome import UserError
from accelopt_ray.sweep.folder import IDENTITY_NAME


class Mirror:
    """Keeps a remote copy of a local folder."""

    def __init__(self, local: Path, uri: str) -> None:
        """Connects to the remote side.

        Args:
            local: The folder, which may not exist yet.
            uri: For instance ``s3://bucket/sweeps/presets?region=us-west-2``.

        Raises:
            UserError: The URI is none that pyarrow knows, or the other side does not answer.
        """
        self._local = local
        self._uri = uri
        try:
            self._filesystem, self._root = pafs.FileSystem.from_uri(uri)
            self._filesystem.get_file_info(self._root)
        except (OSError, pa.ArrowException) as error:
            first_line = str(error).strip().splitlines()[0]
            raise UserError(
                f"cannot use --output {uri} ({first_line}): check the address and its credentials"
            ) from None
        self._pushed: dict[str, tuple[int, int]] = {}

    def pull(self) -> bool:
        """Fetches what is there into an empty or missing local folder; returns whether there was a sweep.

        A local folder that holds something already is taken to be ahead of its copy and stays as it is.

        Raises:
            UserError: The other side does not answer.
        """
        try:
            there = bool(self._filesystem.get_file_info(f"{self._root}/{IDENTITY_NAME}").type == pafs.FileType.File)
            if there and not (self._local.is_dir() and any(self._local.iterdir())):
                self._local.mkdir(parents=True, exist_ok=True)
                pafs.copy_files(self._root, str(self._local), self._filesystem, pafs.LocalFileSystem())
                self._pushed = dict(self._files())
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"cannot read {self._uri} ({str(error).strip().splitlines()[0]}): try again") from None
        return there

    def push(self) -> None:
        """Brings the copy up to date: what is new or changed goes over, what is gone goes there too.

        Files are read as a whole before the first byte is sent, and an object appears whole or not at all.

        Raises:
            OSError: The other side refused; the next push tries the rest again.
        """
        present = dict(self._files())
        # What says how runs stand goes last, so that the copy never claims more than it holds.
        for name in sorted(present, key=lambda each: (each.endswith(".json"), each)):
            if self._pushed.get(name) == present[name]:
                continue
            try:
                content = (self._local / name).read_bytes()
            except FileNotFoundError:
                continue  # replaced or withdrawn meanwhile
            target = f"{self._root}/{name}"
            self._filesystem.create_dir(target.rpartition("/")[0], recursive=True)
            with self._filesystem.open_output_stream(target) as stream:
                stream.write(content)
            self._pushed[name] = present[name]
        for name in [each for each in self._pushed if each not in present]:
            info = self._filesystem.get_file_info(f"{self._root}/{name}")
            if info.type == pafs.FileType.File:
                self._filesystem.delete_file(f"{self._root}/{name}")
            del self._pushed[name]

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Files by their path in the folder, with size and time; hidden ones are temporary or locks."""
        for folder, folders, names in os.walk(self._local):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                if name.startswith("."):
                    continue
                path = Path(folder, name)
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue
                yield path.relative_to(self._local).as_posix(), (status.st_size, status.st_mtime_ns)
