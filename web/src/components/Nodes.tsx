import { useState } from "preact/hooks";

import type { Gpu, Job, Node } from "../api";
import * as format from "../format";
import type { Placement } from "../placement";
import { appearanceOfNode, stateOfNode } from "../tone";
import { Ago } from "./Ago";
import { Badge } from "./Icon";

/** Beyond this many rows (GPUs) the rest is shown on request; nodes with problems come first. */
const ROWS_SHOWN = 48;
/** Throttle reasons that are not a problem. */
const HARMLESS = new Set(["gpu_idle", "applications_clocks", "sync_boost", "display_clocks"]);

/** The job's nodes and the spares: state, ranks and GPU readings. */
export function Nodes({ job, nodes, placed }: { job: Job; nodes: readonly Node[]; placed: Placement }) {
  const [all, setAll] = useState(false);
  if (nodes.length === 0)
    return (
      <p class="empty">
        No agent has reported. Start one on each node with <code>paceline agent</code>.
      </p>
    );
  const shown = all ? nodes : first(nodes, job);
  return (
    <>
      <div class="scroll">
        <table class="nodes">
          <thead>
            <tr>
              <th>Node</th>
              <th>State</th>
              <th>Ranks</th>
              <th class="num">GPU</th>
              <th class="num">SM clock</th>
              <th class="num">Temp.</th>
              <th class="num roomy">Power</th>
              <th class="num roomy">Utilization</th>
              <th>Throttling</th>
              <th>Last seen</th>
            </tr>
          </thead>
          {shown.map((node) => (
            <NodeRows key={node.id} node={node} state={stateOfNode(node, job)} ranks={placed.get(node.id) ?? node.ranks} />
          ))}
        </table>
      </div>
      {shown.length < nodes.length && (
        <button
          type="button"
          onClick={() => {
            setAll(true);
          }}
        >
          Show all {format.number(nodes.length)} nodes
        </button>
      )}
    </>
  );
}

/** All nodes if they fit; else the ones with problems first. */
function first(nodes: readonly Node[], job: Job): readonly Node[] {
  const rows = (node: Node): number => Math.max(1, node.gpus.length);
  if (nodes.reduce((sum, node) => sum + rows(node), 0) <= ROWS_SHOWN) return nodes;
  const worst = [...nodes].sort((a, b) => Number(troubled(b, job)) - Number(troubled(a, job)));
  let left = ROWS_SHOWN;
  return worst.filter((node, index) => (left -= rows(node)) >= 0 || index === 0);
}

export function troubled(node: Node, job: Job): boolean {
  const state = stateOfNode(node, job);
  return (state !== "ready" && state !== "silent") || node.gpus.some((gpu) => reasons(gpu).length > 0);
}

function free(node: Node): string {
  return node.state === "ready" || node.state === "degraded" ? "free" : "none";
}

function reasons(gpu: Gpu): string[] {
  return gpu.throttle_reasons.filter((reason) => !HARMLESS.has(reason));
}

function NodeRows(props: { node: Node; state: ReturnType<typeof stateOfNode>; ranks: readonly number[] }) {
  const { node, state, ranks } = props;
  const gpus: (Gpu | null)[] = node.gpus.length === 0 ? [null] : node.gpus;
  const span = gpus.length;
  return (
    <tbody data-node={node.id}>
      {gpus.map((gpu, index) => (
        <tr key={gpu?.index ?? "none"}>
          {index === 0 && (
            <>
              <th scope="rowgroup" rowSpan={span} title={node.hostname}>
                {node.id}
              </th>
              <td rowSpan={span}>
                <Badge appearance={appearanceOfNode(state)} text={state} />
                {node.reason !== null && <div class="muted reason">{node.reason}</div>}
              </td>
              <td rowSpan={span}>{node.job_id === null && ranks.length === 0 ? <span class="muted">{free(node)}</span> : format.ranges(ranks)}</td>
            </>
          )}
          <GpuCells gpu={gpu} />
          {index === 0 && (
            <td rowSpan={span} class="nowrap muted">
              <Ago time={node.last_seen_at} />
            </td>
          )}
        </tr>
      ))}
    </tbody>
  );
}

function GpuCells({ gpu }: { gpu: Gpu | null }) {
  if (gpu === null)
    return (
      <td colSpan={6} class="muted">
        no GPU telemetry
      </td>
    );
  const why = reasons(gpu);
  return (
    <>
      <td class="num" title={`${gpu.name} ${gpu.pci_bus_id} ${gpu.uuid}`}>
        {gpu.index}
      </td>
      <td class={`num ${why.length > 0 ? "tone-warn strong" : ""}`}>{format.hertz(gpu.sm_clock_hertz)}</td>
      <td class="num">{format.celsius(gpu.temperature_celsius)}</td>
      <td class="num roomy">{format.watts(gpu.power_watts)}</td>
      <td class="num roomy">{format.percent(gpu.utilization_ratio, 0)}</td>
      <td>
        {why.length === 0 ? (
          <span class="muted">{format.UNKNOWN}</span>
        ) : (
          why.map((reason) => (
            <span key={reason} class="chip tone-warn">
              {format.words(reason)}
            </span>
          ))
        )}
      </td>
    </>
  );
}
