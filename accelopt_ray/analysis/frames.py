"""From Arrow tables to typed data frames: the same column types whatever the rows hold, and nothing left to parse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

_STRING = pd.StringDtype("pyarrow", na_value=np.nan)

_TYPES: Mapping[pa.DataType, Any] = {
    pa.string(): _STRING,
    pa.large_string(): _STRING,
    pa.int32(): pd.Int32Dtype(),
    pa.int64(): pd.Int64Dtype(),
    pa.bool_(): pd.BooleanDtype(),
}
"""Nullable types, so that a missing number does not turn a column of counts into floats; floats use NaN."""


def typed_frame(table: pa.Table) -> pd.DataFrame:
    """Converts a table; list columns stay Arrow arrays, which pandas shows as lists.

    Raises:
        ValueError: A column is a map; see :func:`wide_map`.
    """
    for field in table.schema:
        if pa.types.is_map(field.type):
            raise ValueError(f"column {field.name!r} is a map: make it columns with wide_map")

    def dtype(kind: pa.DataType) -> Any:
        return pd.ArrowDtype(kind) if pa.types.is_list(kind) else _TYPES.get(kind)

    frame: pd.DataFrame = table.to_pandas(types_mapper=dtype)
    return frame


def wide_map(column: pa.ChunkedArray) -> pd.DataFrame:
    """Turns a map column into one float column for each key, NaN where a row lacks it.

    Args:
        column: ``map<string, double>``, one map for each row.

    Returns:
        As many rows as the column, keys in alphabetical order.
    """
    merged = column.combine_chunks()
    chunks = merged.chunks if isinstance(merged, pa.ChunkedArray) else [merged]
    frames = [_wide_chunk(chunk) for chunk in chunks]
    if not frames:
        return pd.DataFrame(index=pd.RangeIndex(0))
    wide = pd.concat(frames, ignore_index=True)
    return wide[sorted(wide.columns)]


def _wide_chunk(array: pa.MapArray) -> pd.DataFrame:
    offsets = array.offsets.to_numpy()
    encoded = array.keys[offsets[0] : offsets[-1]].dictionary_encode()
    rows = np.repeat(np.arange(len(array)), np.diff(offsets))
    values = np.full((len(encoded.dictionary), len(array)), np.nan)
    items = array.items[offsets[0] : offsets[-1]].to_numpy(zero_copy_only=False)
    values[encoded.indices.to_numpy(), rows] = items
    return pd.DataFrame(values.T, columns=encoded.dictionary.to_pylist())


def flat_settings(config_text: object) -> dict[str, object]:
    """Flattens a resolved configuration.

    Args:
        config_text: A run's ``config_json``.

    Returns:
        Settings by dotted names (``search.beam_width``); models are named by role (``models.planner``). Empty when the
        text is not a JSON object.
    """
    try:
        config = json.loads(config_text) if isinstance(config_text, str) else {}
    except json.JSONDecodeError:
        return {}
    return _flat(config) if isinstance(config, dict) else {}


def _flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if name.startswith("models.") and isinstance(value, list):
            flat[name] = "+".join(str(each.get("model")) if isinstance(each, dict) else str(each) for each in value)
        elif isinstance(value, dict):
            flat.update(_flat(value, f"{name}."))
        else:
            flat[name] = json.dumps(value) if isinstance(value, list) else value
    return flat
