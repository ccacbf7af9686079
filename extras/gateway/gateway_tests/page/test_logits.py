"""Few logits are computed exactly, and the choice is as if all had been."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gateway_tests.page.browser import open_page
from gateway_tests.page.device import run_on_device

PREPARE = """
    const random = (seed) => () => {  // mulberry32
        seed = (seed + 0x6d2b79f5) | 0;
        let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
        t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
        return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
    };
    const BLOCKS = "blocks";  // float32 numbers that are given in parts
    const KINDS = { float16: Uint16Array, bfloat16: Uint16Array, float32: Float32Array };
    function makeTable({ kind: wanted, rows, width, spread, seed }) {
        const kind = wanted === BLOCKS ? "float32" : wanted;
        const next = random(seed);
        const table = kernels.addTable(kind, rows, width);
        const bytes = kernels.getBytes(table);
        const numbers = new KINDS[kind](bytes.buffer, bytes.byteOffset, rows * width);
        for (let i = 0; i < numbers.length; i++) {
            const value = (next() + next() + next() - 1.5) * spread * (next() < 0.001 ? 30 : 1);
            if (kind === "float32") { numbers[i] = value; continue; }
            const bits = new Uint32Array(Float32Array.of(value).buffer)[0];
            if (kind === "bfloat16") { numbers[i] = bits >>> 16; continue; }
            const exponent = Math.max(0, ((bits >>> 23) & 255) - 112);  // tiny ones: subnormal
            numbers[i] = ((bits >>> 16) & 0x8000) | (exponent << 10) | ((bits >>> 13) & 1023);
        }
        for (let j = 0; j < width && rows > 7; j++) {  // equal rows, and a row of zeros
            numbers[5 * width + j] = numbers[2 * width + j];
            numbers[7 * width + j] = 0;
        }
        kernels.checkTable(table, "table");
        const hidden = Float32Array.from({ length: width }, () => (next() - 0.5) * 4);
        if (wanted !== BLOCKS) return { table, hidden };
        const copy = numbers.slice();  // the kernels' memory moves
        const read = (first, count) => copy.subarray(first * width, (first + count) * width);
        return { table: { rows, width, read }, hidden };
    }
"""
TABLES: list[dict[str, Any]] = [
    {"kind": "float16", "rows": 2_003, "width": 256, "spread": 0.05, "seed": 1},
    {"kind": "float16", "rows": 40, "width": 1, "spread": 1e-7, "seed": 2},
    {"kind": "bfloat16", "rows": 2_001, "width": 100, "spread": 1.0, "seed": 3},
    {"kind": "float32", "rows": 1_000, "width": 67, "spread": 1e-3, "seed": 4},
    {"kind": "blocks", "rows": 1_003, "width": 250, "spread": 0.05, "seed": 6},
    {"kind": "float32", "rows": 1, "width": 5_000, "spread": 1e15, "seed": 5},
]


BOUNDS = (
    PREPARE
    + """
    return given.map((shape) => {
        const { table, hidden } = makeTable(shape);
        let worst = 0, wrong = 0, loose = 0;
        for (const scale of [1, 1e-20, 0]) {
            const vector = hidden.map((x) => x * scale);
            const { values, bounds } = kernels.scan(vector, table);
            const exact = kernels.multiply(vector, table);
            for (let row = 0; row < table.rows; row++) {
                // independently of both kernels: in float64 from the decoded row
                let sum = 0, most = 0;
                kernels.readRow(table, row).forEach((w, j) => {
                    sum += w * vector[j];
                    most += Math.abs(w * vector[j]);
                });
                const rounding = Math.abs(sum) * 2 ** -24 + most * 1e-12 + 1e-45;
                if (Math.abs(exact[row] - sum) > rounding) wrong++;
                const error = Math.abs(values[row] - exact[row]);
                worst = Math.max(worst, error / bounds[row]);
                if (scale === 1 && bounds[row] > most) loose++;
            }
        }
        return { worst, wrong, loose };
    });
