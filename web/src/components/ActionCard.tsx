import { useEffect, useState } from "preact/hooks";

import { api, ApiError, type Action } from "../api";
import * as format from "../format";
import type { Connection } from "../live";
import { appearanceOfAction } from "../tone";
import { Badge } from "./Icon";

/** Called with the response to a decision, and the action on which the person decided. */
export type Decided = (action: Action, before: Action) => void;

interface Props {
  action: Action;
  /** The job's policy mode: `observe` and `dry-run` execute no proposal. */
  mode: string;
  connection: Connection;
  onDecided: Decided;
}

/** One action: its reason, its phases, and the buttons while a person can decide on it. */
export function ActionCard({ action, mode, connection, onDecided }: Props) {
  return (
    <div class="action" data-action={action.id}>
      <div class="action-head">
        <strong>{actionTitle(action)}</strong>
        <Badge appearance={appearanceOfAction(action.state)} text={action.state} />
        <Outcome action={action} />
      </div>
      <p>{action.reason}</p>
      {action.error !== null && <p class="problem">{action.error}</p>}
      {action.phases.length > 0 && <Phases action={action} />}
      {action.can_be_rejected &&
        (action.state === "proposed" && (mode === "observe" || mode === "dry-run") ? (
          <p class="muted">Not executed: the job's mode is {mode}.</p>
        ) : (
          // A request that is under way concerns an earlier state: its outcome is not shown.
          <Decision key={action.state} action={action} connection={connection} onDecided={onDecided} />
        ))}
    </div>
  );
}

function actionTitle({ kind, exclude_nodes }: Action): string {
  const name = kind.charAt(0).toUpperCase() + kind.slice(1);
  return exclude_nodes.length === 0 ? name : `${name} without ${exclude_nodes.join(", ")}`;
}

function Outcome({ action }: { action: Action }) {
  const parts = [
    action.resumed_step === null ? null : `resumed at step ${format.number(action.resumed_step)}`,
    action.lost_steps === null ? null : `${format.plural(action.lost_steps, "step")} lost`,
    action.decided_by == null ? null : `decided by ${action.decided_by}`,
    action.finished_at === null ? null : `took ${format.seconds(duration(action))}`,
  ].filter((part) => part !== null);
  return <span class="muted">{parts.join(" · ")}</span>;
}

function duration({ created_at, finished_at }: Action): number | null {
  if (finished_at === null) return null;
  return (format.milliseconds(finished_at) - format.milliseconds(created_at)) / 1000;
}

function Phases({ action }: { action: Action }) {
  const { phases, finished_at } = action;
  return (
    <ol class="phases">
      {phases.map((phase, index) => {
        const end = phases[index + 1]?.started_at ?? finished_at;
        const start = format.milliseconds(phase.started_at);
        const last = index === phases.length - 1;
        return (
          <li key={index} class={end === null ? "running" : ""}>
            <time title={phase.started_at}>{format.clock(phase.started_at)}</time>
            <span>{format.words(phase.name)}</span>
            <span class="num muted">
              {end === null ? "…" : last ? "" : format.seconds((format.milliseconds(end) - start) / 1000)}
            </span>
            <span class="muted">{phase.detail}</span>
          </li>
        );
      })}
    </ol>
  );
}

function Decision({ action, connection, onDecided }: Omit<Props, "mode">) {
  const [pending, setPending] = useState<"approve" | "reject" | null>(null);
  const [error, setError] = useState<ApiError | null>(null);

  // The server responds again: keep only errors that it returned.
  useEffect(() => {
    if (connection === "live") setError((told) => (told?.away === true ? null : told));
  }, [connection]);

  const decide = async (verb: "approve" | "reject"): Promise<void> => {
    setPending(verb);
    setError(null);
    try {
      onDecided(await api[verb](action.id), action);
    } catch (problem) {
      setError(problem instanceof ApiError ? problem : new ApiError(null, String(problem), ""));
    } finally {
      setPending(null);
    }
  };

  return (
    <div class="decision">
      {action.state === "proposed" && (
        <button
          type="button"
          class="primary"
          disabled={pending !== null}
          onClick={() => {
            void decide("approve");
          }}
        >
          {pending === "approve" ? "Approving…" : `Approve ${action.kind}`}
        </button>
      )}
      <button
        type="button"
        aria-label={`Reject ${action.kind}`}
        disabled={pending !== null}
        onClick={() => {
          void decide("reject");
        }}
      >
        {pending === "reject" ? "Rejecting…" : "Reject"}
      </button>
      {error !== null && (
        <span class="problem" role="alert">
          {error.message}
        </span>
      )}
    </div>
  );
}
