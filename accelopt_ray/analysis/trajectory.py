"""A loaded trajectory: typed data frames of every table, read when first used, and the joins that answer questions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import pandas as pd
import pyarrow as pa

from accelopt_ray.analysis.activity import is_being_written
from accelopt_ray.analysis.frames import flat_settings, typed_frame, wide_map
from accelopt_ray.analysis.lineage import Step, lineage
from accelopt_ray.analysis.locations import Store, find_stores
from accelopt_ray.analysis.memory_use import memory_use
from accelopt_ray.analysis.outcomes import outcomes
from accelopt_ray.analysis.progress import BEST_SO_FAR_COLUMNS, best_so_far, frontier, iteration_progress
from accelopt_ray.analysis.spending import costs
from accelopt_ray.analysis.summary import run_states, summary
from accelopt_ray.analysis.traffic import profiles
from accelopt_ray.outcome import UserError
from accelopt_ray.trajectory.reader import read_table
from accelopt_ray.trajectory.schema import named_table

CALL_TEXTS = ("system_prompt", "user_prompt", "reply_text", "reasoning_text")
"""Columns of ``llm_calls`` that are kept apart in :attr:`Trajectory.llm_texts`: they are most of a trajectory."""


def load(paths: str | Path | Iterable[str | Path], *, run_ids: Collection[str] | None = None) -> Trajectory:
    """Opens trajectories. Tables are read when they are first used.

    Args:
        paths: A run's or sweep's folder, a folder of such folders, a URI, a pattern with ``*``, or several of these.
        run_ids: Reads these runs alone; the partitions of the others are not opened.

    Returns:
        The trajectory. While a run goes on, each load sees what is on disk at that moment.

    Raises:
        UserError: A path leads to no trajectory, or a named run is not there.
        NewerSchemaError: Raised by the first use of a table that a newer version of accelopt-ray wrote.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    stores = find_stores(given)
    if run_ids is not None:
        known = frozenset[str]().union(*(store.run_ids for store in stores))
        unknown = sorted(set(run_ids) - known)
        if unknown:
            some = ", ".join(sorted(known)[:5]) + (", ..." if len(known) > 5 else "")
            raise UserError(f"no run {unknown[0]} in {', '.join(map(str, given))}: there are {some or 'none'}")
        stores = [Store(store.location, store.run_ids & set(run_ids)) for store in stores]
    return Trajectory(stores)


