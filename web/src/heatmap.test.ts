import { describe, expect, it } from "vitest";

import type { Grid, GridCell, Rank } from "./api";
import * as heatmap from "./heatmap";

const TOPOLOGIES: heatmap.Axes[] = [
  { dp: 2, pp: 2, tp: 2 },
  { dp: 1, pp: 1, tp: 1 },
  { dp: 80, pp: 16, tp: 8 },
  { dp: 512, pp: 1, tp: 8 },
  { dp: 3, pp: 4, tp: 1 },
];

function places({ dp, pp, tp }: heatmap.Axes): heatmap.Place[] {
  const all: heatmap.Place[] = [];
  for (let dp_rank = 0; dp_rank < dp; dp_rank++)
    for (let pp_rank = 0; pp_rank < pp; pp_rank++)
      for (let tp_rank = 0; tp_rank < tp; tp_rank++) all.push({ dp_rank, pp_rank, tp_rank });
  return all;
}

describe.each(TOPOLOGIES)("dp $dp, pp $pp, tp $tp", (topology) => {
  const shape = heatmap.geometry(topology, 480, 360);

  it("finds each place under the middle of its own box, within the canvas", () => {
    for (const place of places(topology)) {
      const { x, y, width, height } = heatmap.box(shape, place);
      expect(heatmap.placeAt(shape, x + width / 2, y + height / 2)).toEqual(place);
      expect(x + width).toBeLessThanOrEqual(shape.width + 1e-6);
      expect(y + height).toBeLessThanOrEqual(shape.height + 1e-6);
    }
  });

  it("has nothing outside", () => {
    for (const [x, y] of [[-1, 1], [1, -1], [shape.width + 1, 1], [1, shape.height + 1]] as const)
      expect(heatmap.placeAt(shape, x, y)).toBeNull();
  });
});

it("has nothing in the gap between stages", () => {
  const shape = heatmap.geometry({ dp: 2, pp: 2, tp: 2 }, 480, 360);
  const { x, width } = heatmap.box(shape, { dp_rank: 0, pp_rank: 0, tp_rank: 1 });
  expect(heatmap.placeAt(shape, x + width + shape.gap / 2, 5)).toBeNull();
});

it("is turned when replicas are many, so that it stays wider than high", () => {
  const shape = heatmap.geometry({ dp: 512, pp: 1, tp: 8 }, 480, 360);
  expect(shape.turned).toBe(true);
  expect(shape.width).toBeGreaterThan(shape.height);
});

it("shows a row of many replicas high enough to point at", () => {
  expect(heatmap.geometry({ dp: 1000, pp: 1, tp: 1 }, 480, 360).height).toBeGreaterThanOrEqual(14);
  expect(heatmap.geometry({ dp: 80, pp: 16, tp: 8 }, 480, 360).height).toBeLessThanOrEqual(360);
});

it("moves with the arrow keys across stages and stops at the edges", () => {
  const shape = heatmap.geometry({ dp: 2, pp: 2, tp: 2 }, 480, 360);
  const start = { dp_rank: 0, pp_rank: 0, tp_rank: 1 };
  expect(heatmap.neighbor(shape, start, 1, 0)).toEqual({ dp_rank: 0, pp_rank: 1, tp_rank: 0 });
  expect(heatmap.neighbor(shape, start, 0, 1)).toEqual({ dp_rank: 1, pp_rank: 0, tp_rank: 1 });
  expect(heatmap.neighbor(shape, start, 0, -1)).toEqual(start);
});

it("paints one pixel per rank at its place, the unknown in their own color", () => {
  const shape = heatmap.geometry({ dp: 2, pp: 2, tp: 2 }, 480, 360);
  const slow: GridCell = {
    rank: 2,
    dp_rank: 1,
    pp_rank: 0,
    tp_rank: 0,
    node: null,
    state: "attached",
    condition: "running",
    self_seconds: 1,
    slowdown: heatmap.HOTTEST,
  };
  const { data, columns, rows } = heatmap.pixels(shape, [slow], [[0, 0, 0], [250, 0, 0]], [9, 9, 9]);
  expect([columns, rows]).toEqual([4, 2]);
  expect([...data.slice(16, 20)]).toEqual([250, 0, 0, 255]);
  expect([...data.slice(0, 4)]).toEqual([9, 9, 9, 255]);
});

it("says why no slowdown is known", () => {
  const text = (last_step: number | null, self_seconds: number | null): string =>
    heatmap.unknownText({ last_step, cells: [{ self_seconds }] } as Grid);
  expect(text(null, null)).toContain("No finished step");
  expect(text(7, null)).toContain("known to train");
  expect(text(7, 0.5)).toContain("No rank has peers");
});

it("gives noise between ranks no color, and saturates", () => {
  expect([0.9, 1, 1.05].map(heatmap.heat)).toEqual([0, 0, 0]);
  expect(heatmap.heat(2)).toBeGreaterThan(0.5);
  expect([3, 50].map(heatmap.heat)).toEqual([1, 1]);
});

it("writes on every color so that it can be read", () => {
  expect(heatmap.contrast([0, 0, 0], [255, 255, 255])).toBeCloseTo(21);
  const parts = Array.from({ length: 18 }, (_, index) => index * 15);
  for (const red of parts)
    for (const green of parts)
      for (const blue of parts)
        expect(heatmap.contrast(heatmap.textOn([red, green, blue]), [red, green, blue])).toBeGreaterThan(4.5);
});

it("calls no rank running that has ended", () => {
  const state = (rank: Partial<Rank>): string => heatmap.stateOf({ state: "started" } as GridCell, rank as Rank);
  expect(state({ state: "exited", status: "running" })).toBe("exited");
  expect(state({ state: "attached", status: "checkpointing" })).toBe("checkpointing");
  expect(state({ state: "assigned", status: null })).toBe("assigned");
  expect(heatmap.stateOf({ state: "started" } as GridCell, undefined)).toBe("started");
});

it("is no larger than a canvas may be, for 10,000 replicas on a fine screen", () => {
  const large = heatmap.geometry({ dp: 10_000, pp: 1, tp: 1 }, 480, 360);
  expect(large.width * heatmap.resolution(large, 2)).toBeLessThanOrEqual(16_384);
  expect(heatmap.resolution(heatmap.geometry({ dp: 512, pp: 1, tp: 8 }, 480, 360), 2)).toBe(2);
});
