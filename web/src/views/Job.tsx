import { useEffect, useMemo, useState } from "preact/hooks";

import type { Action, Incident, Job, Node, WhatIf as Replay } from "../api";
import * as chart from "../chart";
import { ActionCard, type Decided } from "../components/ActionCard";
import { Ago } from "../components/Ago";
import { Bubbles } from "../components/Bubbles";
import { Efficiency } from "../components/Efficiency";
import { Failure } from "../components/Failure";
import { Heatmap } from "../components/Heatmap";
import { Badge, Icon } from "../components/Icon";
import { IncidentCard } from "../components/IncidentCard";
import { LedgerBar } from "../components/LedgerBar";
import { Nodes, troubled } from "../components/Nodes";
import { Panel } from "../components/Panel";
import { Recoveries } from "../components/Recoveries";
import { RestartJob } from "../components/RestartJob";
import { TimeChart } from "../components/TimeChart";
import { WhatIf } from "../components/WhatIf";
import * as format from "../format";
import { LiveJob, type Connection } from "../live";
import { nodesOf, placement } from "../placement";
import type { JobState } from "../store";
import { appearanceOfJob, appearanceOfVerdict, stateOfJob } from "../tone";

/** Bubbles are means over at most this many steps. */
const BUBBLE_STEPS = 20;
const LOADING = "Loading…";

/** One job, live. */
export function JobView({ id }: { id: string }) {
  const [live, setLive] = useState<LiveJob | null>(null);
  const [attempt, setAttempt] = useState(0);

  useEffect(() => {
    const job = new LiveJob(id);
    setLive(job);
    return () => {
      job.close();
    };
  }, [id, attempt]);

  const state = live?.state.value ?? null;
  const error = live?.error.value ?? null;
  if (live !== null && error !== null && (state === null || error.refused))
    return (
      <Failure
        error={error}
        onRetry={() => {
          // Immediately, because a form that stays until the response arrives would lose typed
          // text.
          setLive(null);
          setAttempt(attempt + 1);
        }}
      />
    );
  if (live === null || state === null) return <p class="loading">Loading job…</p>;
  return (
    <>
      <ConnectionBanner connection={live.connection.value} lastDataAt={live.lastDataAt.value} />
      <JobPage
        state={state}
        connection={live.connection.value}
        onDecided={(action, before) => {
          live.push({ type: "decided", data: action, before });
        }}
        onRequested={(action) => {
          live.push({ type: "requested", data: action });
          location.hash = "incidents";
        }}
      />
    </>
  );
}

function ConnectionBanner(props: { connection: Connection; lastDataAt: number | null }) {
  if (props.connection !== "lost") return null;
  return (
    <p class="banner tone-bad" role="alert">
      <Icon appearance={{ tone: "bad", shape: "octagon" }} />
      <span>
        <strong>Connection lost, reconnecting.</strong>{" "}
        {props.lastDataAt !== null && (
          <>
            What you see is from {format.clock(props.lastDataAt)} (<Ago time={props.lastDataAt} />).
          </>
        )}
      </span>
    </p>
  );
}

interface PageProps {
  state: JobState;
  connection: Connection;
  onDecided: Decided;
  onRequested: (action: Action) => void;
}

