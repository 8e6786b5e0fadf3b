import { useRef, useState } from "preact/hooks";

import { api, ApiError, type Action, type Job } from "../api";
import * as format from "../format";

interface Props {
  job: Job;
  /** Nodes that run its ranks. */
  nodes: readonly string[];
  onRequested: (action: Action) => void;
}

/** A button that opens a form for a restart that no incident asks for. */
export function RestartJob({ job, nodes, onRequested }: Props) {
  const dialog = useRef<HTMLDialogElement>(null);
  return (
    <>
      <button type="button" onClick={() => dialog.current?.showModal()}>
        Restart…
      </button>
      <dialog ref={dialog} aria-labelledby="restart-title">
        <Form
          job={job}
          nodes={nodes}
          onCancel={() => dialog.current?.close()}
          onRequested={(action) => {
            dialog.current?.close();
            onRequested(action);
          }}
        />
      </dialog>
    </>
  );
}

function Form({ job, nodes, onCancel, onRequested }: Props & { onCancel: () => void }) {
  const [excluded, setExcluded] = useState<ReadonlySet<string>>(new Set());
  const [saves, setSaves] = useState(true);
  const [comment, setComment] = useState("");
  const [pending, setPending] = useState(false);
  const [error, setError] = useState<string | null>(null);

  const request = async (): Promise<void> => {
    setPending(true);
    setError(null);
    try {
      const chosen = nodes.filter((node) => excluded.has(node));
      const action = await api.restart(job.id, { exclude_nodes: chosen, checkpoint: saves, comment });
      setExcluded(new Set());
      setSaves(true);
      setComment("");
      onRequested(action);
    } catch (problem) {
      setError(problem instanceof ApiError ? problem.message : String(problem));
    } finally {
      setPending(false);
    }
  };

  return (
    <form
      class="restart"
      onSubmit={(event) => {
        event.preventDefault();
        void request();
      }}
    >
      <h2 id="restart-title">Restart {job.name}</h2>
      <label>
        <input
          type="checkbox"
          checked={saves}
          onChange={(event) => {
            setSaves(event.currentTarget.checked);
          }}
        />
        Save a checkpoint first
      </label>
      <p class="muted">{saves ? "If it cannot save one, it is not stopped." : repeated(job)}</p>
      {nodes.length > 0 && (
        <fieldset>
          <legend>Without these nodes (they are quarantined)</legend>
          {nodes.map((node) => (
            <label key={node}>
              <input
                type="checkbox"
                checked={excluded.has(node)}
                onChange={(event) => {
                  const next = new Set(excluded);
                  if (event.currentTarget.checked) next.add(node);
                  else next.delete(node);
                  setExcluded(next);
                }}
              />
              {node}
            </label>
          ))}
        </fieldset>
      )}
      <label class="comment">
        Comment
        <input
          type="text"
          maxLength={1000}
          placeholder="Why, for the audit log"
          value={comment}
          onInput={(event) => {
            setComment(event.currentTarget.value);
          }}
        />
      </label>
      {error !== null && (
        <p class="problem" role="alert">
          {error}
        </p>
      )}
      <div class="row">
        <button type="submit" class="primary" disabled={pending}>
          {pending ? "Requesting…" : "Restart job"}
        </button>
        <button type="button" onClick={onCancel}>
          Cancel
        </button>
      </div>
    </form>
  );
}

function repeated({ checkpoint_step }: Job): string {
  if (checkpoint_step === null)
    return "The ranks are stopped at once. Without a checkpoint, the job begins again at its first step.";
  return `The ranks are stopped at once, and the steps since step ${format.number(checkpoint_step)} are repeated.`;
}
