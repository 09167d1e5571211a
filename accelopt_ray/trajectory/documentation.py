"""The tables of ``docs/trajectory.md``, written from the schema so that they cannot differ from it.

``python -m accelopt_ray.trajectory.documentation`` prints them.
"""

from __future__ import annotations

from accelopt_ray.trajectory.digest import DIGEST_COLUMNS
from accelopt_ray.trajectory.schema import TABLES


def schema_markdown() -> str:
    """Returns every table with its columns, types and meanings as Markdown."""
    parts = []
    for table in TABLES.values():
        rows = [f"| `{column.name}` | {column.type} | {column.meaning} |" for column in table.columns]
        head = [f"### {table.name}", "", f"{table.meaning[0].upper()}{table.meaning[1:]}.", ""]
        parts.append("\n".join([*head, "| column | type | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def digest_markdown() -> str:
    """Returns the columns that :func:`~accelopt_ray.trajectory.digest.trajectory_digest` covers as Markdown."""
    lines = [
        f"| `{table}` | {', '.join(f'`{column}`' for column in columns)} |" for table, columns in DIGEST_COLUMNS.items()
    ]
    return "\n".join(["| table | columns |", "|---|---|", *lines]) + "\n"


if __name__ == "__main__":
    print(schema_markdown(), end="")
