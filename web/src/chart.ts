// The content of the time charts, computed from the store's state. Pure.
import type { Action, Incident, Job, Step } from "./api";
import { clock, day, milliseconds, words } from "./format";
import { appearanceOfIncident, type Tone } from "./tone";

/** A vertical line in the chart, or a band if it has `until`. Epoch seconds. */
export interface Mark {
  at: number;
  until: number | null;
  label: string;
  tone: Tone;
  dashed: boolean;
}

export interface Points {
  /** Ends of steps, epoch seconds, ascending. */
  times: number[];
  /** null breaks the line; undefined does not: a script may report a loss every 20 steps. */
  values: (number | null | undefined)[];
  /** Step of the point; null where the line is broken. */
  steps: (Step | null)[];
}

/** A gap of this many median intervals (and seconds) between two steps breaks the line. */
const BREAK_MEDIANS = 5;
const BREAK_SECONDS = 2;

export function points(steps: readonly Step[], value: (step: Step) => number | null): Points {
  const result: Points = { times: [], values: [], steps: [] };
  const typical = median(steps.map((step) => step.duration_seconds)) ?? 0;
  const pause = Math.max(BREAK_SECONDS, BREAK_MEDIANS * typical);
  let before: { step: Step; end: number } | null = null;
  for (const step of steps) {
    const start = milliseconds(step.started_at) / 1000;
    // The chart needs ascending times, even after a restart or a clock change.
    const end = Math.max(start + step.duration_seconds, (before?.end ?? 0) + 1e-6);
    if (before !== null && (step.generation !== before.step.generation || start - before.end > pause)) {
      result.times.push(before.end + 5e-7);
      result.values.push(null);
      result.steps.push(null);
    }
    result.times.push(end);
    result.values.push(value(step) ?? undefined);
    result.steps.push(step);
    before = { step, end };
  }
  return result;
}

/** Incidents as lines, and the time between two generations as bands, including the current one. */
export function marks(steps: readonly Step[], incidents: readonly Incident[], actions: readonly Action[]): Mark[] {
  const result: Mark[] = [];
  const last = steps.at(-1);
  const restart = actions.find(({ kind, state }) => kind === "restart" && state === "running");
  if (last !== undefined && restart !== undefined) {
    const end = milliseconds(last.started_at) / 1000 + last.duration_seconds;
    const told = milliseconds(restart.phases.at(-1)?.started_at ?? restart.created_at) / 1000;
    // The checkpoint before the restart still belongs to the steps.
    if (told > end) result.push({ at: end, until: told, label: "restarting", tone: "info", dashed: true });
  }
  for (const [index, step] of steps.entries()) {
    const before = steps[index - 1];
    if (before === undefined || before.generation === step.generation) continue;
    result.push({
      at: milliseconds(before.started_at) / 1000 + before.duration_seconds,
      until: milliseconds(step.started_at) / 1000,
      label: `gen ${step.generation}`,
      tone: "info",
      dashed: true,
    });
  }
  for (const incident of incidents) {
    const open = incident.state === "resolved" ? { ...incident, state: "open" as const } : incident;
    result.push({
      at: milliseconds(incident.detected_at) / 1000,
      until: null,
      label: words(incident.kind),
      tone: appearanceOfIncident(open).tone,
      dashed: false,
    });
  }
  return result.sort((a, b) => a.at - b.at);
}

export function median(values: readonly number[]): number | null {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)] ?? null;
}

/** The values of the points that have one. */
export function known({ values }: Points): number[] {
  return values.filter((value) => value != null);
}

/** Upper end of an axis from 0, such that a single outlier does not flatten the rest. */
export function ceiling(values: readonly number[]): number {
  const most = values.reduce((a, b) => Math.max(a, b), 0);
  const typical = median(values);
  if (typical === null || most === 0) return 1;
  return Math.min(most, 6 * typical) * 1.12;
}

/** Labels of a time axis (epoch seconds): local times of day, and at midnight the day. */
export function timeLabels(splits: readonly number[]): string[] {
  const whole = splits.every((at) => at % 60 === 0);
  return splits.map((at) => {
    const text = clock(at * 1000, at * 1000);
    if (text === "00:00:00") return day(at * 1000);
    return whole ? text.slice(0, 5) : text;
  });
}

export interface StageBubble {
  stage: number;
  /** Number of steps of the means. */
  steps: number;
  measured: number;
  theory: number | null;
  /** Parts of the excess over theory, largest first; empty if the excess is small. */
  why: { name: string; ratio: number }[];
}

/** Labels of the parts of a stage's excess. */
const PARTS = {
  imbalance_ratio: "unequal stages",
  straggler_ratio: "slow ranks",
  variation_ratio: "uneven microbatches",
  transfer_ratio: "transfers",
  data_ratio: "data",
  launch_ratio: "late host",
  other_ratio: "unknown",
} as const;
/** Parts and an excess below this are not displayed. */
const SMALLEST_PART = 0.005;
const SMALLEST_EXCESS = 0.01;

/** Mean bubble of each stage over the last `count` steps of the current generation. */
export function bubbles(steps: readonly Step[], job: Job, count: number): StageBubble[] {
  const recent = steps.filter((step) => step.generation === job.generation).slice(-count);
  const stages = new Map<number, Step["bubbles"]>();
  for (const bubble of recent.flatMap((step) => step.bubbles))
    stages.set(bubble.stage, [...(stages.get(bubble.stage) ?? []), bubble]);
  return [...stages]
    .sort(([a], [b]) => a - b)
    .map(([stage, seen]) => {
      const measured = mean(seen.map(({ measured_ratio }) => measured_ratio));
      const theory = seen.at(-1)?.theory_ratio ?? null;
      const excess = theory === null ? 0 : measured - theory;
      return { stage, steps: seen.length, measured, theory, why: excess >= SMALLEST_EXCESS ? parts(seen) : [] };
    });
}

function parts(seen: Step["bubbles"]): StageBubble["why"] {
  return (Object.keys(PARTS) as (keyof typeof PARTS)[])
    .map((part) => ({ name: PARTS[part], ratio: mean(seen.map((bubble) => bubble[part] ?? 0)) }))
    .filter(({ ratio }) => Math.abs(ratio) >= SMALLEST_PART)
    .sort((a, b) => b.ratio - a.ratio);
}

function mean(values: readonly number[]): number {
  return values.reduce((a, b) => a + b, 0) / values.length;
}
