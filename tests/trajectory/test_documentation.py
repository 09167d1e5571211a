"""The documented schema is the schema."""

from __future__ import annotations

from pathlib import Path

from accelopt_ray.trajectory.documentation import digest_markdown, schema_markdown

PAGE = Path(__file__).parents[2] / "docs" / "trajectory.md"


def test_the_page_lists_every_table_and_column_as_it_is():
    assert PAGE.read_text(encoding="utf-8").endswith(schema_markdown())


def test_the_page_lists_what_the_digest_covers():
    assert digest_markdown() in PAGE.read_text(encoding="utf-8")
