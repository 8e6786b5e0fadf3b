import { useState } from "preact/hooks";

import type { Action, Cause, Evidence, Incident } from "../api";
import * as format from "../format";
import type { Connection } from "../live";
import { times } from "../recovery";
import { appearanceOfIncident } from "../tone";
import { ActionCard, type Decided } from "./ActionCard";
import { Ago } from "./Ago";
import { Badge, Icon } from "./Icon";

const SMALLEST_UNKNOWN = 0.01;

interface Props {
  incident: Incident;
  actions: readonly Action[];
  mode: string;
  connection: Connection;
  onDecided: Decided;
}

/** One incident: summary, causes, evidence for and against, cost, and actions. */
export function IncidentCard({ incident, actions, ...card }: Props) {
  const waiting = actions.some((action) => action.state === "proposed" || action.state === "running");
  const [chosen, setChosen] = useState<boolean | null>(null);
  // A resolved incident collapses, unless the user opened it.
  const open = chosen ?? (incident.state !== "resolved" || waiting);
  const appearance = appearanceOfIncident(incident);
  return (
    <details
      class={`incident tone-${appearance.tone}`}
      id={incident.id}
      open={open}
      onToggle={(event) => {
        if (event.currentTarget.open !== open) setChosen(event.currentTarget.open);
      }}
    >
      <summary>
        <Icon appearance={appearance} label={incident.state} />
        <span class="incident-text">
          <strong>{incident.summary}</strong>
          <span class="muted">
            {describe(incident)} · detected <Ago time={incident.detected_at} />
            {ending(incident, actions)}
          </span>
        </span>
        <Badge appearance={appearance} text={incident.state} />
      </summary>
      {open && (
        <div class="incident-body">
          <Facts incident={incident} />
          {incident.recovery != null && <RecoveryTimes recovery={incident.recovery} />}
          {incident.advice != null && (
            <p class="advice">
              <b>What to do:</b> {incident.advice}
            </p>
          )}
          {actions.map((action) => (
            <ActionCard key={action.id} action={action} {...card} />
          ))}
          {incident.causes.length > 0 && <Causes causes={incident.causes} />}
          <EvidenceList title="Evidence" empty="None recorded." items={incident.evidence} />
          {incident.symptoms.length > 0 && <Symptoms symptoms={incident.symptoms} />}
          {incident.counter_evidence.length > 0 && <Against items={incident.counter_evidence} />}
        </div>
      )}
    </details>
  );
}

/** The outcome, for the collapsed line: " · resolved after 24.0 s · restart done, 6 steps lost". */
function ending(incident: Incident, actions: readonly Action[]): string {
  if (incident.resolved_at === null) return "";
  const lasted = format.milliseconds(incident.resolved_at) - format.milliseconds(incident.detected_at);
  const repair = actions.find(({ state, lost_steps }) => state === "done" && lost_steps !== null);
  const how = repair === undefined ? "" : ` · ${repair.kind} done, ${format.plural(repair.lost_steps ?? 0, "step")} lost`;
  return ` · resolved after ${format.seconds(lasted / 1000)}${how}`;
}

function Facts({ incident }: { incident: Incident }) {
  const facts: [string, string][] = [
    ["Rank", incident.rank === null ? "" : String(incident.rank)],
    ["Ranks", incident.rank !== null || incident.ranks.length === 0 ? "" : format.ranges(incident.ranks)],
    ["Link", incident.link == null ? "" : `rank ${incident.link.join(" to ")}`],
    ["Node", incident.node ?? ""],
    ["Stage", incident.stage === null || incident.rank !== null ? "" : String(incident.stage)],
    ["Slowdown", incident.slowdown === null ? "" : format.slowdown(incident.slowdown)],
    ["Cost", incident.cost_ratio === null ? "" : `${format.percent(incident.cost_ratio, 0)} of step time`],
    ["Speedup if fixed", incident.speedup == null ? "" : `${incident.speedup.toFixed(2)}×`],
    ["Lasts", incident.persistence ?? ""],
    ["Side", incident.side ?? ""],
    ["Onset", incident.onset_step === null ? "" : `step ${format.number(incident.onset_step)}`],
    ["Detected", detected(incident)],
  ];
  return (
    <dl class="facts">
      {facts
        .filter(([, value]) => value !== "")
        .map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
    </dl>
  );
}

/** How long each part of the repair took. */
function RecoveryTimes({ recovery }: { recovery: NonNullable<Incident["recovery"]> }) {
  return (
    <dl class="facts recovery" aria-label="Recovery times">
      {times(recovery).map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

function detected(incident: Incident): string {
  const at = format.clock(incident.detected_at);
  return incident.detected_step === null ? at : `step ${format.number(incident.detected_step)}, ${at}`;
}

interface EvidenceProps {
  title: string;
  empty: string;
  items: readonly Evidence[];
}

function EvidenceList(props: EvidenceProps) {
  return (
    <div class="evidence">
      <h3>{props.title}</h3>
      {props.items.length === 0 ? (
        <p class="muted">{props.empty}</p>
      ) : (
        <ul>
          {props.items.map((item, index) => (
            <li key={index}>
              <span>{item.text}</span>
              {item.value != null && (
                <span class="values" title={item.metric ?? ""}>
                  <b>{format.measured(item.metric, item.value)}</b>
                  {item.expected != null && ` vs ${format.measured(item.metric, item.expected)}`}
                </span>
              )}
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

/** The kind and the cause, once if they are the same. */
function describe({ kind, cause }: Incident): string {
  const name = format.words(kind);
  return cause === name ? name : `${name} · ${cause}`;
}

/** Evidence against the incident or against other causes. */
function Against({ items }: { items: readonly Evidence[] }) {
  return (
    <details class="evidence muted">
      <summary>Evidence against this or other causes: {format.plural(items.length, "observation")}</summary>
      <ul>
        {items.map((item, index) => (
          <li key={index}>{item.text}</li>
        ))}
      </ul>
    </details>
  );
}

/** Likely causes with their likelihoods. */
function Causes({ causes }: { causes: readonly Cause[] }) {
  const unknown = 1 - causes.reduce((sum, { likelihood }) => sum + likelihood, 0);
  return (
    <div class="evidence">
      <h3>Likely causes</h3>
      <ul>
        {causes.map(({ name, likelihood }) => (
          <Likelihood key={name} name={name} ratio={likelihood} />
        ))}
        {unknown >= SMALLEST_UNKNOWN && <Likelihood name="unknown" ratio={unknown} />}
      </ul>
    </div>
  );
}

function Likelihood({ name, ratio }: { name: string; ratio: number }) {
  return (
    <li>
      <span>{name}</span>
      <span class="values">
        <b>{format.likelihood(ratio)}</b>
      </span>
    </li>
  );
}

function Symptoms({ symptoms }: { symptoms: readonly string[] }) {
  return (
    <div class="evidence">
      <h3>Related symptoms</h3>
      <ul>
        {symptoms.map((symptom, index) => (
          <li key={index}>{symptom}</li>
        ))}
      </ul>
    </div>
  );
}