"""
)


def run_in_browser(program: str, given: Any) -> Any:
    """Do what `run_on_device` does in Chromium, which has relaxed SIMD."""
    with open_page("./kernels") as page:
        return page.evaluate(
            """async ([program, given]) => {
                const names = [];
                const kernels = await page.Kernels.load(async (name) => {
                    names.push(name);
                    return (await fetch(`/${name}`)).arrayBuffer();
                });
                if (names.join() !== "kernels-relaxed.wasm") throw new Error(`it loaded ${names}`);
                return new Function("page", "kernels", "given", program)(page, kernels, given);
            }""",
            [program, given],
        )


@pytest.mark.parametrize("run", [run_on_device, run_in_browser])
def test_every_bound_holds(run: Callable[[str, Any], Any]) -> None:
    for shape, found in zip(TABLES, run(BOUNDS, TABLES), strict=True):
        assert found["wrong"] == 0 and 0 < found["worst"] <= 1, (shape, found)
        assert found["loose"] < shape["rows"] // 2 + 2, "a bound is far from what it bounds"


def test_a_choice_is_that_among_exact_logits_and_computes_few() -> None:
    options = [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 0.7, "top_k": 40},
        {"temperature": 1, "top_p": 0.9},
        {"temperature": 3, "top_p": 0.95},
        {"temperature": 1, "min_p": 0.1},
        {"temperature": 1, "top_k": 100, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.2},
    ]
    program = (
        PREPARE
        + """
        return given.tables.map((shape) => {
            const { table, hidden } = makeTable(shape);
            const turn = (step) => hidden.map((x, j) => x * Math.cos(step * j));
            const steps = Array.from({ length: 4 }, (_, step) => turn(step));
            return given.options.map((options) => {
                let exactly = 0;
                const choose = (make) => {
                    const sampling = { ...page.GREEDY, ...options, seed: 11n };
                    const sampler = new page.Sampler(kernels, sampling, [0, 3]);
                    return steps.map((vector, position) => sampler.choose(make(vector), position));
                };
                const few = choose((vector) => {
                    const logits = page.computeLogits(kernels, vector, table);
                    const { exact } = logits;
                    return { ...logits, exact: (token) => (exactly++, exact(token)) };
                });
                const all = choose((vector) => page.makeKnown(kernels.multiply(vector, table)));
                return { few, all, share: exactly / (table.rows * steps.length) };
            });
        });
    """
    )
    tables = TABLES[:3]
    found = run_on_device(program, {"tables": tables, "options": options})
    for shape, results in zip(tables, found, strict=True):
        for chosen, result in zip(options, results, strict=True):
            assert result["few"] == result["all"], (shape, chosen)
    assert max(results[0]["share"] for results in (found[0], found[2])) < 0.05, "greedy"


def test_tables_that_are_no_numbers_are_refused() -> None:
    program = """
        return given.map(([kind, bits]) => {
            const table = kernels.addTable(kind, 1, 3);
            kernels.getBytes(table).set(bits);
            try { kernels.checkTable(table, "head"); } catch (error) { return error.message; }
            return "";
        });
    """
    tables: list[tuple[str, np.ndarray[Any, Any]]] = [
        ("float16", np.array([1, math.inf, math.nan], np.float16)),
        ("float32", np.array([-math.inf, 0, math.nan], np.float32)),
        ("float16", np.array([1, 65_504, 6e-8], np.float16)),
    ]
    given = [[kind, list(array.tobytes())] for kind, array in tables]
    found = run_on_device(program, given)
    assert "'head' hold 2 infinite" in found[0] and "2 infinite" in found[1] and found[2] == ""


def test_stored_numbers_are_read_as_numpy_reads_them() -> None:
    halves = np.arange(65_536, dtype=np.uint16)
    halves = halves[(halves & 0x7C00) != 0x7C00]
    program = """
        const table = kernels.addTable("float16", given.length, 1);
        const bytes = kernels.getBytes(table);
        new Uint16Array(bytes.buffer, bytes.byteOffset, given.length).set(given);
        const decoded = page.decode("float16", kernels.getBytes(table));
        return [Array.from(decoded), Array.from(kernels.multiply(Float32Array.of(1), table))];
    """
    wanted = halves.view(np.float16).astype(np.float32)
    for found in run_on_device(program, halves.tolist()):
        assert np.array_equal(np.array(found, np.float32), wanted)
