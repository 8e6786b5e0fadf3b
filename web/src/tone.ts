// Severity as a color and, for color-blind users, a shape.
import type { Action, Incident, Job, Node, Verdict } from "./api";

export type Tone = "good" | "info" | "warn" | "bad" | "muted";
export type Shape = "check" | "clock" | "triangle" | "octagon" | "loop" | "square" | "question";

export interface Appearance {
  tone: Tone;
  shape: Shape;
}

const GOOD: Appearance = { tone: "good", shape: "check" };
const WAITING: Appearance = { tone: "info", shape: "clock" };
const REPAIRING: Appearance = { tone: "info", shape: "loop" };
const WARNING: Appearance = { tone: "warn", shape: "triangle" };
const BAD: Appearance = { tone: "bad", shape: "octagon" };
const OVER: Appearance = { tone: "muted", shape: "square" };
const UNKNOWN: Appearance = { tone: "muted", shape: "question" };

const JOB: Record<Job["state"], Appearance> = {
  pending: WAITING,
  starting: WAITING,
  running: GOOD,
  recovering: REPAIRING,
  finished: GOOD,
  failed: BAD,
  stopped: OVER,
};

/** Conditions that are displayed instead of the job's state. */
const STRIKING = ["hung", "dead", "unknown"];

/** The word for a job: its condition if it does not train although it should, else its state. */
export function stateOfJob({ state, condition }: Pick<Job, "state" | "condition">): string {
  return (state === "running" || state === "starting") && STRIKING.includes(condition) ? condition : state;
}

/** A running job with dead or hung ranks appears as bad, and one without recent data as unknown. */
export function appearanceOfJob(job: Pick<Job, "state" | "condition">): Appearance {
  switch (stateOfJob(job)) {
    case "hung":
    case "dead":
      return BAD;
    case "unknown":
      return UNKNOWN;
    default:
      return JOB[job.state];
  }
}

/** From the verdict's kind; with an incident, from the job's state and the severity. */
export function appearanceOfVerdict(verdict: Verdict, job: Job, incident: Incident | undefined): Appearance {
  if (verdict.is_outdated) return UNKNOWN;
  if (job.state === "failed") return BAD;
  if (job.state === "finished") return GOOD;
  if (job.state === "stopped") return OVER;
  if (job.state === "recovering") return REPAIRING;
  if (incident !== undefined) return appearanceOfIncident(incident);
  switch (verdict.kind) {
    case "healthy":
      return GOOD;
    case "starting":
    case "standstill":
      return WAITING;
    case "recovering":
      return REPAIRING;
    case "straggler":
    case "bubble":
      return WARNING;
    case "hang":
    case "failure":
    case "failed":
      return BAD;
    default:
      return UNKNOWN;
  }
}

export function appearanceOfIncident(incident: Incident): Appearance {
  if (incident.state === "resolved") return GOOD;
  if (incident.state === "mitigating") return { ...REPAIRING, tone: severityTone(incident.severity) };
  if (incident.severity === "critical") return BAD;
  return incident.severity === "info" ? UNKNOWN : WARNING;
}

function severityTone(severity: string): Tone {
  return severity === "critical" ? "bad" : severity === "info" ? "info" : "warn";
}

const ACTION: Record<Action["state"], Appearance> = {
  proposed: { tone: "warn", shape: "question" },
  approved: WAITING,
  running: REPAIRING,
  done: GOOD,
  failed: BAD,
  rejected: OVER,
  superseded: OVER,
};

export function appearanceOfAction(state: Action["state"]): Appearance {
  return ACTION[state];
}

const NODE: Record<Node["state"], Appearance> = { ready: GOOD, degraded: WARNING, quarantined: WARNING, lost: BAD };

export function appearanceOfNode(state: Node["state"] | "silent"): Appearance {
  return state === "silent" ? OVER : NODE[state];
}

/** The word for a node of a job: an agent that outlived the job and then ended is not lost. */
export function stateOfNode(node: Node, job: Pick<Job, "finished_at">): Node["state"] | "silent" {
  const isOver = job.finished_at !== null && Date.parse(node.last_seen_at) >= Date.parse(job.finished_at);
  return node.state === "lost" && isOver ? "silent" : node.state;
}
