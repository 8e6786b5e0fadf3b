// How good or bad something is: a colour and, for those who cannot tell colours, a shape.
import type { Action, Incident, Job, Node, Verdict } from "./api";

export type Tone = "good" | "info" | "warn" | "bad" | "muted";
export type Shape = "check" | "clock" | "triangle" | "octagon" | "loop" | "square" | "question";

export interface Look {
  tone: Tone;
  shape: Shape;
}

const GOOD: Look = { tone: "good", shape: "check" };
const WAITING: Look = { tone: "info", shape: "clock" };
const REPAIRING: Look = { tone: "info", shape: "loop" };
const WARNING: Look = { tone: "warn", shape: "triangle" };
const BAD: Look = { tone: "bad", shape: "octagon" };
const OVER: Look = { tone: "muted", shape: "square" };
const UNKNOWN: Look = { tone: "muted", shape: "question" };

const JOB: Record<Job["state"], Look> = {
  pending: WAITING,
  starting: WAITING,
  running: GOOD,
  recovering: REPAIRING,
  finished: GOOD,
  failed: BAD,
  stopped: OVER,
};

/** Until somebody decides, a job whose ranks died or hang is still one that runs. */
export function lookOfJob({ state, verdict }: Pick<Job, "state" | "verdict">): Look {
  return state === "running" && ["failure", "hang"].includes(verdict.kind) ? BAD : JOB[state];
}

/** The verdict's own kind decides; of a finding, the job's state and the incident's severity. */
export function lookOfVerdict(verdict: Verdict, job: Job, incident: Incident | undefined): Look {
  if (job.state === "failed") return BAD;
  if (job.state === "recovering") return REPAIRING;
  if (incident !== undefined) return lookOfIncident(incident);
  switch (verdict.kind) {
    case "healthy":
    case "finished":
      return GOOD;
    case "starting":
      return WAITING;
    case "recovering":
      return REPAIRING;
    case "stopped":
      return OVER;
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

export function lookOfIncident(incident: Incident): Look {
  if (incident.state === "resolved") return GOOD;
  if (incident.state === "mitigating") return { ...REPAIRING, tone: severityTone(incident.severity) };
  if (incident.severity === "critical") return BAD;
  return incident.severity === "info" ? UNKNOWN : WARNING;
}

function severityTone(severity: string): Tone {
  return severity === "critical" ? "bad" : severity === "info" ? "info" : "warn";
}

const ACTION: Record<Action["state"], Look> = {
  proposed: { tone: "warn", shape: "question" },
  approved: WAITING,
  running: REPAIRING,
  done: GOOD,
  failed: BAD,
  rejected: OVER,
  superseded: OVER,
};

export function lookOfAction(state: Action["state"]): Look {
  return ACTION[state];
}

const NODE: Record<Node["state"], Look> = { ready: GOOD, degraded: WARNING, quarantined: WARNING, lost: BAD };

export function lookOfNode(state: Node["state"]): Look {
  return NODE[state];
}
