import { useRef, useState } from "preact/hooks";

import { api, ApiError, type Action, type Job } from "../api";
import * as format from "../format";

interface Props {
  job: Job;
  /** Nodes that run its ranks. */
  nodes: readonly string[];
  onRequested: (action: Action) => void;
}

/**
 * A button that opens a form for a restart that no incident asks for. An open form stays if a
 * restart is no longer possible: the response says why.
 */
export function RestartJob({ job, nodes, isPossible, onRequested }: Props & { isPossible: boolean }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [opened, setOpened] = useState(0);
  return (
    <>
      {isPossible && (
        <button
          type="button"
          onClick={() => {
            setOpened(opened + 1); // an empty form each time
            dialog.current?.showModal();
          }}
        >
          Restart…
        </button>
      )}
      <dialog ref={dialog} aria-labelledby="restart-title">
        <Form
          key={opened}
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
      onRequested(await api.restart(job.id, { exclude_nodes: chosen, checkpoint: saves, comment }));
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
          aria-describedby="restart-saves"
          onChange={(event) => {
            setSaves(event.currentTarget.checked);
          }}
        />
        Save a checkpoint first
      </label>
      <p class="muted" id="restart-saves">
        {saves ? "If it cannot save one, it is not stopped." : repeated(job)}
      </p>
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
          onKeyDown={(event) => {
            if (event.key === "Enter") event.preventDefault(); // only the button restarts the job
          }}
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

function repeated({ checkpoint_step, resumes, policy }: Job): string {
  if (checkpoint_step === null || resumes === false || policy.resumes === "no")
    return "The ranks are stopped at once. Without a checkpoint to resume from, the job begins again at its first step.";
  return `The ranks are stopped at once, and the steps since step ${format.number(checkpoint_step)} are repeated.`;
}
