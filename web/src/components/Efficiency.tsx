import type { Job } from "../api";
import * as format from "../format";

type Figures = Job["efficiency"];
type Row = readonly [name: string, value: string, note: string | null];

/** Throughput, utilization, communication and memory over the recent steps. */
export function Efficiency({ figures }: { figures: Figures }) {
  if (figures.steps === 0) return <p class="empty">Available after the first finished step.</p>;
  return (
    <table class="efficiency">
      <tbody>
        {rows(figures).map(([name, value, note]) => (
          <tr key={name}>
            <th scope="row">{name}</th>
            <td class="num">{value}</td>
            <td class="muted">{note}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function rows(figures: Figures): Row[] {
  const { scaling, memory } = figures;
  const found: Row[] = [
    ["Tokens/s", format.number(figures.tokens_per_second), figures.counted_from],
    ["Samples/s", format.number(figures.samples_per_second), null],
    ["MFU", format.percent(figures.mfu_ratio), figures.mfu_unknown ?? "model FLOPs over the peak of all ranks"],
    ["Communication, exposed", format.percent(figures.exposed_communication_ratio), "of step time"],
    ["Communication, overlapped", format.percent(figures.overlapped_communication_ratio), "of step time"],
  ];
  if (scaling !== null) {
    const base = `throughput per rank against ${format.plural(scaling.base_ranks, "rank")} (${scaling.base_job_id})`;
    found.push(["Scaling efficiency", format.percent(scaling.efficiency_ratio), base]);
  }
  if (memory === null) return found;
  const sizes: readonly Row[] = [
    ["Memory, peak", format.bytes(memory.peak_bytes), null],
    ["Memory, reserved", format.bytes(memory.reserved_bytes), fragmentation(memory.fragmentation_ratio)],
    ["Memory, allocated", format.bytes(memory.allocated_bytes), "at the end of a step"],
    ["After the forward", format.bytes(memory.after_forward_bytes), null],
    ["After the backward", format.bytes(memory.after_backward_bytes), null],
    ["After the optimizer", format.bytes(memory.after_optimizer_bytes), null],
    ["Parameters", format.bytes(memory.parameters_bytes), `on rank ${memory.rank}, which uses most memory`],
    ["Gradients", format.bytes(memory.gradients_bytes), null],
    ["Optimizer state", format.bytes(memory.optimizer_bytes), null],
    ["Activations", format.bytes(memory.activations_bytes), "the rest of the peak"],
  ];
  return [...found, ...sizes.filter(([, value]) => value !== format.UNKNOWN)];
}

function fragmentation(ratio: number | null): string | null {
  return ratio === null ? null : `${format.percent(ratio)} fragmented`;
}
