"""Predicted beside measured: reading measurements, summarising, refitting."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from cost_kernels import elementwise, matmul

from accelopt_ray.nki_sim import calibration, fidelity, measurements
from accelopt_ray.nki_sim.cost import DEVICES, device_constants, predict
from accelopt_ray.nki_sim.cost.constants import load_device_profile, save_device_profile
from accelopt_ray.nki_sim.measurements import MeasuredKernel, Measurement
from accelopt_ray.outcome import UserError

TRN1 = DEVICES["trn1"]

KERNEL = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

@nki.jit
def double(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x[0:128, 0:512])
    nl.store(out[0:128, 0:512], value=nl.multiply(tile, 2.0))
    return out
"""


def measured(programs, device=TRN1, factor=1.0):
    kernels = []
    for name, (task, program) in programs.items():
        prediction = predict(program, device)
        kernels.append(
            MeasuredKernel(name, task, program, Measurement(prediction.latency_ms * factor, prediction.counters))
        )
    return kernels


@pytest.fixture(scope="module")
def programs():
    return {
        "small": ("stream", elementwise(24, 1024, 1)),
        "large": ("stream", elementwise(64, 1024, 1)),
        "product": ("product", matmul(16, 4, 4)),
        "wide product": ("product", matmul(8, 8, 8)),
    }


class TestPublished:
    def test_the_fourteen_profiles_are_in_the_package(self):
        published = measurements.published_measurements()
        assert len(published) == 14
        assert published["bmm"].latency_ms == 4.610889
        assert published["matmul"].counters["hbm_read_bytes"] == 9059762176
        assert "hardware_flops" not in published["silu"].counters

    def test_every_published_counter_has_a_prediction_of_the_same_name(self):
        predicted = set(predict(matmul()).counters)
        names = {name for entry in measurements.published_measurements().values() for name in entry.counters}
        assert names <= predicted


class TestSummary:
    def test_perfect_predictions(self, programs):
        table = fidelity.compare(measured(programs))
        assert table.median_error == table.worst_error == 0
        assert table.rank_correlation == 1
        assert table.within("hbm_read_bytes", 0.0) == (4, 4)

    def test_errors_are_relative_to_the_measurement(self, programs):
        table = fidelity.compare(measured(programs, factor=2.0))
        assert table.median_error == pytest.approx(0.5)
        assert all(entry.latency_error == pytest.approx(-0.5) for entry in table.comparisons)

    def test_json_and_text_carry_every_kernel(self, programs):
        table = fidelity.compare(measured(programs), note="our kernels differ in detail")
        document = json.loads(json.dumps(table.as_json()))
        first = document["kernels"][0]
        assert first["kernel"] == "small"
        assert first["predicted_latency_ms"] == first["measured_latency_ms"]
        assert set(first["counters"]["hbm_read_bytes"]) == {"predicted", "measured"}
        assert document["simulated"] is True
        text = table.as_text()
        assert all(name in text for name in programs)
        assert "our kernels differ in detail" in text

    def test_nothing_to_compare_is_a_users_mistake(self):
        with pytest.raises(UserError, match="no measured kernel"):
            fidelity.compare([])

    def test_rank_correlation(self):
        assert fidelity.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1
        assert fidelity.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1
        assert fidelity.spearman([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)
        assert fidelity.spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)


class TestMeasuredFile:
    @staticmethod
    def _write(tmp_path, text):
        (tmp_path / "double.py").write_text(KERNEL)
        path = tmp_path / "measured.csv"
        path.write_text(text)
        return path

    def test_reads_kernels_and_counters(self, tmp_path):
        path = self._write(
            tmp_path,
            "name,task,kernel,entry,inputs,latency_ms,hbm_read_bytes\n"
            'mine,doubling,double.py,double,"float32[128,512]",0.02,262144\n',
        )
        (kernel,) = measurements.measured_file(path)
        assert (kernel.name, kernel.task, kernel.measurement.latency_ms) == ("mine", "doubling", 0.02)
        assert fidelity.compare([kernel]).within("hbm_read_bytes", 0.0) == (1, 1)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("kernel,entry,inputs\n", "no rows"),
            ('kernel,entry,inputs\ndouble.py,double,"float32[128,512]"\n', "lack the column 'latency_ms'"),
            ('kernel,entry,inputs,latency_ms,speed\ndouble.py,double,"float32[1,1]",1,2\n', "unknown column 'speed'"),
            ('kernel,entry,inputs,latency_ms\nnone.py,double,"float32[1,1]",1\n', "line 2: cannot read the kernel"),
            ('kernel,entry,inputs,latency_ms\ndouble.py,double,"fast[",1\n', "line 2: 'fast\\[' is neither"),
            (
                'kernel,entry,inputs,latency_ms\ndouble.py,double,"float32[128,512]",-1\n',
                "positive number of milliseconds",
            ),
            (
                'kernel,entry,inputs,latency_ms\ndouble.py,double,"float32[128,512]",1us\n',
                "'1us' of latency_ms is not a number",
            ),
            (
                "kernel,entry,inputs,latency_ms,vector_engine_active_time_percent\n"
                'double.py,double,"float32[128,512]",1,71.6\n',
                "a fraction between 0 and 1",
            ),
        ],
    )
    def test_mistakes_are_named_in_one_line(self, tmp_path, text, message):
        with pytest.raises(UserError, match=message) as caught:
            measurements.measured_file(self._write(tmp_path, text))
        assert "\n" not in str(caught.value)

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(UserError, match="cannot read the measurements"):
            measurements.measured_file(tmp_path / "nowhere.csv")

    def test_inputs(self):
        assert measurements.parse_inputs("float32[4096, 1024]; 1e-5 ;3") == [((4096, 1024), "float32"), 1e-5, 3]


