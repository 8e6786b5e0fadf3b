import { expect, it } from "vitest";

import { STEPS_KEPT, type Action, type Incident, type Job, type Node, type Step } from "./api";
import * as chart from "./chart";
import { parts } from "./ledger";
import { parse } from "./router";
import { apply, begin, decode } from "./store";

const JOB = { id: "job-1", generation: 1 } as Job;

function step(number: number, generation = 1, more: Partial<Step> = {}): Step {
  const started_at = new Date(1e12 + generation * 1e7 + number * 1000).toISOString();
  return { generation, step: number, started_at, duration_seconds: 0.5, bubbles: [], ...more } as unknown as Step;
}

const incident = (id: string, detected_at: string, state = "open"): Incident =>
  ({ id, detected_at, state }) as Incident;

it("appends steps, keeps a repeated step once, and does not mind their order", () => {
  let state = apply(begin(JOB, [], []), [{ type: "steps", data: [step(1), step(2)] }]);
  state = apply(state, [
    { type: "step", data: step(4) },
    { type: "step", data: step(2) },
    { type: "step", data: step(3) },
  ]);
  expect(state.steps.map((one) => one.step)).toEqual([1, 2, 3, 4]);
});

it("merges fetched steps with those that the stream sent first", () => {
  let state = apply(begin(JOB, [], []), [{ type: "step", data: step(3) }]);
  state = apply(state, [{ type: "steps", data: [step(1), step(2), step(3)] }, { type: "complete" }]);
  expect(state.steps.map((one) => one.step)).toEqual([1, 2, 3]);
  expect(state.complete).toBe(true);
});

it("shows a step done again in its new generation, after the old one", () => {
  const state = apply(begin(JOB, [], []), [
    { type: "steps", data: [step(1), step(2)] },
    { type: "step", data: step(2, 2) },
  ]);
  expect(state.steps.map((one) => [one.generation, one.step])).toEqual([[1, 1], [1, 2], [2, 2]]);
});

it("forgets the oldest steps", () => {
  const data = Array.from({ length: STEPS_KEPT + 10 }, (_, number) => step(number));
  const state = apply(begin(JOB, [], []), [{ type: "steps", data }]);
  expect(state.steps).toHaveLength(STEPS_KEPT);
  expect(state.steps[0]?.step).toBe(10);
});

it("replaces an incident in place and puts a new one first", () => {
  let state = begin(JOB, [incident("inc-1", "2026-01-01T00:00:00Z")], []);
  state = apply(state, [{ type: "incident", data: incident("inc-2", "2026-01-01T00:01:00Z") }]);
  state = apply(state, [{ type: "incident", data: incident("inc-1", "2026-01-01T00:00:00Z", "resolved") }]);
  expect(state.incidents.map((one) => [one.id, one.state])).toEqual([
    ["inc-2", "open"],
    ["inc-1", "resolved"],
  ]);
});

it("does not replace an action with the response to a decision that is older than an event", () => {
  const action = (state: string): Action => ({ id: "act-1", created_at: "2026-01-01T00:00:00Z", state }) as Action;
  const proposed = action("proposed");
  const states = (...events: Action[]): string[] => {
    const response = { type: "decided", data: action("approved"), before: proposed } as const;
    const changes = events.map((data) => ({ type: "action", data }) as const);
    return apply(begin(JOB, [], [proposed]), [...changes, response]).actions.map(({ state }) => state);
  };
  expect(states()).toEqual(["approved"]);
  expect(states(action("running"), action("done"))).toEqual(["done"]);
});

it("lists nodes as people count", () => {
  const node = (id: string): Node => ({ id }) as Node;
  let state = apply(begin(JOB, [], []), [{ type: "nodes", data: ["node-10", "node-2"].map(node) }]);
  state = apply(state, [{ type: "node", data: node("node-3") }]);
  expect(state.nodes.map((one) => one.id)).toEqual(["node-2", "node-3", "node-10"]);
});

it("is not changed by another job's news", () => {
  const state = begin(JOB, [], []);
  expect(apply(state, [{ type: "job", data: { id: "job-2" } as Job }])).toBe(state);
});

it("keeps large data while it is loaded again", () => {
  const before = apply(begin(JOB, [], []), [{ type: "steps", data: [step(1)] }, { type: "complete" }]);
  const action = { id: "act-1", created_at: "2026-01-01T00:00:00Z" } as Action;
  const state = begin(JOB, [], [action], before);
  expect([state.steps.length, state.actions.length, state.complete]).toEqual([1, 1, true]);
});

it("ignores events of a type it does not know", () => {
  expect(decode("weather", "{}")).toBeNull();
  expect(decode(undefined, "{}")).toBeNull();
  expect(decode("job", '{"id":"job-1"}')).toEqual({ type: "job", data: { id: "job-1" } });
});

