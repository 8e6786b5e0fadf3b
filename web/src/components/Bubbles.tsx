import { Fragment } from "preact";

import type { StageBubble } from "../chart";
import * as format from "../format";

/** Measured idle share of each stage and the schedule's minimum. */
export function Bubbles({ stages }: { stages: readonly StageBubble[] }) {
  if (stages.length === 0) return <p class="empty">Available after the first finished step of this generation.</p>;
  const scale = Math.max(0.01, ...stages.map(({ measured, theory }) => Math.max(measured, theory ?? 0)));
  return (
    <div class="scroll">
      <table class="bubbles">
        <thead>
          <tr>
            <th class="num">Stage</th>
            <th class="wide">
              <span class="sr">Bar</span>
            </th>
            <th class="num">Measured</th>
            <th class="num">Theory</th>
            <th class="num">Excess</th>
          </tr>
        </thead>
        <tbody>
          {stages.map(({ stage, measured, theory, why }) => (
            <Fragment key={stage}>
              <tr>
                <td class="num">{stage}</td>
                <td class="wide">
                  <span class="bar" aria-hidden>
                    <i style={{ width: `${(measured / scale) * 100}%` }} />
                    {theory !== null && <b style={{ left: `${(theory / scale) * 100}%` }} />}
                  </span>
                </td>
                <td class="num">{format.percent(measured)}</td>
                <td class="num">{format.percent(theory)}</td>
                <td class="num">{theory === null ? format.UNKNOWN : signed(measured - theory)}</td>
              </tr>
              {why.length > 0 && (
                <tr>
                  <td />
                  <td class="why muted" colSpan={4}>
                    {why.map(({ name, ratio }) => `${name} ${ratio < 0 ? signed(ratio) : format.percent(ratio)}`).join(", ")}
                  </td>
                </tr>
              )}
            </Fragment>
          ))}
        </tbody>
        <caption>Share of a step in which a stage is idle. The mark shows the minimum of the schedule.</caption>
      </table>
    </div>
  );
}

function signed(ratio: number): string {
  return `${ratio < 0 ? "−" : "+"}${format.percent(Math.abs(ratio))}`;
}
