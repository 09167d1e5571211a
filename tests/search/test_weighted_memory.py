"""Our memory: lessons that help stay, twins become one, both kinds keep their place, and lessons travel."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from scripted_world import World
from stored_world import RUN_ID, StoredWorld, search_in
from test_search_loop import search, small

from accelopt_ray.outcome import UserError
from accelopt_ray.search.memory import ExperienceItem, ExperienceKind, LocalStore, RewritePair, update_weighted
from accelopt_ray.search.settings import MemoryRule
from accelopt_ray.search.transfer import bring_lessons, final_lessons, read_lessons, write_lessons
from accelopt_ray.search.usage import Use, added, mentions
from accelopt_ray.trajectory import read_table


def item(name: str, speedup: float, title: str, text: str = "Do it.", kind: str = "positive") -> ExperienceItem:
    pair = RewritePair(ExperienceKind(kind), "s", "slow", "f", "fast", speedup, "plan")
    return ExperienceItem(name, 1, pair, title, text, "call")


def names(items: list[ExperienceItem]) -> list[str]:
    return [each.item_id for each in items]


def test_a_lesson_whose_plans_succeed_outlives_a_greater_one_whose_plans_fail():
    helpful, grand = item("helpful", 1.2, "Hoist the load of gamma"), item("grand", 1.9, "Split the loop over rows")
    record = {"helpful": Use(8, 8), "grand": Use(0, 8)}
    # 0.9 ln 1.2 = 0.164 against 0.1 ln 1.9 = 0.064
    assert names(update_weighted([helpful, grand], [], 2, record)[0]) == ["helpful", "grand"]
    assert names(update_weighted([helpful, grand], [], 1, record)[0]) == ["helpful"]
    assert names(update_weighted([helpful, grand], [], 1, {})[0]) == ["grand"]


def test_twins_become_one_with_the_record_of_both():
    text = "Load each tile of the input once before the inner loop over columns and reuse it for both products there."
    one, other = item("one", 1.2, "Load once", text), item("other", 1.5, "Load once", text + " Always.")
    kept, record = update_weighted([one], [other], 5, {"one": Use(3, 4), "other": Use(1, 1)})
    assert names(kept) == ["other"]
    assert record == {"other": Use(4, 5)}
    warning = item("warning", 1.5, "Load once", text, kind="negative")
    assert len(update_weighted([one], [warning], 5, {})[0]) == 2


def test_negative_lessons_keep_a_quarter_and_fill_what_is_free():
    good = [item(f"p{n}", 1.5, f"Good idea number {n}") for n in range(9)]
    bad = [item(f"n{n}", 1.1, f"Bad idea number {n}", kind="negative") for n in range(9)]
    kinds = [each.pair.kind for each in update_weighted(good, bad, 8, {})[0]]
    assert (kinds.count(ExperienceKind.POSITIVE), kinds.count(ExperienceKind.NEGATIVE)) == (6, 2)
    assert len(update_weighted(good[:1], bad, 8, {})[0]) == 8
    assert len(update_weighted(good, bad[:1], 8, {})[0]) == 8


def test_a_summary_without_a_lesson_takes_no_place():
    assert update_weighted([item("empty", 1.9, "", "")], [], 4, {}) == ([], {})


def test_a_plan_uses_a_lesson_when_it_names_what_the_title_names():
    assert mentions("We hoist the gamma load out of the row loop", "Hoist the load of gamma")
    assert not mentions("Fuse exponent and product", "Hoist the load of gamma")
    assert not mentions("anything", "")
    assert added({"a": Use(1, 2)}, {"a": Use(0, 1), "b": Use(1, 1)}) == {"a": Use(1, 3), "b": Use(1, 1)}


def test_the_store_remembers_uses_between_iterations():
    store = LocalStore(MemoryRule.WEIGHTED, 1)
    helpful, grand = item("helpful", 1.2, "Hoist the load of gamma"), item("grand", 1.9, "Split the loop over rows")

    async def run() -> list[str]:
        await store.update([helpful], random.Random(0), {"helpful": Use(5, 5)})
        return names(await store.update([grand], random.Random(0), {"helpful": Use(5, 5), "grand": Use(0, 9)}))

    assert asyncio.run(run()) == ["helpful"]


def test_lessons_travel_to_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.fsync", lambda _: None)
    result = search_in(StoredWorld(folder=tmp_path), small())
    lessons = final_lessons(tmp_path)
    assert {lesson.origin for lesson in lessons} == {f"{RUN_ID}/{each.item_id}" for each in result.memory if each.shown}
    write_lessons(tmp_path, lessons)
    world = World()
    items = read_lessons(tmp_path)
    search(world, small(iterations=1), lessons=items)
    first = next(call for call in world.calls if call.role == "planner")
    assert all(lesson.title in first.system_prompt for lesson in lessons)
    rows = [row for row in world.rows["memory_items"].values() if row["iteration"] == 0]
    assert {row["origin"] for row in rows} == {lesson.origin for lesson in lessons}
    assert all(str(row["item_id"]).startswith("toy.i0.m") for row in rows)
    plan = next(iter(world.rows["plans"].values()))
    assert set(plan["memory_item_ids"]) == {row["item_id"] for row in rows}  # type: ignore[call-overload]


def test_lessons_are_brought_from_beside_the_run_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.fsync", lambda _: None)
    search_in(StoredWorld(folder=tmp_path / "teacher"), small())
    (tmp_path / "taught").mkdir()
    bring_lessons(tmp_path / "taught", Path("teacher"))
    brought = read_lessons(tmp_path / "taught")
    assert {item.origin for item in brought} == {lesson.origin for lesson in final_lessons(tmp_path / "teacher")}
    bring_lessons(tmp_path / "taught", Path("gone"))
    assert read_lessons(tmp_path / "taught") == brought, "a run that is taken up keeps the lessons it started with"
    (tmp_path / "alone").mkdir()
    with pytest.raises(UserError, match="holds no trajectory|has no lessons"):
        bring_lessons(tmp_path / "alone", Path("gone"))


def test_what_cannot_be_passed_on_is_said_in_one_line(tmp_path: Path):
    assert read_lessons(tmp_path) == []
    with pytest.raises(UserError, match="holds no trajectory"):
        final_lessons(tmp_path)
    search_in(StoredWorld(folder=tmp_path), small("beam-only", iterations=1))
    assert len(read_table(tmp_path, "memory_items")) == 0
    with pytest.raises(UserError, match="has no lessons to pass on"):
        final_lessons(tmp_path)
    (tmp_path / "lessons.json").write_text('[{"kind": "positive"}]')
    with pytest.raises(UserError, match="holds no lessons"):
        read_lessons(tmp_path)