function JobPage({ state, connection, onDecided, onRequested }: PageProps) {
  const { job, steps, incidents, actions, grid, nodes } = state;
  const times = useMemo(() => chart.points(steps, (step) => step.duration_seconds), [steps]);
  const losses = useMemo(() => chart.points(steps, (step) => step.loss), [steps]);
  const marks = useMemo(() => chart.marks(steps, incidents, actions), [steps, incidents, actions]);
  const bubbles = useMemo(() => chart.bubbles(steps, job, BUBBLE_STEPS), [steps, job]);
  const placed = useMemo(() => placement(state.ranks), [state.ranks]);
  const own = nodesOf(job.id, nodes, placed);

  useEffect(() => {
    document.title = `${job.verdict.text} ${job.name} · Paceline`;
  }, [job.verdict.text, job.name]);

  return (
    <article class="job" data-connection={connection} aria-busy={!state.complete}>
      <VerdictBanner job={job} incidents={incidents} connection={connection}>
        <RestartJob
          job={job}
          nodes={[...placed.keys()].sort()}
          isPossible={canRestart(job, actions)}
          onRequested={onRequested}
        />
      </VerdictBanner>
      <Stats job={job} ended={state.ranks.filter((rank) => rank.state === "exited").length} />
      <div class="columns">
        <div class="column">
          <Panel id="steps" title="Steps" note={format.plural(steps.length, "step")}>
            {/* While it loads it is as tall as the charts, so that no button below moves. */}
            {steps.length === 0 ? (
              <p class={state.complete ? "empty" : "empty tall"}>
                {state.complete ? noSteps(job) : LOADING}
              </p>
            ) : (
              <>
                <TimeChart
                  title="Step time"
                  points={times}
                  marks={marks}
                  format={format.seconds}
                  color="--series-1"
                  height={190}
                  fromZero
                  labels
                />
                {chart.known(losses).length > 0 ? (
                  <TimeChart
                    title="Loss"
                    points={losses}
                    marks={marks}
                    format={format.loss}
                    axis={format.number}
                    color="--series-2"
                    height={130}
                    fromZero={false}
                    labels={false}
                  />
                ) : (
                  <p class="empty">
                    No loss was reported. A script reports it with <code>paceline.report(loss=loss)</code>.
                  </p>
                )}
              </>
            )}
          </Panel>
          <Incidents state={state} connection={connection} onDecided={onDecided} />
        </div>
        <div class="column">
          <Panel id="ranks" title="Slowdown by rank" note={grid === null ? undefined : window(grid)}>
            {grid === null || grid.cells.length === 0 ? (
              <p class="empty">{grid === null ? LOADING : "Available once the ranks are placed."}</p>
            ) : (
              <Heatmap grid={grid} ranks={state.ranks} />
            )}
          </Panel>
          <Panel id="what-if" title="What-if: possible speedups" note={replayed(state.whatIf)}>
            {state.whatIf === null ? <p class="empty">{LOADING}</p> : <WhatIf replay={state.whatIf} />}
          </Panel>
          {job.topology.pp > 1 && (
            <Panel id="bubble" title="Pipeline bubble" note={averaged(bubbles)}>
              <Bubbles stages={bubbles} />
            </Panel>
          )}
          <Panel
            id="ledger"
            title="Where the time went"
            note={wallTime(job)}
          >
            <LedgerBar ledger={job.ledger} />
          </Panel>
          {job.restarts > 0 && (
            <Panel id="recoveries" title="Recovery times" note="last 28 days">
              <Recoveries jobId={job.id} restarts={job.restarts + job.open_incidents} />
            </Panel>
          )}
          <Panel id="efficiency" title="Efficiency" note={recent(job)}>
            <Efficiency figures={job.efficiency} />
          </Panel>
        </div>
      </div>
      <Panel id="nodes" title="Nodes" note={counted(own, job)}>
        {own.length === 0 && !state.complete ? <p class="empty">{LOADING}</p> : <Nodes job={job} nodes={own} placed={placed} />}
      </Panel>
    </article>
  );
}

function recent({ efficiency }: Job): string | undefined {
  return efficiency.steps === 0 ? undefined : `last ${format.plural(efficiency.steps, "step")}`;
}

function counted(nodes: readonly Node[], job: Job): string {
  const bad = nodes.filter((node) => troubled(node, job)).length;
  return format.plural(nodes.length, "node") + (bad === 0 ? "" : `, ${format.number(bad)} with problems`);
}

function averaged([stage]: readonly chart.StageBubble[]): string | undefined {
  return stage === undefined ? undefined : `mean of ${format.plural(stage.steps, "step")}`;
}

function replayed(whatIf: Replay | null): string | undefined {
  if (whatIf?.first_step == null || whatIf.last_step == null) return undefined;
  return `replay of ${format.steps(whatIf.first_step, whatIf.last_step)}`;
}

function window({ first_step, last_step }: { first_step: number | null; last_step: number | null }): string | undefined {
  if (first_step === null || last_step === null) return undefined;
  const steps = format.steps(first_step, last_step);
  return first_step === last_step ? steps : `median of ${steps}`;
}

const UNFINISHED: readonly Action["state"][] = ["proposed", "approved", "running"];

function canRestart(job: Job, actions: readonly Action[]): boolean {
  const isUnderWay = actions.some(({ state }) => state === "approved" || state === "running");
  const isObserved = job.watched && job.mode === "observe"; // an external job
  return (job.state === "starting" || job.state === "running") && !isUnderWay && !isObserved;
}

function VerdictBanner(props: {
  job: Job;
  incidents: readonly Incident[];
  connection: Connection;
  children: preact.ComponentChildren;
}) {
  const { job, incidents, connection, children } = props;
  const incident = incidents.find(({ id }) => id === job.verdict.incident_id);
  const appearance = appearanceOfVerdict(job.verdict, job, incident);
  return (
    <header class={`verdict tone-${appearance.tone}`}>
      <Icon appearance={appearance} size={30} />
      <div>
        <h1>{job.verdict.text}</h1>
        <p>
          {job.name} <span class="mono">{job.id}</span>
          <span class={`connection tone-${connection === "live" ? "good" : "muted"}`}>
            <i /> {connection === "live" ? "live" : connection === "lost" ? "disconnected" : "connecting"}
          </span>
        </p>
        {job.unrecorded_communication !== null && !job.verdict.text.includes(job.unrecorded_communication) && (
          <p>{job.unrecorded_communication}</p>
        )}
      </div>
      {job.pending_actions > 0 && (
        <a class="button primary" href="#incidents">
          Review {format.plural(job.pending_actions, "action")}
        </a>
      )}
      {children}
    </header>
  );
}

