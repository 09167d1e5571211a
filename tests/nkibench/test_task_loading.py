"""What a task folder must contain, and how its defects are named: one line, with the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from task_folders import REFERENCE, TASK_YAML, write_task

from nkibench.task import TaskError, load_task


def message(error: pytest.ExceptionInfo[TaskError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_folder_outside_the_benchmark_loads_and_checks(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "doubled"))
    task.check()
    assert task.name == "doubled"
    assert task.location == str((tmp_path / "doubled").resolve())
    assert task.parameters == {"M": 128, "N": 64}
    assert (task.entry, task.in_average, task.tolerance) == ("kernel", False, 1e-5)
    assert load_task(task.location).input_specs() == (((128, 64), "float32"),)


def test_a_task_that_declares_only_what_it_must(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "bare", "title: Bare\nparameters: {M: 4, N: 2}\ntolerance: 0.001\n"))
    task.check()
    assert task.counts is None
    assert task.input_specs() == (((4, 2), "float32"),)
    assert task.at_reduced_shape() == task


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(TaskError) as error:
        load_task("silo")
    assert "did you mean 'silu'" in message(error)
    with pytest.raises(TaskError) as error:
        load_task("/no/such/folder")
    assert "known tasks: adamw" in message(error)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("title: Doubled\n", "", "field 'title' is missing"),
        ("title: Doubled", "title: 7", "'title' must be text"),
        (
            "tolerance: 1e-5",
            "tolerance: 1e-5\nstrict_tolerance: 2e-5",
            "'strict_tolerance' must be above 0 and at most 1e-05",
        ),
        ("tolerance: 1e-5", "tolerence: 1e-5", "did you mean 'tolerance'"),
        ("tolerance: 1e-5", "tolerance: 0", "above 0 and at most 0.1, not 0"),
        ("tolerance: 1e-5", "tolerance: -1e-5", "above 0"),
        ("tolerance: 1e-5", "tolerance: 0.5", "at most 0.1, not 0.5"),
        ("tolerance: 1e-5", "tolerance: .nan", "must be a number"),
        ("tolerance: 1e-5", "tolerance: tight", "must be a number, not 'tight'"),
        ("tolerance: 1e-5", "tolerance: true", "must be a number"),
        ("{M: 128, N: 64}", "{M: 128, N: 64.5}", "'parameters.N' must be a positive whole number, not '64.5'"),
        ("{M: 128, N: 64}", "{M: 128, N: 0}", "'parameters.N'"),
        ("{M: 128, N: 64}", "{M: 128, N: true}", "'parameters.N'"),
        ("{M: 128, N: 64}", "{M: 128, 3: 64}", "not a Python name"),
        ("{M: 128, N: 64}", "[M, N]", "'parameters' must be a mapping, not list"),
        ("reduced: {M: 8}", "reduced: {Q: 8}", "'reduced' names 'Q'"),
        ("title:", "entry: 2nd\ntitle:", "'entry' must be the name"),
        ("title:", "in_average: maybe\ntitle:", "'in_average' must be true or false"),
        ("vector_flops: M*N", "vector_flops: M*Q", "'roofline': unknown parameter 'Q'"),
        ("vector_flops: M*N", "vector_flops: -M", "negative"),
        ("vector_flops: M*N", "vector_flops: [1]", "must be an expression"),
        ("matmul_flops: 0, ", "", "field 'roofline.matmul_flops' is missing"),
        ("matmul_flops: 0", "matmul_flop: 0", "did you mean 'matmul_flops'"),
        ("{shape: [M, N]}", "{}", "needs either a 'shape'"),
        ("{shape: [M, N]}", "{shape: [M, N], value: 3}", "needs either a 'shape'"),
        ("{shape: [M, N]}", "{shape: M}", "must be a list of dimensions"),
        ("{shape: [M, N]}", "{shape: [M, N//3 - 21]}", "not a positive whole number"),
        ("{shape: [M, N]}", "{shape: [M, N], dtype: floaty}", "NumPy does not know"),
        ("{shape: [M, N]}", "{shape: [M, N], values: positive}", "'any' or 'nonnegative'"),
        ("{shape: [M, N]}", "{shape: [M, N], scale: 0.1}", "at least 1"),
        ("{shape: [M, N]}", "{shape: [M, N], unit: m}", "unknown field 'unit' in 'inputs.x'"),
        ("outputs:\n  y: [M, N]\n", "outputs: {}\n", "at least one output"),
        ("title: Doubled", "title: [", "is not valid YAML at line"),
    ],
)
def test_defects_of_the_task_file_are_named(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in TASK_YAML
    write_task(tmp_path / "task", TASK_YAML.replace(old, new, 1))
    with pytest.raises(TaskError) as error:
        load_task(tmp_path / "task")
    assert expected in message(error)
    assert message(error).startswith(str(tmp_path / "task" / "task.yaml"))


def test_a_task_file_that_is_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="must be a mapping of fields"):
        load_task(write_task(tmp_path / "task", "- title"))


@pytest.mark.parametrize("missing", ["task.yaml", "reference.py", "baseline.py"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = write_task(tmp_path / "task")
    (folder / missing).unlink()
    with pytest.raises(TaskError) as error:
        load_task(folder)
    assert message(error) == f"{folder / missing}: file is missing"


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("def kernel(x:\n", "line 1"),
        ("def other(x):\n    return x\n", "does not define the entry 'kernel' (found: other)"),
        ("", "found: no function"),
        ("kernel = 3\n", "does not define the entry"),
    ],
)
def test_defects_of_the_baseline_are_named(tmp_path: Path, baseline: str, expected: str) -> None:
    folder = write_task(tmp_path / "task", baseline=baseline)
    with pytest.raises(TaskError) as error:
        load_task(folder)
    assert expected in message(error)
    assert str(folder / "baseline.py") in message(error)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("def forward", "def backward", "function 'forward' is missing"),
        ("import numpy as np", "import nump as np", "does not import: ModuleNotFoundError"),
        ("import numpy as np", "import numpy as np\n)", "does not import: SyntaxError"),
        ("get_inputs(M, N)", "get_inputs(M)", "get_inputs takes (M)"),
    ],
)
def test_defects_of_the_reference_seen_on_loading(tmp_path: Path, old: str, new: str, expected: str) -> None:
    folder = write_task(tmp_path / "task", reference=REFERENCE.replace(old, new, 1))
    with pytest.raises(TaskError) as error:
        load_task(folder)
    assert expected in message(error)
    assert str(folder / "reference.py") in message(error)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return 2 * x", "raise ValueError('no\\nway')", "forward raised ValueError: no way"),
        ("return 2 * x", "return x / (x - x)", "NaN or infinity"),
        ("return 2 * x", "return x[1:]", "forward returns shape (7, 64), task.yaml declares (8, 64)"),
        ("return 2 * x", "return x, x", "forward returns 2 outputs, task.yaml declares 1"),
        ("return 2 * x", "return 2.0", "must return NumPy arrays, not float"),
        ("return 2 * x", "return x.astype(int)", "floating-point"),
        ("return 2 * x", "x *= 2\n    return x", "modifies its inputs"),
        ("return 2 * x", "return np.random.rand(*x.shape)", "something else when called again"),
        ("size=(M, N)", "size=(N, M)", "'inputs.x' declares float32[8, 64], get_inputs returns float32[64, 8]"),
        (".astype(np.float32)]", "]", "get_inputs returns float64[8, 64]"),
        (".astype(np.float32)]", ".astype(np.float32), 3]", "'inputs' declares 1, get_inputs returns 2"),
        (".astype(np.float32)]", ".astype(np.float32) / 0]", "not finite"),
        ("return [np.", "return [None] or [np.", "must return arrays and numbers, not NoneType"),
        ("return [np.", "return np.array([np.", "must return a non-empty list"),
        ("return inputs", "return inputs[7]", "transform_to_nki_inputs raised IndexError"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_defects_of_the_reference_seen_on_checking(tmp_path: Path, old: str, new: str, expected: str) -> None:
    reference = REFERENCE.replace(old, new, 1)
    if "np.array([np." in new:
        reference = reference.replace(".astype(np.float32)]", ".astype(np.float32)])")
    assert old in REFERENCE
    task = load_task(write_task(tmp_path / "task", reference=reference))
    with pytest.raises(TaskError) as error:
        task.check()
    assert expected in message(error)


def test_inputs_declared_nonnegative_must_be(tmp_path: Path) -> None:
    yaml = TASK_YAML.replace("{shape: [M, N]}", "{shape: [M, N], values: nonnegative}")
    with pytest.raises(TaskError, match="declared nonnegative"):
        load_task(write_task(tmp_path / "task", yaml)).check()


def test_an_edited_reference_is_read_again(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task")
    before = load_task(folder).at_reduced_shape()
    first = before.forward(before.inputs(1))[0]
    write_task(folder, reference=REFERENCE.replace("2 * x", "3 * x").replace("import numpy", "# edited\nimport numpy"))
    after = load_task(folder).at_reduced_shape()
    assert (after.forward(after.inputs(1))[0] == first * 1.5).all()
