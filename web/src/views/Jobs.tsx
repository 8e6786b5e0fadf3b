import { useCallback, useEffect, useRef, useState } from "preact/hooks";

import { api, ApiError, type Job } from "../api";
import { Ago } from "../components/Ago";
import { Failure } from "../components/Failure";
import { Badge } from "../components/Icon";
import * as format from "../format";
import { appearanceOfJob, stateOfJob } from "../tone";

const REFRESH_MS = 3000;

/** Every job, newest first. */
export function Jobs() {
  const [jobs, setJobs] = useState<Job[] | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  /** The newest request; null once it has a response. Responses to earlier ones are ignored. */
  const running = useRef<symbol | null>(null);

  const load = useCallback(async () => {
    const own = (running.current = Symbol());
    const take = (found: Job[] | null, problem: ApiError | null): void => {
      if (own !== running.current) return;
      running.current = null;
      if (found !== null) setJobs(found.sort((a, b) => Date.parse(b.created_at) - Date.parse(a.created_at)));
      setError(problem);
    };
    try {
      take(await api.jobs(), null);
    } catch (problem) {
      take(null, problem instanceof ApiError ? problem : new ApiError(null, String(problem), ""));
    }
  }, []);

  useEffect(() => {
    document.title = "Jobs · Paceline";
    void load();
    const timer = setInterval(() => {
      if (!document.hidden && running.current === null) void load();
    }, REFRESH_MS);
    return () => {
      clearInterval(timer);
    };
  }, [load]);

  if (error !== null && (jobs === null || !error.away))
    return (
      <Failure
        error={error}
        onRetry={() => {
          setError(null);
          void load();
        }}
      />
    );
  if (jobs === null) return <p class="loading">Loading jobs…</p>;
  if (jobs.length === 0) return <Empty />;
  return (
    <>
      {error !== null && <p class="banner tone-bad">{error.title}. This list may be out of date.</p>}
      <section class="panel">
        <header>
          <h1>Jobs</h1>
          <span class="muted">{format.plural(jobs.length, "job")}</span>
        </header>
        <div class="scroll">
          <JobTable jobs={jobs} />
        </div>
      </section>
    </>
  );
}

function JobTable({ jobs }: { jobs: Job[] }) {
  return (
    <table class="jobs">
      <thead>
        <tr>
          <th>Job</th>
          <th>State</th>
          <th>Verdict</th>
          <th>Topology</th>
          <th class="num">Step</th>
          <th class="num">Step time</th>
          <th class="num">Goodput</th>
          <th class="num">Open incidents</th>
          <th>Created</th>
        </tr>
      </thead>
      <tbody>
        {jobs.map((job) => (
          <tr key={job.id}>
            <th scope="row">
              <a href={`/jobs/${encodeURIComponent(job.id)}`}>{job.name}</a>
              <div class="muted mono">{job.id}</div>
            </th>
            <td>
              <Badge appearance={appearanceOfJob(job)} text={stateOfJob(job)} />
            </td>
            <td class="verdict-cell">
              {job.verdict.text}
              {job.pending_actions > 0 && (
                <div class="tone-warn strong">{format.plural(job.pending_actions, "action")} to approve</div>
              )}
            </td>
            <td class="nowrap" data-name="Topology">
              {format.topology(job.topology)}
            </td>
            <td class="num" data-name="Step">
              {format.number(job.step)}
            </td>
            <td class="num" data-name="Step time">
              {format.seconds(job.step_seconds)}
            </td>
            <td class="num" data-name="Goodput">
              {format.percent(job.ledger.goodput_ratio)}
            </td>
            <td class="num" data-name="Open incidents">
              {job.open_incidents === 0 ? <span class="muted">0</span> : job.open_incidents}
            </td>
            <td class="nowrap muted" data-name="Created">
              <Ago time={job.created_at} />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Empty() {
  return (
    <div class="notice">
      <h1>No jobs yet</h1>
      <p>Run your training with Paceline, from a machine that can reach this server:</p>
      <pre>paceline run --dp 2 --pp 2 --tp 2 -- python train.py</pre>
      <p>Or start it as usual, with an agent running on each node:</p>
      <pre>torchrun train.py</pre>
      <p>Or run the demo on this machine: real training, injected faults and repairs:</p>
      <pre>make demo</pre>
      <p class="muted">Jobs appear here as soon as they are created.</p>
    </div>
  );
}
