"""Answering a run's calls from the replies that another run has recorded: no model, no money, the same search.

A reply is found by what was asked: both prompts and the number of the sample. Where several calls have asked the same,
the one of the same name counts, and the first by name for a call of another.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelopt_ray.outcome import CallOutcome, UserError
from accelopt_ray.search.services import ModelCall, ModelReply
from accelopt_ray.trajectory import read_table
from accelopt_ray.trajectory.digest import last_askings
from accelopt_ray.trajectory.writer import text_sha256

_REPLY_COLUMNS = tuple(field.name for field in dataclasses.fields(ModelReply))
_ASKED_COLUMNS = ("role", "system_prompt_sha256", "user_prompt", "sample_index", "asking")
_Key = tuple[str, str, int]


class ReplayClient:
    """Answers like a :class:`~accelopt_ray.agents.client.ModelClient`, from recorded calls."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], origin: str) -> None:
        """Takes over recorded calls.

        Args:
            rows: Rows of ``llm_calls``.
            origin: Where they come from, for the error about one that is missing.
        """
        self._origin = origin
        self._replies: dict[_Key, dict[str, ModelReply]] = defaultdict(dict)
        models: dict[str, set[str]] = defaultdict(set)
        for row in sorted(last_askings(rows), key=lambda row: str(row["call_id"])):
            key = (str(row["system_prompt_sha256"]), text_sha256(_text(row["user_prompt"])), _index(row))
            self._replies[key][str(row["call_id"])] = _reply(row)
            models[str(row["role"])].add(_text(row["model"]))
        self._models = {role: sorted(names) for role, names in models.items()}

    @property
    def models(self) -> Mapping[str, Sequence[str]]:
        """Names of the models that gave the replies, by role."""
        return self._models

    async def complete(self, call: ModelCall) -> ModelReply:
        """As :meth:`reply`."""
        return self.reply(call)

    def reply(self, call: ModelCall) -> ModelReply:
        """Returns the recorded reply under the call's own name, with the tokens and the cost that it had.

        Raises:
            UserError: There is none; the message says for which call.
        """
        key = (text_sha256(call.system_prompt), text_sha256(call.user_prompt), call.sample_index)
        found = self._replies.get(key)
        if found is None:
            raise UserError(
                f"{self._origin} has no reply for {call.call_id} (prompt sha256 {key[1][:16]}, sample "
                f"{call.sample_index}): replay with the configuration, tasks and version that recorded it"
            )
        reply = found.get(call.call_id) or next(iter(found.values()))
        return dataclasses.replace(reply, call_id=call.call_id)

    async def close(self) -> None:
        """Nothing is open."""


def replay_client(run: Path) -> ReplayClient:
    """Reads a run's recorded calls.

    Raises:
        UserError: The folder holds no trajectory, or no call in it was answered.
    """
    columns = list(dict.fromkeys((*_REPLY_COLUMNS, *_ASKED_COLUMNS)))
    rows = read_table(run, "llm_calls", columns=columns).to_pylist()
    if not rows:
        raise UserError(f"{run} holds no model calls: give the folder of a run that has made some")
    return ReplayClient(rows, f"the recorded run {run}")


def _reply(row: Mapping[str, Any]) -> ModelReply:
    values = {name: row[name] for name in _REPLY_COLUMNS if row[name] is not None}
    return ModelReply(**{**values, "outcome": CallOutcome(row["outcome"])})


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _index(row: Mapping[str, Any]) -> int:
    index = row["sample_index"]
    return index if isinstance(index, int) else 0
