import { useEffect, useState } from "preact/hooks";

import { api, type RecoveryReport } from "../api";
import { tables } from "../recovery";

/** How long the repairs of a job took; fetched again after each restart. */
export function Recoveries({ jobId, restarts }: { jobId: string; restarts: number }) {
  const [report, setReport] = useState<RecoveryReport | null>(null);

  useEffect(() => {
    let isCurrent = true;
    api
      .recoveries(jobId)
      .then((found) => {
        if (isCurrent) setReport(found);
      })
      .catch(() => {
        // What was displayed before stays.
      });
    return () => {
      isCurrent = false;
    };
  }, [jobId, restarts]);

  const found = report === null ? [] : tables(report);
  if (found.length === 0) return <p class="empty">Available after the first repair.</p>;
  return (
    <>
      {found.map(({ title, lines }) => (
        <table key={title} class="recoveries">
          <caption>{title}</caption>
          <thead>
            <tr>
              <th scope="col">Part</th>
              <th class="num">Count</th>
              <th class="num">p50</th>
              <th class="num">p90</th>
              <th class="num">p99</th>
            </tr>
          </thead>
          <tbody>
            {lines.map((line) => (
              <tr key={line.label}>
                <th scope="row">{line.label}</th>
                <td class="num">{line.count}</td>
                <td class="num">{line.p50}</td>
                <td class="num">{line.p90}</td>
                <td class="num">{line.p99}</td>
              </tr>
            ))}
          </tbody>
        </table>
      ))}
    </>
  );
}
