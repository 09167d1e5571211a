"""The tables of a trajectory: every column, its Arrow type and its meaning, under one version number.

The schema is explicit, never inferred from the rows at hand: a column that happens to be all null in one part file has
the same type there as everywhere else, so that readers can join parts without looking at them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 3
"""Raised by one whenever a column is added, so that a reader can tell an older trajectory from a newer one."""

VERSION_KEY = b"accelopt_schema_version"
"""Key of the schema version in a part file's own metadata, readable without reading a row."""

_TIMESTAMP = pa.timestamp("us", tz="UTC")
_TEXT = pa.large_string()
"""Prompts, replies and sources: 64-bit offsets, since one flush may hold more than 2 GiB of them."""
_TEXTS = pa.list_(pa.string())


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: Its name; a unit is the name's last part (``_ms``, ``_s``, ``_usd``, ``_tokens``).
        type: Arrow type.
        meaning: One line for the documentation.
    """

    name: str
    type: pa.DataType
    meaning: str


@dataclass(frozen=True)
class Table:
    """One table: a folder of part files that share :attr:`schema`."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema, with table name and version in its metadata."""
        return pa.schema(
            [pa.field(column.name, column.type) for column in self.columns],
            metadata={b"accelopt_table": self.name.encode(), VERSION_KEY: str(SCHEMA_VERSION).encode()},
        )

    def arrow(self, rows: Sequence[Mapping[str, object]]) -> pa.Table:
        """Builds an Arrow table from rows.

        Args:
            rows: Mappings of column names to values; an absent column is null. Mappings are accepted for map columns,
                tuples for list columns.

        Returns:
            A table of this schema, rows in the given order.

        Raises:
            ValueError: A row has a column that the table lacks, or a value that does not fit its column. It names both.
        """
        names = {column.name for column in self.columns}
        for row in rows:
            unknown = sorted(set(row) - names)
            if unknown:
                raise ValueError(f"table {self.name!r} has no column {', '.join(map(repr, unknown))}")
        arrays = []
        for column in self.columns:
            values = [_plain(row.get(column.name), column.type) for row in rows]
            try:
                arrays.append(pa.array(values, type=column.type))
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError, OverflowError) as error:
                raise ValueError(f"table {self.name!r}, column {column.name!r} ({column.type}): {error}") from error
        return pa.table(arrays, schema=self.schema)


def _plain(value: object, kind: pa.DataType) -> object:
    """Turns a mapping into the pairs that Arrow's map type takes, keys sorted so that equal rows are equal bytes."""
    if isinstance(value, Mapping) and pa.types.is_map(kind):
        return sorted(value.items())
    if isinstance(value, (Mapping, list, tuple)) and pa.types.is_string(kind):
        # A ``*_json`` column given as a structure, as a convenience to whoever records.
        return json.dumps(value, sort_keys=True)
    return value


_KEYS = (
    Column("schema_version", pa.int32(), "version of this schema that the row was written with"),
    Column("run_id", pa.string(), "the run it belongs to"),
)
_STEP = (
    *_KEYS,
    Column("task", pa.string(), "name of the task being searched"),
    Column("iteration", pa.int32(), "iteration of the search; 0 is the baseline"),
)


def _table(name: str, meaning: str, keys: tuple[Column, ...], columns: Iterable[tuple[str, pa.DataType, str]]) -> Table:
    return Table(name, meaning, (*keys, *(Column(*column) for column in columns)))