class TestRefitting:
    def test_calibration_finds_a_slower_memory(self, programs):
        slower = replace(TRN1, dma_bytes_per_us=0.9 * TRN1.dma_bytes_per_us)
        kernels = measured(programs, slower)
        fitted = calibration.calibrate(kernels, TRN1, "mine")
        assert fitted.dma_bytes_per_us == pytest.approx(slower.dma_bytes_per_us)
        assert fidelity.compare(kernels, fitted).worst_error < 0.02 < fidelity.compare(kernels, TRN1).worst_error
        assert fitted.name == "mine"
        assert "measured kernels" in fitted.sources["dma_bytes_per_us"]
        assert fitted.sources["tensor_ghz"] == TRN1.sources["tensor_ghz"]

    def test_calibration_of_a_perfect_model_changes_nothing(self, programs):
        fitted = calibration.calibrate(measured(programs), TRN1)
        assert replace(fitted, name="trn1", sources=TRN1.sources) == TRN1

    def test_held_out_errors_do_not_use_the_held_out_task(self, programs):
        kernels = measured(programs)
        slow_products = [
            replace(kernel, measurement=replace(kernel.measurement, latency_ms=1.3 * kernel.measurement.latency_ms))
            if kernel.task == "product"
            else kernel
            for kernel in kernels
        ]
        errors = calibration.leave_one_task_out(slow_products).errors
        assert set(errors) == set(programs)
        assert errors["product"] == pytest.approx(1 / 1.3 - 1, abs=0.03)

    def test_a_single_task_cannot_be_held_out(self, programs):
        with pytest.raises(UserError, match="two tasks"):
            calibration.leave_one_task_out(measured({"small": programs["small"]}))

    def test_ablation_names_every_rule(self, programs):
        table = calibration.ablate(measured(programs))
        assert table[0].rule == "full model"
        assert table[0].latency_error == pytest.approx(0, abs=1e-9)
        assert {entry.rule for entry in table[1:]} == set(calibration.ABLATIONS)
        without = {entry.rule: entry for entry in table}
        assert without["no deduplication or hoisting"].hbm_error > 0.1
        assert all(math.isfinite(entry.latency_error) for entry in table)


class TestDeviceProfiles:
    def test_a_profile_survives_its_file(self, tmp_path):
        path = tmp_path / "mine.json"
        mine = replace(TRN1, name="mine", dma_bytes_per_us=240e3)
        save_device_profile(mine, path)
        assert load_device_profile(path) == mine
        assert device_constants(str(path)) == mine

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "cannot read the device profile"),
            ("[]", "must hold a JSON object"),
            ('{"speed": 1}', "unknown field 'speed'"),
            ('{"dma_bytes_per_us": "fast"}', "'dma_bytes_per_us'"),
            ('{"dma_bytes_per_us": -1}', "not negative"),
        ],
    )
    def test_a_broken_profile_is_named(self, tmp_path, text, message):
        path = tmp_path / "broken.json"
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            load_device_profile(path)

    def test_an_unknown_device_is_named(self):
        with pytest.raises(UserError, match="unknown device 'trn9'"):
            device_constants("trn9")

    @pytest.mark.parametrize("name", sorted(DEVICES))
    def test_every_constant_names_its_source(self, name):
        device = DEVICES[name]
        constants = set(vars(device)) - {"name", "generation", "calibrated", "sources"}
        assert constants == set(device.sources)

    def test_only_trn1_is_calibrated_and_others_are_less_sure(self):
        program = elementwise(4)
        trn1, trn2, trn3 = (predict(program, name) for name in ("trn1", "trn2", "trn3"))
        assert trn1.explanation["calibrated"]
        assert not trn2.explanation["calibrated"]
        assert not trn3.explanation["calibrated"]
        assert trn1.confidence < min(trn2.confidence, trn3.confidence)
