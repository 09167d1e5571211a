"""What a prediction says about itself: explanation, confidence, comparison of variants, trace file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cost_kernels import Kernel, at, elementwise, matmul, tile

from accelopt_ray.nki_sim.cost import faster, predict
from accelopt_ray.nki_sim.cost.trace import trace_events, write_trace
from accelopt_ray.nki_sim.program import Engine, Opcode, Role


class TestExplanation:
    def test_is_plain_data(self):
        json.dumps(predict(matmul(2, 2, 2)).explanation)

    def test_names_the_bottleneck(self):
        assert predict(elementwise(64, 1024, 1)).explanation["bottleneck"] == "dma"
        assert predict(elementwise(64, 1024, 8)).explanation["bottleneck"] == "scalar"
        assert predict(matmul(8, 16, 2)).explanation["bottleneck"] == "tensor"

    def test_critical_path_accounts_for_the_whole_time_with_source_lines(self):
        prediction = predict(elementwise(16, 1024, 2))
        explanation = prediction.explanation
        path = explanation["critical_path"]
        total = sum(entry["time_ms"] for entry in path)
        assert total + explanation["launch_ms"] == pytest.approx(prediction.latency_ms, rel=1e-6)
        assert {entry["instruction"] for entry in path} <= {"load", "activation", "store"}
        assert all(entry["line"] > 0 and entry["executions"] > 0 for entry in path)
        assert path == sorted(path, key=lambda entry: -entry["time_ms"])

    def test_traffic_by_tensor_adds_up_to_the_counters(self):
        prediction = predict(matmul(16, 16, 8))
        traffic = prediction.explanation["hbm_bytes"].values()
        read = sum(entry["read_bytes"] + entry["spill_reload_bytes"] for entry in traffic)
        written = sum(entry["write_bytes"] + entry["spill_save_bytes"] for entry in traffic)
        assert (read, written) == (prediction.counters["hbm_read_bytes"], prediction.counters["hbm_write_bytes"])

    def test_memory_use_stays_within_the_capacity(self):
        explanation = predict(matmul(16, 16, 8)).explanation
        assert (
            0 < explanation["sbuf"]["peak_bytes_per_partition"] <= explanation["sbuf"]["capacity_bytes_per_partition"]
        )
        assert (
            0 < explanation["psum"]["peak_bytes_per_partition"] <= explanation["psum"]["capacity_bytes_per_partition"]
        )
        times = [sample["time_ms"] for sample in explanation["sbuf"]["occupancy"]]
        assert times
        assert min(times) >= 0


class TestConfidence:
    def test_is_narrowest_for_full_fp32_tiles(self):
        full = predict(elementwise(8)).confidence
        assert predict(elementwise(8, dtype="bfloat16")).confidence > full
        assert predict(self._tiny()).confidence > full
        assert predict(self._gpsimd()).confidence > full

    @staticmethod
    def _tiny():
        kernel = Kernel()
        x, y = kernel.hbm((128, 2048)), kernel.hbm((128, 2048), Role.OUTPUT)
        data, result = kernel.sbuf((128, 2048)), kernel.sbuf((128, 2048))
        kernel.load(tile(data), tile(x))
        with kernel.loop(2048) as i:
            kernel.emit(
                Opcode.ACTIVATION, at(result, (0, 128), ({i: 1}, 1)), data=at(data, (0, 128), ({i: 1}, 1)), scale=1.0,
                attributes={"op": "exp"},
            )  # fmt: skip
        kernel.store(tile(y), tile(result))
        return kernel.program()

    @staticmethod
    def _gpsimd():
        kernel = Kernel()
        x, y = kernel.hbm((128, 2048)), kernel.hbm((128, 2048), Role.OUTPUT)
        data, result = kernel.sbuf((128, 2048)), kernel.sbuf((128, 2048))
        kernel.load(tile(data), tile(x))
        kernel.emit(
            Opcode.TENSOR_TENSOR, tile(result), Engine.GPSIMD, a=tile(data), b=tile(data), attributes={"op": "add"}
        )
        kernel.store(tile(y), tile(result))
        return kernel.program()

    def test_two_close_variants_are_not_told_apart(self):
        first = predict(elementwise(8))
        assert faster(first, replace(first, latency_ms=first.latency_ms * 1.02)) is None
        assert faster(first, replace(first, latency_ms=first.latency_ms * 1.2)) is True
        assert faster(replace(first, latency_ms=first.latency_ms * 1.2), first) is False
        unsure = replace(first, confidence=1.0)
        assert faster(unsure, replace(first, latency_ms=first.latency_ms * 1.2)) is None


class TestTrace:
    def test_has_one_event_per_step_on_its_engines_track(self, tmp_path):
        program = matmul(2, 2, 1)
        path = tmp_path / "trace.json"
        write_trace(program, path)
        document = json.loads(path.read_text())
        steps = [event for event in document["traceEvents"] if event["ph"] == "X"]
        assert len(steps) == document["otherData"]["steps"]
        assert {event["name"] for event in steps} == {"load", "transpose", "copy", "matmul", "store"}
        names = {
            event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"
        }
        assert {names[event["tid"]] for event in steps} == {"dma", "tensor", "scalar"}
        assert all(event["dur"] >= 0 and event["args"]["line"] > 0 for event in steps)
        end = max(event["ts"] + event["dur"] for event in steps)
        assert end <= document["otherData"]["latency_us"]
        assert document["otherData"]["simulated"] is True

    def test_is_cut_at_its_limit(self):
        document = trace_events(matmul(2, 2, 2), limit=5)
        assert sum(event["ph"] == "X" for event in document["traceEvents"]) == 5
        assert document["otherData"]["steps_shown"] == 5 < document["otherData"]["steps"]