_ALL = (
    _table(
        "runs",
        "one row for each run: what was asked, with what code, on what machine",
        _KEYS,
        [
            ("created_at", _TIMESTAMP, "when the run started"),
            ("preset", pa.string(), "search preset (`published`, `paper`, ...)"),
            ("seed", pa.int64(), "seed of all the search's random streams"),
            ("device", pa.string(), "device that evaluates (`sim-trn1`, `neuron`, ...)"),
            ("models", pa.map_(pa.string(), pa.string()), "role to model name"),
            ("config_json", _TEXT, "the resolved configuration"),
            ("config_sha256", pa.string(), "its hash"),
            ("code_version", pa.string(), "version of accelopt-ray"),
            ("fingerprint_json", _TEXT, "toolchain, device and machine that results depend on"),
        ],
    ),
    _table(
        "iterations",
        "one row for each finished iteration of a task's search",
        _STEP,
        [
            ("started_at", _TIMESTAMP, "when its first call was made"),
            ("ended_at", _TIMESTAMP, "when its last evaluation was final"),
            ("beam_candidate_ids", _TEXTS, "candidates carried into the next iteration, best first"),
            ("counted_candidate_ids", _TEXTS, "who was counted at its selection; null where it waited for all"),
        ],
    ),
    _table(
        "llm_calls",
        "one row for each model call, on disk before the reply is used; one more when it was asked again after a kill",
        _STEP,
        [
            ("call_id", pa.string(), "the same when the same search asks again; unique together with `asking`"),
            ("asking", pa.int32(), "0, or how often it had been asked for before; the last one's reply is used"),
            ("role", pa.string(), "`planner`, `executor`, `summarizer` or `fixer`"),
            ("model", pa.string(), "model name as asked for"),
            ("endpoint", pa.string(), "base URL that answered"),
            ("system_prompt_sha256", pa.string(), "hash of the system prompt"),
            ("system_prompt", _TEXT, "its text, in the first row of the run that uses the hash; null in the others"),
            ("user_prompt", _TEXT, "user message"),
            ("reply_text", _TEXT, "the reply as received"),
            ("reasoning_text", _TEXT, "reasoning text that came beside the reply"),
            ("finish_reason", pa.string(), "as the endpoint gave it"),
            ("prompt_tokens", pa.int64(), "tokens of the prompt"),
            ("cached_tokens", pa.int64(), "of these, tokens answered from the endpoint's prefix cache"),
            ("completion_tokens", pa.int64(), "tokens of the completion, reasoning included"),
            ("reasoning_tokens", pa.int64(), "of these, tokens of reasoning"),
            ("usage_estimated", pa.bool_(), "true when the endpoint gave no usage and tokens are an estimate"),
            ("cost_usd", pa.float64(), "US dollars by the run's price table"),
            ("price_known", pa.bool_(), "false when no price is known, so that `cost_usd` is 0 for want of one"),
            ("latency_s", pa.float64(), "seconds from the call to the complete reply, retries included"),
            ("retries", pa.int32(), "attempts before the one that is recorded"),
            ("outcome", pa.string(), "`ok`, `empty`, `truncated`, `refused`, `error` or `lost` (in flight at a kill)"),
            ("error_text", _TEXT, "what went wrong"),
            ("sample_index", pa.int32(), "which of the independent samples of its prompt"),
            ("seed", pa.int64(), "sampling seed sent with the call"),
            ("started_at", _TIMESTAMP, "when the call was made"),
        ],
    ),
    _table(
        "call_starts",
        "one row for each model call, on disk before it is made; one without a row in `llm_calls` was lost",
        _STEP,
        [
            ("call_id", pa.string(), "key into `llm_calls`, together with `asking`"),
            ("asking", pa.int32(), "as in `llm_calls`"),
            ("role", pa.string(), "as in `llm_calls`"),
            ("started_at", _TIMESTAMP, "when it was about to be made"),
        ],
    ),
    _table(
        "plans",
        "one row for each plan that a planner returned",
        _STEP,
        [
            ("plan_id", pa.string(), "unique in the run"),
            ("parent_candidate_id", pa.string(), "the candidate it is a plan for"),
            ("call_id", pa.string(), "the planner's call"),
            ("sample_index", pa.int32(), "which sample of the planner's prompt"),
            ("plan_text", _TEXT, "the plan"),
            ("memory_item_ids", _TEXTS, "experience items that the planner was shown"),
            ("repeats_plan_id", pa.string(), "an earlier plan for the same kernel that says the same; not carried out"),
        ],
    ),
    _table(
        "sources",
        "one row for each distinct kernel text",
        _STEP,
        [
            ("source_sha256", pa.string(), "hash of the text; the key"),
            ("source", _TEXT, "the kernel file"),
        ],
    ),
    _table(
        "evaluations",
        "one row for each evaluated kernel, failed ones included",
        _STEP,
        [
            ("evaluation_id", pa.string(), "unique in the run"),
            ("candidate_id", pa.string(), "the kernel as a node of the search"),
            ("parent_candidate_id", pa.string(), "the kernel it was made from"),
            ("plan_id", pa.string(), "the plan it carries out"),
            ("call_id", pa.string(), "the executor's call that wrote it"),
            ("attempt_index", pa.int32(), "which attempt at the plan"),
            ("source_sha256", pa.string(), "key into `sources`"),
            ("canonical_sha256", pa.string(), "hash of the source without comments, names and layout of the text"),
            ("outcome", pa.string(), "`correct` or how it failed"),
            ("reason", pa.string(), "short machine-readable cause behind the outcome"),
            ("error_text", _TEXT, "what a developer would see on the device"),
            ("toolchain_output", _TEXT, "what compiler, runtime and profiler printed, stage by stage; null if nothing"),
            ("check", pa.string(), "correctness check (`published`, `strict`)"),
            ("check_stage", pa.string(), "`whole`, or `first` where one set of inputs was tried and no more mattered"),
            ("precision_tier", pa.string(), "`fp32`, `compensated` or `reduced`"),
            ("device", pa.string(), "device that evaluated"),
            ("simulated", pa.bool_(), "true when latency and counters are predictions of the simulator"),
            ("core", pa.string(), "NeuronCore and its Ray node, or simulator slot"),
            ("latency_ms", pa.float64(), "latency: mean of the samples"),
            ("latency_samples_ms", pa.list_(pa.float64()), "timed runs, or the one prediction"),
            ("latency_spread", pa.float64(), "(max - min) / min of the samples"),
            ("baseline_latency_ms", pa.float64(), "latency of the task's baseline in this run"),
            ("parent_latency_ms", pa.float64(), "latency of the parent, as measured in this iteration"),
            ("speedup_vs_parent", pa.float64(), "parent's latency over this one's"),
            ("speedup_vs_baseline", pa.float64(), "baseline's latency over this one's"),
            ("percent_of_peak", pa.float64(), "roofline time over latency, in percent"),
            ("prediction_confidence", pa.float64(), "relative half-width within which two predictions count as equal"),
            ("counters", pa.map_(pa.string(), pa.float64()), "profiler counters under the profiler's own names"),
            ("compile_s", pa.float64(), "seconds of compiling"),
            ("run_s", pa.float64(), "seconds of running and checking"),
            ("queue_s", pa.float64(), "seconds of waiting for a slot"),
            ("answered_from", pa.string(), "where the result came from when nothing was run"),
            ("fingerprint_sha256", pa.string(), "hash of the toolchain and model versions it depends on"),
            ("ended_at", _TIMESTAMP, "when it was final"),
        ],
    ),
    _table(
        "results",
        "one row for each finished evaluation, on disk before the result is used; what a resumed run reads",
        _STEP,
        [
            ("evaluation_id", pa.string(), "key into `evaluations`, where the attempt's own row may follow much later"),
            ("outcome", pa.string(), "`correct` or how it failed"),
            ("result_json", _TEXT, "the whole result, with the device's explanation and the check's details"),
            ("ended_at", _TIMESTAMP, "when it was final"),
        ],
    ),
    _table(
        "memory_items",
        "one row when an experience item enters the memory, one more when it leaves",
        _STEP,
        [
            ("item_id", pa.string(), "unique in the run"),
            ("kind", pa.string(), "`positive` or `negative`"),
            ("slow_candidate_id", pa.string(), "the slower kernel of the pair"),
            ("fast_candidate_id", pa.string(), "the faster one"),
            ("speedup", pa.float64(), "slower latency over faster, at least 1"),
            ("title", pa.string(), "the summary's title"),
            ("summary_text", _TEXT, "the summary shown to planners; empty when no optimisation was found"),
            ("call_id", pa.string(), "the summariser's call"),
            ("origin", pa.string(), "run and item of another run that it was taken from"),
            ("evicted_iteration", pa.int32(), "iteration in which it left; null while it stays"),
        ],
    ),
    _table(
        "selections",
        "one row for each place in each next beam",
        _STEP,
        [
            ("rank", pa.int32(), "place in the beam, 0 is best"),
            ("candidate_id", pa.string(), "who took it"),
            ("latency_ms", pa.float64(), "latency that it was ranked by"),
            ("rule", pa.string(), "why it is there"),
        ],
    ),
    _table(
        "resumes",
        "one row for each time the run was taken up again",
        _KEYS,
        [
            ("resumed_at", _TIMESTAMP, "when"),
            ("config_json", _TEXT, "the resolved configuration from then on"),
            ("config_sha256", pa.string(), "its hash"),
            ("edits_json", _TEXT, "settings that were changed: name to [before, after]"),
            ("code_version", pa.string(), "version of accelopt-ray"),
            ("fingerprint_json", _TEXT, "toolchain, device and machine that results depend on"),
            ("lost_calls", pa.int64(), "calls that were in flight when the run before ended"),
            ("lost_cost_usd", pa.float64(), "what they are taken to have cost"),
        ],
    ),
)

TABLES: Mapping[str, Table] = {table.name: table for table in _ALL}
"""All tables by name."""


def named_table(name: str) -> Table:
    """Looks a table up.

    Raises:
        ValueError: There is none of that name; the message lists those there are.
    """
    if name not in TABLES:
        raise ValueError(f"no table {name!r} in a trajectory; there are {', '.join(TABLES)}")
    return TABLES[name]
