import { expect, test } from "vitest";

import type { Incident, Job, Node } from "./api";
import { appearanceOfJob, appearanceOfNode, appearanceOfVerdict, stateOfJob, stateOfNode } from "./tone";

function tone(state: Job["state"], condition: Job["condition"]): string {
  return appearanceOfJob({ state, condition }).tone;
}

test("a job whose ranks died or hang does not look healthy", () => {
  expect(tone("running", "training")).toBe("good");
  expect(tone("running", "dead")).toBe("bad");
  expect(tone("running", "hung")).toBe("bad");
  expect(tone("running", "unknown")).toBe("muted");
  expect(tone("recovering", "dead")).toBe("info");
  expect(tone("finished", "ended")).toBe("good");
});

test("the word for a job is its condition where that is worse than its state", () => {
  expect(stateOfJob({ state: "running", condition: "hung" })).toBe("hung");
  expect(stateOfJob({ state: "running", condition: "training" })).toBe("running");
  expect(stateOfJob({ state: "recovering", condition: "dead" })).toBe("recovering");
});

test("a verdict that the analysis has not confirmed for long is not green", () => {
  const verdict = { kind: "outdated", text: "", incident_id: null, is_outdated: true };
  const job = { state: "running", condition: "unknown" } as Job;
  expect(appearanceOfVerdict(verdict, job, undefined).tone).toBe("muted");
});

test("a problem that lasted to the end does not hide how the job ended", () => {
  const incident = { state: "resolved", severity: "critical" } as Incident;
  for (const [state, tone] of [["finished", "good"], ["stopped", "muted"], ["failed", "bad"]] as const) {
    const verdict = { kind: state, text: "", incident_id: "inc-1", is_outdated: false };
    expect(appearanceOfVerdict(verdict, { state } as Job, incident).tone).toBe(tone);
  }
});

test("the node of a job that is over is not lost if its agent has ended later", () => {
  const node = { state: "lost", last_seen_at: "2026-11-20T20:15:31.500000Z" } as Node;
  expect(stateOfNode(node, { finished_at: null })).toBe("lost");
  expect(stateOfNode(node, { finished_at: "2026-11-20T20:15:40Z" })).toBe("lost");
  expect(appearanceOfNode(stateOfNode(node, { finished_at: "2026-11-20T20:15:31Z" })).tone).toBe("muted");
  expect(stateOfNode({ ...node, state: "quarantined" }, { finished_at: "2026-11-20T20:15:31Z" })).toBe("quarantined");
});
