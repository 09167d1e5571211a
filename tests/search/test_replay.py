"""A run replayed from its own recorded replies is the same run."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from scripted_world import ScriptedTask
from stored_world import RUN_ID, StoredWorld, search_in

from accelopt_ray.agents.replay import ReplayClient, replay_client
from accelopt_ray.outcome import CallOutcome, UserError
from accelopt_ray.search.services import ModelCall, ModelReply
from accelopt_ray.search.settings import SearchSettings
from accelopt_ray.trajectory import read_table, trajectory_digest
from accelopt_ray.trajectory.writer import text_sha256

SETTINGS = SearchSettings(
    iterations=3, beam_width=2, plans_per_candidate=3, attempts_per_plan=2, fix_attempts=1, seed=5
)


@dataclass
class ReplayedWorld(StoredWorld):
    """A device as ever, and no model but the record."""

    client: ReplayClient | None = None

    def answer(self, call: ModelCall) -> ModelReply:
        assert self.client is not None
        return self.client.reply(call)


def test_a_replayed_run_has_the_digest_of_the_run_it_replays(tmp_path: Path):
    recorded = StoredWorld(folder=tmp_path / "recorded", failures=0.15)
    result = search_in(recorded, SETTINGS)
    client = replay_client(tmp_path / "recorded")
    # Replies arrive in another order; nothing may depend on it.
    replayed = ReplayedWorld(
        folder=tmp_path / "replayed", client=client, delays=random.Random(3), longest_delay=9, factors=()
    )
    again = search_in(replayed, SETTINGS)
    assert trajectory_digest(tmp_path / "replayed", RUN_ID) == trajectory_digest(tmp_path / "recorded", RUN_ID)
    assert again.cost_usd == pytest.approx(result.cost_usd)
    assert {call.role for call in replayed.calls} == {"planner", "executor", "summarizer", "fixer"}


def test_a_search_that_asks_anything_else_is_told_which_reply_is_missing(tmp_path: Path):
    search_in(StoredWorld(folder=tmp_path / "recorded"), SETTINGS)
    client = replay_client(tmp_path / "recorded")
    more = ReplayedWorld(folder=tmp_path / "replayed", client=client)
    with pytest.raises(
        UserError, match=r"has no reply for toy\.i1\.c0\.p3\.planner \(prompt sha256 \w{16}, sample 3\)"
    ):
        search_in(more, SETTINGS.replace(plans_per_candidate=4))


def rows(*entries: tuple[str, int, str, str]) -> list[dict[str, object]]:
    return [
        {
            "call_id": call_id,
            "asking": asking,
            "role": "planner",
            "outcome": "ok" if text else "lost",
            "model": "m",
            "endpoint": "",
            "reply_text": text,
            "reasoning_text": None,
            "finish_reason": "stop",
            "prompt_tokens": 1,
            "cached_tokens": None,
            "completion_tokens": 1,
            "reasoning_tokens": None,
            "usage_estimated": False,
            "cost_usd": 0.5,
            "price_known": True,
            "latency_s": 1.0,
            "retries": 0,
            "error_text": None,
            "system_prompt_sha256": text_sha256("system"),
            "user_prompt": prompt,
            "sample_index": 0,
        }
        for call_id, asking, prompt, text in entries
    ]


def test_what_counts_is_the_prompt_then_the_name_and_the_last_asking():
    client = ReplayClient(
        rows(("b", 0, "P", "of b"), ("a", 0, "P", "old"), ("a", 1, "P", "of a"), ("c", 0, "Q", "")), "the run"
    )
    call = ModelCall("a", "planner", "system", "P", 0, 0)
    assert client.reply(call).reply_text == "of a"
    assert client.reply(replace(call, call_id="b")).reply_text == "of b"
    other = client.reply(replace(call, call_id="z"))
    assert (other.call_id, other.reply_text, other.outcome, other.cost_usd) == ("z", "of a", CallOutcome.OK, 0.5)
    for missing in (replace(call, user_prompt="Q"), replace(call, sample_index=1), replace(call, system_prompt="s")):
        with pytest.raises(UserError, match="the run has no reply for a"):
            client.reply(missing)
    assert client.models == {"planner": ["m"]}


def test_a_folder_without_calls_cannot_be_replayed(tmp_path: Path):
    with pytest.raises(UserError):
        replay_client(tmp_path)
    StoredWorld(folder=tmp_path)._write("call_starts", [{"task": ScriptedTask().name, "call_id": "a"}])
    with pytest.raises(UserError, match="holds no model calls"):
        replay_client(tmp_path)
    assert len(read_table(tmp_path, "llm_calls")) == 0