function Stats({ job, ended }: { job: Job; ended: number }) {
  const shrunk = format.topology(job.topology) !== format.topology(job.requested_topology);
  return (
    <dl class="stats">
      <Stat name="State" note={ended === 0 ? undefined : `${format.plural(ended, "rank")} exited`}>
        <Badge appearance={appearanceOfJob(job)} text={stateOfJob(job)} />
      </Stat>
      <Stat name="Goodput" note={`${format.plural(job.ledger.lost_steps, "step")} lost`}>
        {format.percent(job.ledger.goodput_ratio)}
      </Stat>
      <Stat name="Step time" note="median of the last steps">{format.seconds(job.step_seconds)}</Stat>
      <Stat name="Step">{format.number(job.step)}</Stat>
      <Stat
        name="Loss"
        note={job.evaluation_loss === null ? undefined : `evaluation ${format.loss(job.evaluation_loss)}`}
      >
        {format.loss(job.loss)}
      </Stat>
      <Stat name="Generation" note={format.plural(job.restarts, "restart")}>
        {job.generation}
      </Stat>
      <Stat name="Topology" note={shrunk ? `requested ${format.topology(job.requested_topology)}` : undefined}>
        {format.topology(job.topology)}
      </Stat>
      {job.checkpoint_step !== null && (
        <Stat name="Checkpoint" note={checkpointNote(job)} title={job.checkpoint_advice?.text}>
          step {format.number(job.checkpoint_step)}
        </Stat>
      )}
      <Stat name="Mode" note={modeNote(job)}>
        {job.mode}
      </Stat>
    </dl>
  );
}

function modeNote({ watched, policy_version }: Job): string | undefined {
  const version = policy_version == null ? null : `policy version ${policy_version}`;
  const parts = [watched ? "external job" : null, version].filter((part) => part !== null);
  return parts.length === 0 ? undefined : parts.join(", ");
}

function wallTime({ ledger }: Job): string {
  const ettr = ledger.ettr_ratio == null ? "" : `, ETTR ${format.percent(ledger.ettr_ratio)}`;
  return `${format.seconds(ledger.wall_seconds)} wall time${ettr}`;
}

function noSteps(job: Job): string {
  return job.step === null
    ? "Available after the first finished step."
    : "The steps of this job are no longer stored; its incidents, actions and totals are.";
}

function checkpointNote({ checkpoint_interval_steps, checkpoint_path, checkpoint_advice }: Job): string | undefined {
  const every =
    checkpoint_interval_steps === null ? null : `every ${format.plural(checkpoint_interval_steps, "step")}`;
  const best = checkpoint_advice === null ? null : `best every ${format.number(checkpoint_advice.interval_steps)}`;
  const parts = [every, best, checkpoint_path].filter((part) => part !== null);
  return parts.length === 0 ? undefined : parts.join(", ");
}

function Stat(props: {
  name: string;
  note?: string | undefined;
  title?: string | undefined;
  children: preact.ComponentChildren;
}) {
  return (
    <div title={props.title}>
      <dt>{props.name}</dt>
      <dd>{props.children}</dd>
      {props.note !== undefined && <dd class="muted">{props.note}</dd>}
    </div>
  );
}

/** More resolved incidents than this are shown on request. */
const RESOLVED_SHOWN = 10;

function Incidents({ state, connection, onDecided }: Omit<PageProps, "onRequested">) {
  const { job, incidents, actions } = state;
  const [all, setAll] = useState(false);
  const open = incidents.filter((incident) => incident.state !== "resolved");
  const resolved = incidents.filter((incident) => incident.state === "resolved");
  const shown = [...open, ...(all ? resolved : resolved.slice(0, RESOLVED_SHOWN))];
  const known = new Set(incidents.map(({ id }) => id));
  const others = actions.filter(({ incident_id }) => incident_id === null || !known.has(incident_id));
  return (
    <Panel id="incidents" title="Incidents" note={`${open.length} open of ${incidents.length}`}>
      {incidents.length === 0 && <p class="empty">No incidents.</p>}
      {shown.map((incident) => (
        <IncidentCard
          key={incident.id}
          incident={incident}
          actions={actions.filter(({ incident_id }) => incident_id === incident.id)}
          mode={job.mode}
          connection={connection}
          onDecided={onDecided}
        />
      ))}
      {shown.length < incidents.length && (
        <button
          type="button"
          onClick={() => {
            setAll(true);
          }}
        >
          Show all {format.number(incidents.length)} incidents
        </button>
      )}
      {others.length > 0 && (
        <details class="others" open={others.some(({ state }) => UNFINISHED.includes(state))}>
          <summary>{format.plural(others.length, "other action")}</summary>
          {others.map((action) => (
            <ActionCard key={action.id} action={action} mode={job.mode} connection={connection} onDecided={onDecided} />
          ))}
        </details>
      )}
    </Panel>
  );
}
