import { expect, test } from "vitest";

import { tables, times } from "./recovery";

test("the parts of a repair are in the order in which they happen", () => {
  const found = times({ total_seconds: 5.5, detect_seconds: 1.5, stop_seconds: 0.5, save_seconds: null });
  expect(found.map(([label]) => label)).toEqual(["Detect", "Stop", "Total"]);
});

test("only the distributions over all weeks are shown", () => {
  const parts = { total: { count: 2, p50_seconds: 4, p90_seconds: 6, p99_seconds: 6 } };
  const group = { kind: "failure", launcher: "slurm", count: 2, parts };
  const report = {
    since: "2026-11-01T00:00:00Z",
    is_complete: true,
    groups: [
      { ...group, week: null },
      { ...group, week: "2026-11-02" },
    ],
  };
  const found = tables(report);
  expect(found).toHaveLength(1);
  expect(found[0]?.lines.map((line) => [line.label, line.count])).toEqual([["Total", 2]]);
});
