"""Writing a run's tables: one immutable Parquet file per flush, complete or absent, never half there.

A Parquet file carries its index at its end, so one that was being written when the process died is lost as a whole.
Each flush therefore becomes a file of its own: written under a temporary name that dataset discovery ignores, synced,
renamed, and the folder synced. On an object store one upload is atomic by itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from accelopt_ray.trajectory.schema import SCHEMA_VERSION, TABLES, named_table

PARTITION_KEY = "p_run"
"""Folder key; not ``run_id``, which is a column of the files and must not be defined twice."""

PART_NAME = re.compile(r"part-(\d{6,})-[0-9a-f]+\.parquet$")
"""Name of a part: its number in the order of writing, and something unique."""


class TrajectoryWriter:
    """Writes part files of one run. Not thread-safe: one flush at a time, one writer per run.

    It completes rows with ``schema_version`` and ``run_id``, keeps each source and each system prompt once, and hashes
    what it keeps.
    """

    def __init__(self, root: str | Path, run_id: str) -> None:
        """Opens the writer; nothing is written yet. What the run has written before is continued.

        Args:
            root: The trajectory's folder (``<output>/trajectory``) or a URI that pyarrow's filesystems understand.
            run_id: Names the run's partition.
        """
        if isinstance(root, Path) or "://" not in root:
            self._filesystem: pafs.FileSystem = pafs.LocalFileSystem()
            self._root = str(Path(root).absolute())
        else:
            self._filesystem, self._root = pafs.FileSystem.from_uri(root)
        self._run_id = run_id
        self._sequence = self._next_sequence()
        self._known_sources: set[str] = set()
        self._known_prompts: set[str] = set()
        if self._sequence:
            self._recall_texts()

    def write(self, table: str, rows: Sequence[Mapping[str, object]]) -> str | None:
        """Makes rows durable as one part file.

        Args:
            table: Table name.
            rows: Its rows, without the columns that the writer fills in.

        Returns:
            The path of the new part, or None when there was nothing (new) to write.

        Raises:
            ValueError: Unknown table or column, or a value that does not fit.
            OSError: The file system refused.
        """
        sources, prompts = set(self._known_sources), set(self._known_prompts)
        completed = [row for row in (self._complete(table, row, sources, prompts) for row in rows) if row is not None]
        if not completed:
            return None
        data = named_table(table).arrow(completed)
        folder = self._folder(table)
        name = f"part-{self._sequence:06d}-{uuid.uuid4().hex[:12]}.parquet"
        self._store(data, folder, name)
        # Only what reached the disk counts as known: after a failed flush the same rows carry their texts again.
        self._sequence += 1
        self._known_sources, self._known_prompts = sources, prompts
        return f"{folder}/{name}"

    def _next_sequence(self) -> int:
        """One more than the highest number among the run's parts, so that later parts sort behind earlier ones."""
        numbers = [-1]
        for table in TABLES:
            selector = pafs.FileSelector(self._folder(table), allow_not_found=True)
            names = (PART_NAME.match(info.base_name) for info in self._filesystem.get_file_info(selector))
            numbers += [int(name[1]) for name in names if name is not None]
        return max(numbers) + 1

    def _recall_texts(self) -> None:
        """Learns which texts are stored already; a damaged part only means that some are stored once more."""
        for table, key, text, known in (
            ("sources", "source_sha256", "source_sha256", self._known_sources),
            ("llm_calls", "system_prompt_sha256", "system_prompt", self._known_prompts),
        ):
            selector = pafs.FileSelector(self._folder(table), allow_not_found=True)
            for info in self._filesystem.get_file_info(selector):
                if PART_NAME.match(info.base_name) is None:
                    continue
                try:
                    with self._filesystem.open_input_file(info.path) as stream:
                        part = pq.ParquetFile(stream).read(columns=sorted({key, text}))
                except (OSError, pa.ArrowException):
                    continue
                known.update(part[key].filter(part[text].is_valid()).to_pylist())

    def _folder(self, table: str) -> str:
        return f"{self._root}/{table}/{PARTITION_KEY}={self._run_id}"

    @staticmethod
    def check(table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Raises ValueError as :meth:`write` would, without writing."""
        named_table(table).arrow(rows)

    def _complete(
        self, table: str, row: Mapping[str, object], sources: set[str], prompts: set[str]
    ) -> Mapping[str, object] | None:
        full = {**row, "schema_version": SCHEMA_VERSION, "run_id": self._run_id}
        if table == "sources":
            digest = str(full.setdefault("source_sha256", text_sha256(str(row.get("source", "")))))
            if digest in sources:
                return None
            sources.add(digest)
        elif table == "llm_calls" and full.get("system_prompt") is not None:
            digest = text_sha256(str(full["system_prompt"]))
            full["system_prompt_sha256"] = digest
            if digest in prompts:
                full["system_prompt"] = None
            prompts.add(digest)
        return full

    def _store(self, data: pa.Table, folder: str, name: str) -> None:
        buffer = pa.BufferOutputStream()
        # A dictionary page for each column of so few rows costs more than it saves, in size and in reading.
        pq.write_table(data, buffer, compression="zstd", use_dictionary=False)
        content = buffer.getvalue()
        self._filesystem.create_dir(folder, recursive=True)
        if isinstance(self._filesystem, pafs.LocalFileSystem):
            _write_durably(Path(folder), name, content)
        else:
            with self._filesystem.open_output_stream(f"{folder}/{name}") as stream:
                stream.write(content)


def text_sha256(text: str) -> str:
    """Hash under which a text is stored once: SHA-256 of its UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _write_durably(folder: Path, name: str, content: pa.Buffer) -> None:
    """Writes a file that after a crash is either whole or absent."""
    temporary = folder / f".{name}.tmp"
    try:
        with temporary.open("wb") as stream:
            stream.write(memoryview(content))
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(folder / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
