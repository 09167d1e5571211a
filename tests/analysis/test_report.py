"""The report: one file that needs nothing else, safe with any text in it, honest about what it shows."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest

from accelopt_ray.analysis import load
from accelopt_ray.analysis.report import report_html, write_report
from accelopt_ray.analysis.report.packing import LEFT_OUT, pack_trees
from accelopt_ray.analysis.report.tree import search_tree
from accelopt_ray.outcome import UserError
from accelopt_ray.trajectory import TrajectoryWriter
from experiments.generated_run import generate_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def html(run_folder: Path) -> str:
    return report_html(load(run_folder))


def unpacked(html: str) -> list[dict[str, object]]:
    (packed,) = re.findall(r'id="packed">([^<]*)<', html)
    trees = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert isinstance(trees, list)
    return trees


def test_it_needs_nothing_from_anywhere(html: str):
    assert "default-src 'none'" in html
    links = re.findall(r'(?:src|href|action)="([^"]*)"', html)
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "@import" not in html
    assert "url(http" not in html


def test_it_has_every_section_and_the_simulated_label(html: str):
    for section in ("summary", "descent", "tree", "figures", "failures", "costs", "reproduce"):
        assert f'id="{section}"' in html
    assert "are <b>simulated</b>" in html
    assert "uncalibrated" not in html
    assert html.count('class="simulated"') > 3


def test_it_tells_failures_with_their_texts_and_how_to_reproduce(html: str):
    assert "partition dimension 256 exceeds 128" in html
    assert "accelopt-ray optimize --config config.yaml" in html
    assert "beam_width: 6" in html


def test_the_tree_holds_every_candidate_with_plan_diff_and_profile(html: str, run_folder: Path):
    (tree,) = unpacked(html)
    nodes = tree["nodes"]
    assert isinstance(nodes, list)
    evaluations = load(run_folder).evaluations
    assert {node["id"] for node in nodes} == set(evaluations["candidate_id"])
    best = next(node for node in nodes if node["best"])
    assert best["plan"] and best["counters"] and best["diff"].startswith("--- ")
    assert best["path"] and best["selected"]


def test_texts_of_models_cannot_become_markup(tmp_path: Path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    generate_run(tmp_path, evaluations=6)
    TrajectoryWriter(tmp_path / "trajectory", "silu-generated").write(
        "evaluations",
        [
            {
                "task": "silu",
                "iteration": 1,
                "evaluation_id": "evil",
                "candidate_id": "evil",
                "parent_candidate_id": "silu.i0.c0",
                "call_id": "x",
                "outcome": "compile_error",
                "error_text": evil,
                "simulated": True,
            }
        ],
    )
    html = report_html(load(tmp_path))
    assert "onerror=alert" in html
    assert "<img src=x" not in html
    assert html.count("</script>") == 2


def test_too_much_text_is_left_out_visibly_and_never_on_the_way_to_the_best(run_folder: Path):
    tree = search_tree(load(run_folder), "silu-generated", "silu")
    whole, shortened = pack_trees([tree])
    assert not shortened
    small, shortened = pack_trees([tree], budget_bytes=len(whole) // 2)
    assert shortened
    assert len(small) < len(whole)
    (packed,) = json.loads(zlib.decompress(base64.b64decode(small)))
    assert any(node["diff"] == LEFT_OUT for node in packed["nodes"])
    assert all(node["diff"] != LEFT_OUT for node in packed["nodes"] if node["path"] or node["selected"])


def test_an_unfinished_run_says_so_and_an_empty_one_is_refused(tmp_path: Path):
    generate_run(tmp_path / "a", evaluations=6, finished=False)
    assert "stopped early or killed" in report_html(load(tmp_path / "a"))
    TrajectoryWriter(tmp_path / "b" / "trajectory", "fresh").write("runs", [{"seed": 1}])
    with pytest.raises(UserError, match="run fresh has no evaluation: there is nothing to report yet"):
        report_html(load(tmp_path / "b"))


def test_latencies_of_devices_without_measurements_are_called_uncalibrated(tmp_path: Path):
    writer = TrajectoryWriter(tmp_path / "trajectory", "r")
    writer.write("runs", [{"seed": 1, "config_json": "{}"}])
    row = {"task": "t", "iteration": 0, "evaluation_id": "e", "candidate_id": "c", "outcome": "correct"}
    writer.write("evaluations", [{**row, "latency_ms": 1.0, "device": "sim-trn2", "simulated": True}])
    html = report_html(load(tmp_path))
    assert ">simulated, uncalibrated<" in html
    assert "For sim-trn2 the model is <b>uncalibrated</b>" in html
    assert unpacked(html)[0]["nodes"][0]["kind"] == "simulated, uncalibrated"  # type: ignore[index]


def test_a_run_whose_baseline_failed_is_reported(tmp_path: Path):
    writer = TrajectoryWriter(tmp_path / "trajectory", "r")
    writer.write("runs", [{"seed": 1, "config_json": "{}"}])
    failed = {"task": "t", "iteration": 0, "evaluation_id": "e", "candidate_id": "c", "outcome": "compile_error"}
    writer.write("evaluations", [{**failed, "error_text": "no such API", "simulated": True}])
    html = report_html(load(tmp_path))
    assert "no correct kernel" in html
    assert "no such API" in html


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed here")
def test_a_browser_opens_it_without_errors_and_the_tree_works(run_folder: Path, tmp_path: Path):
    page = write_report(load(run_folder), tmp_path / "report.html")
    # A click as a user's: on the node of the baseline; what the panel then shows is put where the test can read it.
    script = """<script>
      window.addEventListener("error", (event) => document.body.dataset.failed = event.message);
      const waiting = setInterval(() => {
        if (document.body.dataset.ready !== "yes") return;
        clearInterval(waiting);
        document.body.dataset.best = document.querySelector("#detail h3").textContent;
        const node = document.querySelector('.node[data-id="silu.i0.c0"]');
        node.dispatchEvent(new MouseEvent("click", { bubbles: true }));
        document.body.dataset.clicked = document.querySelector("#detail h3").textContent;
        document.body.dataset.nodes = document.querySelectorAll(".node").length;
      }, 20);
    </script></body>"""
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", script), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [str(CHROMIUM), *options, *quiet, profile, "--virtual-time-budget=10000", "--window-size=1300,1800"]
    shot = tmp_path / "shot.png"
    dumped = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    body = re.search(r"<body[^>]*>", dumped)
    assert body is not None
    attributes = dict(re.findall(r'data-(\w+)="([^"]*)"', body[0]))
    assert "failed" not in attributes
    assert attributes["ready"] == "yes"
    assert attributes["clicked"] == "silu.i0.c0"
    assert attributes["best"] != "silu.i0.c0"
    assert int(attributes["nodes"]) == 91
    subprocess.run([*command, f"--screenshot={shot}", page.as_uri()], capture_output=True, timeout=120, check=True)
    assert _colours(shot) > 100, "the screenshot is blank"


def _colours(path: Path) -> int:
    from matplotlib.image import imread

    return len({tuple(pixel) for pixel in imread(path)[::4, ::4, :3].reshape(-1, 3).round(2).tolist()})


def test_the_configuration_it_shows_is_one_that_a_run_takes(tmp_path: Path):
    import html as markup

    from accelopt_ray.config import load_config

    writer = TrajectoryWriter(tmp_path / "trajectory", "r")
    before = load_config(None, {"task": "silu", "seed": 7, "output": str(tmp_path), "search": {"beam_width": 5}})
    writer.write("runs", [{"seed": 7, "config_json": before.to_json()}])
    writer.write("evaluations", [{"task": "silu", "iteration": 0, "evaluation_id": "e", "candidate_id": "c"}])
    shown = re.search(r"<summary>config.yaml</summary><pre>(.*?)</pre>", report_html(load(tmp_path)), re.DOTALL)
    assert shown is not None
    (tmp_path / "config.yaml").write_text(markup.unescape(shown[1]))
    assert load_config(tmp_path / "config.yaml", {}) == before
