import { describe, expect, it } from "vitest";

import * as format from "./format";

/** Thin spaces as plain ones, for readable expectations. */
const plain = (text: string): string => text.replaceAll("\u202f", " ");

describe("seconds", () => {
  it.each([
    [null, "–"],
    [Number.NaN, "–"],
    [0, "0 s"],
    [0.00042, "0.42 ms"],
    [0.0234, "23.4 ms"],
    [0.4804, "480 ms"],
    [0.9996, "1.00 s"],
    [1.2345, "1.23 s"],
    [59.96, "1 min 00 s"],
    [245.2, "4 min 05 s"],
    [3599.7, "1 h 00 min"],
    [8000, "2 h 13 min"],
    [273600, "3 d 04 h"],
    [-1.5, "−1.50 s"],
  ])("says %s as %s", (value, text) => {
    expect(plain(format.seconds(value))).toBe(text);
  });
});

it("says ratios in percent, and unknown as a dash", () => {
  expect(format.percent(0.9844)).toBe("98.4%");
  expect(format.percent(null)).toBe("–");
});

it("says slowdowns with the digits that matter", () => {
  expect([1.02, 1.2, 2.54, 12.3].map(format.slowdown)).toEqual(["1.02×", "1.2×", "2.5×", "12×"]);
});

it("calls nothing certain or impossible", () => {
  expect([0.9997, 0.62, 0.001].map(format.likelihood)).toEqual([">99%", "62%", "<1%"]);
});

it("says a gain in hundredths", () => {
  expect([1.214, 0.5, null].map(format.speedup)).toEqual(["1.21×", "0.50×", "–"]);
});

it("says a metric's value in the unit of its name", () => {
  expect(plain(format.measured("DCGM_FI_DEV_SM_CLOCK", 1980))).toBe("1,980 MHz");
  expect(plain(format.measured("DCGM_FI_DEV_GPU_TEMP", 91))).toBe("91 °C");
  expect(format.measured("paceline_gpu_throttle_reason", 1)).toBe("on");
  expect(format.measured("DCGM_FI_DEV_GPU_UTIL", 97)).toBe("97.0%");
  expect(format.measured("paceline_rank_process_run_queue_wait_seconds_total", 0.561)).toBe("56.1%");
  expect(format.measured("cpu_share", 0.04)).toBe("4.0%");
  expect(plain(format.measured("node_memory_MemAvailable_bytes", 2 ** 31))).toBe("2 GiB");
  expect(format.measured(null, 0.0312)).toBe("0.0312");
});

it("says how long ago something was, also when the clocks disagree", () => {
  const now = Date.parse("2026-01-02T03:00:00Z");
  expect(plain(format.ago("2026-01-02T02:59:48Z", now))).toBe("12 s ago");
  expect(plain(format.ago("2026-01-02T02:00:00Z", now))).toBe("60 min ago");
  expect(format.ago("2026-01-02T03:00:09Z", now)).toBe("just now");
});

it("says sizes in binary units", () => {
  const sizes = [null, 0, 17552, 1.5 * 2 ** 30, 2 ** 50].map((size) => plain(format.bytes(size)));
  expect(sizes).toEqual(["–", "0 B", "17.1 KiB", "1.5 GiB", "1,024 TiB"]);
});

it("folds runs of ranks", () => {
  expect(format.ranges([5, 0, 1, 2])).toBe("0–2, 5");
  expect(format.ranges([2, 3])).toBe("2, 3");
  expect(format.ranges([])).toBe("none");
});

it("says one step as one", () => {
  expect(format.steps(30, 30)).toBe("step 30");
  expect(format.steps(996, 1003)).toBe("steps 996–1,003");
});
