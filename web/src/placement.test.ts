import { expect, it } from "vitest";

import type { Node, Rank } from "./api";
import { nodesOf, placement } from "./placement";

const RANKS = [
  { node: "b", rank: 2 },
  { node: "a", rank: 1 },
  { node: "b", rank: 0 },
] as Rank[];

it("groups ranks by their node", () => {
  expect([...placement(RANKS)]).toEqual([["b", [0, 2]], ["a", [1]]]);
});

it("counts a node to each job that has ranks there, and the free ones to all", () => {
  const nodes = [
    { id: "a", job_id: "other" },
    { id: "b", job_id: "job" },
    { id: "c", job_id: "other" },
    { id: "d", job_id: null },
  ] as Node[];
  expect(nodesOf("job", nodes, placement(RANKS)).map(({ id }) => id)).toEqual(["a", "b", "d"]);
});
