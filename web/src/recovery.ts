// The parts of repairs, in the order in which they happen. Pure.
import type { Incident, RecoveryReport } from "./api";
import * as format from "./format";

type Recovery = NonNullable<Incident["recovery"]>;
type Part = keyof Recovery extends infer Key ? (Key extends `${infer Name}_seconds` ? Name : never) : never;

export const PARTS: readonly { part: Part; label: string }[] = [
  { part: "detect", label: "Detect" },
  { part: "decide", label: "Decide" },
  { part: "approve", label: "Approve" },
  { part: "save", label: "Save" },
  { part: "stop", label: "Stop" },
  { part: "place", label: "Wait for nodes" },
  { part: "launch", label: "Launch" },
  { part: "start", label: "Start" },
  { part: "resume", label: "First step" },
  { part: "total", label: "Total" },
];

/** The known parts of one repair as (label, time). */
export function times(recovery: Recovery): [string, string][] {
  return PARTS.flatMap(({ part, label }) => {
    const seconds = recovery[`${part}_seconds`];
    return seconds == null ? [] : [[label, format.seconds(seconds)] as [string, string]];
  });
}

export interface RecoveryLine {
  label: string;
  count: number;
  p50: string;
  p90: string;
  p99: string;
}

/** The distributions over all weeks, one table for each kind and launcher. */
export function tables(report: RecoveryReport): { title: string; lines: RecoveryLine[] }[] {
  return report.groups
    .filter((group) => group.week === null)
    .map((group) => ({
      title: `${format.words(group.kind)}, ${group.launcher}`,
      lines: PARTS.flatMap(({ part, label }) => {
        const found = group.parts[part];
        if (found === undefined) return [];
        return [
          {
            label,
            count: found.count,
            p50: format.seconds(found.p50_seconds),
            p90: format.seconds(found.p90_seconds),
            p99: format.seconds(found.p99_seconds),
          },
        ];
      }),
    }));
}
