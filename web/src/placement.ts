/** Placement of a job's ranks on nodes. */

import type { Node, Rank } from "./api";

export type Placement = ReadonlyMap<string, readonly number[]>;

/** Ranks by node, ascending. */
export function placement(ranks: readonly Rank[]): Placement {
  const found = new Map<string, number[]>();
  for (const { node, rank } of [...ranks].sort((a, b) => a.rank - b.rank)) {
    const there = found.get(node);
    if (there === undefined) found.set(node, [rank]);
    else there.push(rank);
  }
  return found;
}

/** Nodes that run or last ran the job's ranks, even if shared with another job, and free nodes. */
export function nodesOf(jobId: string, nodes: readonly Node[], placed: Placement): Node[] {
  return nodes.filter((node) => node.job_id === null || node.job_id === jobId || placed.has(node.id));
}
