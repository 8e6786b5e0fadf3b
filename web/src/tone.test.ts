import { expect, test } from "vitest";

import type { Job } from "./api";
import { appearanceOfJob } from "./tone";

function tone(state: Job["state"], kind: Job["verdict"]["kind"]): string {
  return appearanceOfJob({ state, verdict: { kind, text: "", incident_id: null } }).tone;
}

test("a job whose ranks died or hang does not look healthy", () => {
  expect(tone("running", "healthy")).toBe("good");
  expect(tone("running", "straggler")).toBe("good");
  expect(tone("running", "failure")).toBe("bad");
  expect(tone("running", "hang")).toBe("bad");
  expect(tone("recovering", "failure")).toBe("info");
});