class Trajectory:
    """Data frames of one or many runs.

    Column names and units are those of ``docs/trajectory.md``. Missing values are NaN in text and float columns and
    ``<NA>`` in whole-number and truth columns. Damaged part files are left out with a
    :class:`~accelopt_ray.trajectory.DamagedPartWarning` that names them.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        """Wraps stores that :func:`load` has found."""
        self._stores = [store for store in stores if store.run_ids]

    def __repr__(self) -> str:
        count = len(self.run_ids)
        return f"<Trajectory of {count} run{'s' if count != 1 else ''}>"

    @property
    def run_ids(self) -> list[str]:
        """All runs, by name."""
        return sorted(frozenset[str]().union(*(store.run_ids for store in self._stores)))

    def select(self, run_ids: Collection[str]) -> Trajectory:
        """Returns the trajectory of some of the runs; their tables are read anew, from their partitions alone."""
        return Trajectory([Store(store.location, store.run_ids & set(run_ids)) for store in self._stores])

    def location_of(self, run_id: str) -> str:
        """Returns the folder that a run was found in.

        Raises:
            UserError: There is no such run.
        """
        for store in self._stores:
            if run_id in store.run_ids:
                return store.location
        raise UserError(f"there is no run {run_id}")

    # Tables.

    @cached_property
    def runs(self) -> pd.DataFrame:
        """``runs``; the models' map is columns (``planner_model``, ...); see :attr:`settings` for the configuration."""
        table = self._read("runs", [name for name in _columns("runs") if name != "models"])
        frame = typed_frame(table)
        for role, models in _models_by_role(self._read("runs", ["models"])["models"]).items():
            frame[f"{role}_model"] = pd.Series(models, index=frame.index, dtype=frame["run_id"].dtype)
        # A resumed run may say again what it is; the first row tells when it began.
        return frame.sort_values("created_at").drop_duplicates("run_id").reset_index(drop=True)

    @cached_property
    def configurations(self) -> dict[str, dict[str, object]]:
        """Each run's settings by dotted names; of a run that was resumed with other settings the last ones."""
        edited = self.resumes.dropna(subset=["config_json"]).sort_values("resumed_at")
        texts = dict(zip(self.runs["run_id"], self.runs["config_json"], strict=True))
        texts.update(zip(edited["run_id"], edited["config_json"], strict=True))
        return {str(run_id): flat_settings(text) for run_id, text in texts.items()}

    @cached_property
    def settings(self) -> pd.DataFrame:
        """:attr:`configurations` as one row a run and one column a setting, indexed by ``run_id``."""
        index = pd.Index(list(self.configurations), name="run_id")
        return pd.DataFrame(list(self.configurations.values()), index=index)

    @cached_property
    def resumes(self) -> pd.DataFrame:
        """``resumes``."""
        return self._frame("resumes")

    @cached_property
    def call_starts(self) -> pd.DataFrame:
        """``call_starts``."""
        return self._frame("call_starts")

    @cached_property
    def results(self) -> pd.DataFrame:
        """``results``."""
        return self._frame("results")

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """``iterations``."""
        return self._frame("iterations")

    @cached_property
    def llm_calls(self) -> pd.DataFrame:
        """``llm_calls`` without prompts and replies, which are in :attr:`llm_texts`."""
        return self._frame("llm_calls", without=CALL_TEXTS)

    @cached_property
    def llm_texts(self) -> pd.DataFrame:
        """Prompts and replies of the calls, system prompts filled in for all calls that used them."""
        keys = ["run_id", "call_id", "role", "system_prompt_sha256"]
        frame = typed_frame(self._read("llm_calls", [*keys, *CALL_TEXTS]))
        known = frame.dropna(subset=["system_prompt"]).drop_duplicates("system_prompt_sha256")
        prompts = known.set_index("system_prompt_sha256")["system_prompt"]
        frame["system_prompt"] = frame["system_prompt_sha256"].map(prompts)
        return frame

    @cached_property
    def plans(self) -> pd.DataFrame:
        """``plans``."""
        return self._frame("plans")

    @cached_property
    def sources(self) -> pd.DataFrame:
        """``sources``."""
        return self._frame("sources")

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """``evaluations`` without counters and the toolchain's output: :attr:`counters`, :attr:`toolchain_outputs`."""
        return self._frame("evaluations", without=("counters", "toolchain_output"))

    @cached_property
    def toolchain_outputs(self) -> pd.DataFrame:
        """What compiler, runtime and profiler printed, for evaluations with such output: keys and the text."""
        keys = ["run_id", "task", "evaluation_id", "candidate_id", "outcome"]
        return typed_frame(self._read("evaluations", [*keys, "toolchain_output"])).dropna(subset=["toolchain_output"])

    @cached_property
    def counters(self) -> pd.DataFrame:
        """Profiler counters: ``run_id``, ``evaluation_id`` and one column a counter, by the profiler's own names."""
        table = self._read("evaluations", ["run_id", "evaluation_id", "counters"])
        keys = typed_frame(table.select(["run_id", "evaluation_id"]))
        return pd.concat([keys, wide_map(table["counters"])], axis=1)

    @cached_property
    def memory_items(self) -> pd.DataFrame:
        """``memory_items``: one row when an item enters, one more when it leaves."""
        return self._frame("memory_items")

    @cached_property
    def selections(self) -> pd.DataFrame:
        """``selections``."""
        return self._frame("selections")

    # Joins.

    def states(self) -> pd.DataFrame:
        """One row a run: what it was to do, how far it is, and its state; see :func:`run_states`.

        Where it can be known, ``unfinished`` is told apart into ``running`` (somebody is writing it) and ``stopped``.
        """
        frame = run_states(self.runs, self.settings, self.iterations, self.evaluations)
        written = {store.location: is_being_written(store.location) for store in self._stores}
        going_on = frame["run_id"].map(lambda run_id: written[self.location_of(run_id)])
        newest = frame["created_at"].eq(frame["created_at"].max()) | (len(self._stores) == len(self.run_ids))
        frame.loc[(going_on.eq(True) & newest & frame["state"].ne("finished")).to_numpy(bool), "state"] = "running"
        frame.loc[(going_on.eq(False) & frame["state"].eq("unfinished")).to_numpy(bool), "state"] = "stopped"
        return frame

    def summary(self) -> pd.DataFrame:
        """One row for each run and task: before, after, and at what cost; see :func:`summary`."""
        return summary(self.evaluations, self.llm_calls, self.iterations)

    def lineage(self, run_id: str | None = None, task: str | None = None) -> list[Step]:
        """The way from the baseline to the best kernel of one search; see :func:`lineage`.

        Args:
            run_id: The run; may be left out when there is one.
            task: The task; may be left out when the run has one.

        Raises:
            UserError: The choice is not clear or there is no correct kernel.
        """
        return lineage(self, *self._one_search(run_id, task))

    def best_so_far(self) -> pd.DataFrame:
        """After each evaluation, the best that its search had found by then; see :func:`best_so_far`."""
        return best_so_far(self._evaluations_with(BEST_SO_FAR_COLUMNS))

    def best_by_cost(self) -> pd.DataFrame:
        """:meth:`best_so_far` with ``cost_usd``, what all calls of the search that had ended by then had cost."""
        return best_so_far(self._evaluations_with(BEST_SO_FAR_COLUMNS), self.llm_calls)

    def frontier(self, by: str = "cost_usd") -> pd.DataFrame:
        """Points of :meth:`best_by_cost` that no other of the same task beats; see :func:`frontier`."""
        return frontier(self.best_by_cost(), by)

    def progress(self) -> pd.DataFrame:
        """One row for each search and iteration: best, beam and its spread; see :func:`iteration_progress`."""
        return iteration_progress(self.evaluations, self.selections)

    def outcomes(self) -> pd.DataFrame:
        """Counts of outcomes by run, task, iteration and the model that wrote the kernel; see :func:`outcomes`."""
        return outcomes(self.evaluations, self.llm_calls)

    def costs(self) -> pd.DataFrame:
        """Calls, tokens and dollars by run, task, role and model; see :func:`costs`."""
        return costs(self.llm_calls)

    def memory_use(self) -> pd.DataFrame:
        """Each attempt with the number of experience items its planner was shown; see :func:`memory_use`."""
        return memory_use(self.evaluations, self.plans)

    def profiles(self) -> pd.DataFrame:
        """Baseline and best kernel of each search with their counters and the roofline; see :func:`profiles`."""
        return profiles(self.evaluations, self.counters, self.settings)

    def searches(self) -> list[tuple[str, str]]:
        """Pairs of run and task that have evaluations, in the order of their first one."""
        pairs = self.evaluations[["run_id", "task"]].drop_duplicates()
        return [(str(run_id), str(task)) for run_id, task in pairs.itertuples(index=False)]

    def _one_search(self, run_id: str | None, task: str | None) -> tuple[str, str]:
        fitting = [pair for pair in self.searches() if run_id in (None, pair[0]) and task in (None, pair[1])]
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            raise UserError(f"there are no evaluations of {run_id or 'any run'}, {task or 'any task'}")
        some = ", ".join(f"{run} {name}" for run, name in fitting[:5])
        raise UserError(f"{len(fitting)} searches fit, name run_id and task: {some}{', ...' * (len(fitting) > 5)}")

    def _evaluations_with(self, columns: Sequence[str]) -> pd.DataFrame:
        """``evaluations`` if it has been read, else no more of it than these columns."""
        if "evaluations" in vars(self):
            return self.evaluations
        return typed_frame(self._read("evaluations", columns))

    def _frame(self, table: str, without: Sequence[str] = ()) -> pd.DataFrame:
        return typed_frame(self._read(table, [name for name in _columns(table) if name not in without]))

    def _read(self, table: str, columns: Sequence[str]) -> pa.Table:
        schema = named_table(table).schema
        empty = pa.schema([schema.field(name) for name in columns]).empty_table()
        return pa.concat_tables(
            [empty, *(read_table(store.location, table, store.run_ids, columns=columns) for store in self._stores)]
        )


def _columns(table: str) -> list[str]:
    return [str(name) for name in named_table(table).schema.names]


def _models_by_role(column: pa.ChunkedArray) -> dict[str, list[str | None]]:
    maps = [dict(pairs or ()) for pairs in column.to_pylist()]
    roles = sorted({role for each in maps for role in each})
    return {role: [each.get(role) for each in maps] for role in roles}
