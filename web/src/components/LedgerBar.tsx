import type { Ledger } from "../api";
import * as format from "../format";
import { parts, type Part } from "../ledger";

/** Where the wall time went, as one bar with its legend. */
export function LedgerBar({ ledger }: { ledger: Ledger }) {
  const all = parts(ledger);
  return (
    <div class="ledger">
      <div class="ledger-bar" aria-hidden>
        {all.map((part) => (
          <i key={part.key} class={part.key} style={{ flexGrow: part.ratio }} title={title(part)} />
        ))}
      </div>
      <div class="ledger-groups">
        <Group name="Goodput" rows={all.filter((part) => part.useful)} />
        <Group name="Lost" rows={all.filter((part) => !part.useful)} />
      </div>
    </div>
  );
}

function title(part: Part): string {
  return `${part.label}: ${format.seconds(part.seconds)}, ${format.percent(part.ratio)} (${part.hint})`;
}

function Group({ name, rows }: { name: string; rows: Part[] }) {
  const sum = rows.reduce((total, part) => total + part.seconds, 0);
  const ratio = rows.reduce((total, part) => total + part.ratio, 0);
  return (
    <table class="ledger-table">
      <thead>
        <tr>
          <th scope="col">{name}</th>
          <th class="num">{format.seconds(sum)}</th>
          <th class="num">{format.percent(ratio)}</th>
        </tr>
      </thead>
      <tbody>
        {rows.map((part) => (
          <tr key={part.key} title={part.hint} class={part.seconds === 0 ? "zero" : ""}>
            <th scope="row">
              <i class={`swatch ${part.key}`} /> {part.label}
            </th>
            <td class="num">{format.seconds(part.seconds)}</td>
            <td class="num">{format.percent(part.ratio)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
