// State of a job's page, and how changes from the server update it. Pure: no clock, no network.
import { STEPS_KEPT, type Action, type Grid, type Incident, type Job, type Node, type Rank, type Step, type WhatIf } from "./api";

export interface JobState {
  job: Job;
  /** Ascending in time; at most STEPS_KEPT. A step repeated after a restart appears twice. */
  steps: readonly Step[];
  ranks: readonly Rank[];
  grid: Grid | null;
  whatIf: WhatIf | null;
  /** Newest first. */
  incidents: readonly Incident[];
  /** Newest first. */
  actions: readonly Action[];
  /** Nodes of all jobs, by id. */
  nodes: readonly Node[];
  /** False while the large lists (steps, ranks, nodes) are loading. */
  complete: boolean;
}

/** One change. The first six are the event types of `/api/v1/events`; the others are fetched. */
export type Change =
  | { type: "job"; data: Job }
  | { type: "step"; data: Step }
  | { type: "ranks"; data: Rank[] }
  | { type: "incident"; data: Incident }
  | { type: "action"; data: Action }
  | { type: "node"; data: Node }
  | { type: "grid"; data: Grid }
  | { type: "what-if"; data: WhatIf }
  | { type: "nodes"; data: Node[] }
  | { type: "steps"; data: Step[] }
  /** The response to a decision; `before`: the action on which the person decided. */
  | { type: "decided"; data: Action; before: Action }
  /** The response to a request. */
  | { type: "requested"; data: Action }
  | { type: "complete" };

const TYPES: ReadonlySet<string> = new Set(["job", "step", "ranks", "incident", "action", "node"]);

/** A message of the stream as a change; null for types that a newer server may have. */
export function decode(event: string | undefined, data: string): Change | null {
  if (event === undefined || !TYPES.has(event)) return null;
  return { type: event, data: JSON.parse(data) as unknown } as Change;
}

/**
 * The state that the verdict needs; the rest follows as changes. Until it arrives, a page that
 * was displayed `before` (its tab was hidden) shows its earlier content.
 */
export function begin(
  job: Job,
  incidents: readonly Incident[],
  actions: readonly Action[],
  before: JobState | null = null,
): JobState {
  return {
    job,
    incidents: [...incidents].sort(worstFirst),
    actions: [...actions].sort(newestFirst("created_at")),
    steps: before?.steps ?? [],
    ranks: before?.ranks ?? [],
    grid: before?.grid ?? null,
    whatIf: before?.whatIf ?? null,
    nodes: before?.nodes ?? [],
    complete: before?.complete ?? false,
  };
}

export function apply(state: JobState, changes: readonly Change[]): JobState {
  let next = state;
  const steps: Step[] = [];
  for (const change of changes) {
    switch (change.type) {
      case "step":
        steps.push(change.data);
        break;
      case "steps":
        steps.unshift(...change.data);
        break;
      case "complete":
        next = { ...next, complete: true };
        break;
      case "job":
        if (change.data.id === state.job.id) next = { ...next, job: change.data };
        break;
      case "ranks":
        next = { ...next, ranks: change.data };
        break;
      case "grid":
        next = { ...next, grid: change.data };
        break;
      case "what-if":
        next = { ...next, whatIf: change.data };
        break;
      case "incident":
        next = { ...next, incidents: put(next.incidents, change.data, worstFirst) };
        break;
      case "action":
        next = { ...next, actions: put(next.actions, change.data, newestFirst("created_at")) };
        break;
      case "decided":
        // An event that arrived first may be newer; if it is not, another one follows.
        if (next.actions.includes(change.before))
          next = { ...next, actions: put(next.actions, change.data, newestFirst("created_at")) };
        break;
      case "requested":
        // An event that arrived first may be newer.
        if (!next.actions.some(({ id }) => id === change.data.id))
          next = { ...next, actions: put(next.actions, change.data, newestFirst("created_at")) };
        break;
      case "nodes":
        next = { ...next, nodes: [...change.data].sort(byId) };
        break;
      case "node":
        next = { ...next, nodes: put(next.nodes, change.data, byId) };
        break;
    }
  }
  return steps.length === 0 ? next : { ...next, steps: appendSteps(next.steps, steps) };
}

/** `items` with `item` in place of the one with the same id. */
function put<T extends { id: string }>(
  items: readonly T[],
  item: T,
  order: (a: T, b: T) => number,
): readonly T[] {
  const index = items.findIndex((other) => other.id === item.id);
  if (index < 0) return [...items, item].sort(order);
  return items.with(index, item);
}

/** The order in which the API lists incidents. */
function worstFirst(a: Incident, b: Incident): number {
  return b.urgency - a.urgency || newestFirst<"detected_at">("detected_at")(a, b);
}

function newestFirst<K extends string>(key: K) {
  return (a: Record<K, string>, b: Record<K, string>): number =>
    Date.parse(b[key]) - Date.parse(a[key]);
}

const collator = new Intl.Collator("en", { numeric: true });

function byId(a: { id: string }, b: { id: string }): number {
  return collator.compare(a.id, b.id);
}

/** Steps in order of (generation, step); of duplicates the last one is kept. */
function appendSteps(steps: readonly Step[], more: readonly Step[]): readonly Step[] {
  const result = [...steps];
  let sorted = true;
  for (const step of more) {
    const last = result.at(-1);
    if (last !== undefined && compareSteps(last, step) >= 0) sorted = false;
    result.push(step);
  }
  if (sorted) return result.slice(-STEPS_KEPT);
  const byKey = new Map(result.map((step) => [`${step.generation}/${step.step}`, step]));
  return [...byKey.values()].sort(compareSteps).slice(-STEPS_KEPT);
}

function compareSteps(a: Step, b: Step): number {
  return a.generation - b.generation || a.step - b.step;
}
