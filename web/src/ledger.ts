// The goodput ledger as the parts of one bar. Pure.
import type { Ledger } from "./api";

type Seconds = Exclude<Extract<keyof Ledger, `${string}_seconds`>, "wall_seconds">;

export interface Part {
  key: Seconds;
  label: string;
  /** Explanation of the term. */
  hint: string;
  useful: boolean;
  seconds: number;
  ratio: number;
}

const PARTS: readonly Omit<Part, "seconds" | "ratio">[] = [
  { key: "compute_seconds", label: "compute", hint: "forward and backward, at the pace of the peers", useful: true },
  { key: "optimizer_seconds", label: "optimizer", hint: "optimizer step", useful: true },
  { key: "communication_seconds", label: "communication", hint: "exposed transfers", useful: true },
  { key: "bubble_seconds", label: "bubble", hint: "idle, as the pipeline schedule has it", useful: true },
  { key: "straggler_seconds", label: "stragglers", hint: "ranks reported as slow, and waits for them", useful: false },
  { key: "imbalance_seconds", label: "imbalance", hint: "other ranks that take longer than their peers, and waits for them", useful: false },
  { key: "slow_link_seconds", label: "slow links", hint: "transfers over slow links, and waits for them", useful: false },
  { key: "peer_wait_seconds", label: "waits for peers", hint: "for the last rank of a collective or transfer", useful: false },
  { key: "bubble_excess_seconds", label: "excess bubble", hint: "idle beyond the pipeline schedule", useful: false },
  { key: "data_wait_seconds", label: "data wait", hint: "waiting for the next batch", useful: false },
  { key: "evaluation_seconds", label: "evaluation", hint: "without waits for peers", useful: false },
  { key: "checkpoint_seconds", label: "checkpoint", hint: "saving", useful: false },
  { key: "lost_seconds", label: "lost steps", hint: "work lost in restarts", useful: false },
  { key: "restart_seconds", label: "restart", hint: "from the end of progress to the first new step", useful: false },
  { key: "startup_seconds", label: "startup", hint: "from creation to the first step", useful: false },
  { key: "idle_seconds", label: "idle", hint: "everything else", useful: false },
];

/** All parts in a fixed order, so that each keeps its color. */
export function parts(ledger: Ledger): Part[] {
  return PARTS.map((part) => ({
    ...part,
    seconds: ledger[part.key],
    ratio: ledger.wall_seconds > 0 ? ledger[part.key] / ledger.wall_seconds : 0,
  }));
}