it("breaks the chart's line between generations and marks the restart", () => {
  const steps = [step(1), step(2), step(2, 2), step(3, 2)];
  const points = chart.points(steps, (one) => one.duration_seconds);
  expect(points.values).toEqual([0.5, 0.5, null, 0.5, 0.5]);
  expect([...points.times].sort((a, b) => a - b)).toEqual(points.times);
  const [mark] = chart.marks(steps, [], []);
  expect([mark?.label, mark?.dashed]).toEqual(["gen 2", true]);
  expect(mark?.until).toBeGreaterThan(mark?.at ?? Infinity);
});

it("does not break the line at a step without a loss", () => {
  const { values } = chart.points([step(1), step(2), step(3, 2)], (one) => (one.step === 2 ? null : 4));
  expect(values).toEqual([4, undefined, null, 4]);
});

it("marks a restart while it lasts, from the last step on", () => {
  const last = step(2);
  const at = (seconds: number): string => new Date(Date.parse(last.started_at) + seconds * 1000).toISOString();
  const restart = { kind: "restart", state: "running", created_at: at(0.1) };
  const marks = (phases: string[]) =>
    chart.marks([step(1), last], [], [{ ...restart, phases: phases.map((started_at) => ({ started_at })) } as Action]);
  expect(marks([at(0.2)])).toEqual([]); // a checkpoint is being saved within the step
  const [mark] = marks([at(0.2), at(3)]);
  expect([mark?.label, mark?.at, mark?.until]).toEqual(["restarting", Date.parse(at(0.5)) / 1000, Date.parse(at(3)) / 1000]);
});

it("keeps the chart's time ascending when a clock goes back", () => {
  const { times } = chart.points([step(5), step(6, 1, { started_at: step(1).started_at })], () => 1);
  expect(times[1]).toBeGreaterThan(times[0] ?? Infinity);
});

it("does not let one outlier flatten the chart", () => {
  expect(chart.ceiling([0.5, 0.5, 0.5, 60])).toBeLessThan(4);
  expect(chart.ceiling([0.5, 0.5, 1.1])).toBeGreaterThan(1.1);
});

const bubble = (stage: number, measured_ratio: number) => ({ stage, measured_ratio, theory_ratio: 0.1 });

it("splits an excess over its causes, what shortens it included, and leaves a small one alone", () => {
  const excess = { straggler_ratio: 0.12, imbalance_ratio: -0.02, data_ratio: 0.001 };
  const steps = [
    step(1, 1, {
      bubbles: [
        { ...bubble(0, 0.2), ...excess },
        { ...bubble(1, 0.105), ...excess },
      ],
    }),
  ];
  const stages = chart.bubbles(steps, JOB, 20);
  expect(stages.map(({ why }) => why)).toEqual([
    [
      { name: "slow ranks", ratio: 0.12 },
      { name: "unequal stages", ratio: -0.02 },
    ],
    [],
  ]);
});

it("takes bubbles of the current generation only", () => {
  const steps = [
    step(1, 1, { bubbles: [bubble(0, 0.9)] }),
    step(2, 2, { bubbles: [bubble(1, 0.4), bubble(0, 0.2)] }),
    step(3, 2, { bubbles: [bubble(1, 0.6), bubble(0, 0.4)] }),
  ];
  const stages = chart.bubbles(steps, { ...JOB, generation: 2 }, 20);
  expect(stages.map(({ stage, theory }) => [stage, theory])).toEqual([[0, 0.1], [1, 0.1]]);
  expect(stages.map((stage) => stage.steps)).toEqual([2, 2]);
  expect(stages[0]?.measured).toBeCloseTo(0.3);
  expect(stages[1]?.measured).toBeCloseTo(0.5);
});

it("shows every part of the ledger, with shares of the wall time", () => {
  const seconds = { compute_seconds: 6, lost_seconds: 4, wall_seconds: 10 };
  const ledger = new Proxy(seconds, { get: (of, key) => (Reflect.get(of, key) as number | undefined) ?? 0 });
  const shown = parts(ledger as unknown as Job["ledger"]);
  expect(shown).toHaveLength(16);
  expect(shown.reduce((sum, part) => sum + part.ratio, 0)).toBeCloseTo(1);
});

it("knows its addresses", () => {
  expect(parse("/")).toEqual({ view: "jobs" });
  expect(parse("/jobs/job-1%2F2")).toEqual({ view: "job", id: "job-1/2" });
  expect(parse("/jobs/%")).toEqual({ view: "missing" });
  expect(parse("/elsewhere")).toEqual({ view: "missing" });
});

it("labels the time axis with the day at midnight", () => {
  const at = (hour: number, second = 0): number => new Date(2026, 10, 28, hour, 0, second).getTime() / 1000;
  expect(chart.timeLabels([at(-12), at(0), at(12)])).toEqual(["12:00", "28 Nov", "12:00"]);
  expect(chart.timeLabels([at(1), at(1, 30)])).toEqual(["01:00:00", "01:00:30"]);
});
