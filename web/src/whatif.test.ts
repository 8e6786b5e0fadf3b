import { expect, it } from "vitest";

import { optypeLabel, worst } from "./whatif";

it("says operation types in words, and one of a newer server as it is", () => {
  expect(["backward-compute", "optimizer", "new-optype"].map(optypeLabel)).toEqual([
    "all backward passes",
    "optimizer and checkpoint",
    "new-optype",
  ]);
});

it("shows the worst few", () => {
  const values = Object.fromEntries(Array.from({ length: 100 }, (_, rank) => [String(rank), 1 + rank / 100]));
  expect(worst(values)).toHaveLength(8);
  expect(worst(values)[0]).toEqual(["99", 1.99]);
  expect(worst({})).toEqual([]);
});
