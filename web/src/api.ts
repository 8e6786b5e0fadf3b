// The typed client of /api/v1. Types come from the server's OpenAPI document (`npm run generate`).
import { signal } from "@preact/signals";

import type { components, paths } from "./openapi";

type Schemas = components["schemas"];
export type Action = Schemas["Action"];
export type Caller = Schemas["CallerModel"];
export type Cause = Schemas["CauseModel"];
export type Evidence = Schemas["EvidenceModel"];
export type Gpu = Schemas["Gpu"];
export type Grid = Schemas["Grid"];
export type GridCell = Schemas["GridCell"];
export type Incident = Schemas["Incident"];
export type Job = Schemas["Job"];
export type Ledger = Schemas["LedgerModel"];
export type Node = Schemas["Node"];
export type Rank = Schemas["Rank"];
export type RecoveryReport = Schemas["RecoveryReport"];
export type RestartRequest = Schemas["RestartRequest"];
export type Step = Schemas["Step"];
export type Topology = Schemas["TopologyModel"];
export type Verdict = Schemas["Verdict"];
export type WhatIf = Schemas["WhatIf"];

type Problem = Partial<Schemas["Problem"]>;

/** A failed request, with the server's problem details (RFC 9457) if it sent any. */
export class ApiError extends Error {
  /** `status` is null if there was no response, or one of another program. */
  constructor(
    readonly status: number | null,
    readonly title: string,
    readonly detail: string,
  ) {
    super(detail === "" ? title : `${title}: ${detail}`);
  }

  get unauthorized(): boolean {
    return this.status === 401;
  }

  get missing(): boolean {
    return this.status === 404;
  }

  /** Whether the server was unreachable or failing, so that a retry may succeed. */
  get away(): boolean {
    return this.status === null || this.status >= 500;
  }

  /** Whether a retry of the same request would fail again. */
  get refused(): boolean {
    return this.unauthorized || this.missing || this.status === 403;
  }
}

const TOKEN_KEY = "paceline.token";

export const token = {
  get: (): string | null => sessionStorage.getItem(TOKEN_KEY),
  set: (value: string): void => {
    sessionStorage.setItem(TOKEN_KEY, value);
  },
  clear: (): void => {
    sessionStorage.removeItem(TOKEN_KEY);
  },
};

const SESSION_KEY = "paceline.session";

/**
 * Keep the page's half of a session that a login link opened, which is in the fragment. The other
 * half is in a cookie that the page cannot read.
 */
export function keepSession(): void {
  const half = new URLSearchParams(location.hash.slice(1)).get("session");
  if (half === null) return;
  localStorage.setItem(SESSION_KEY, half);
  // A token would be sent instead, with fewer rights or none.
  token.clear();
  history.replaceState(null, "", location.pathname + location.search);
}

/** How far the server's clock is ahead of the browser's, in milliseconds. */
export const serverAhead = signal(0);

/** A shorter difference is the age of the response and what the header leaves out of a second. */
const CLOCKS_DIFFER_MS = 2_000;

function compareClocks(response: Response): void {
  const ahead = Date.parse(response.headers.get("Date") ?? "") - Date.now();
  if (!Number.isNaN(ahead)) serverAhead.value = Math.abs(ahead) > CLOCKS_DIFFER_MS ? ahead : 0;
}

/** `fetch` with the token or the session; raises ApiError for anything but a 2xx. */
export async function request(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  const bearer = token.get();
  const session = localStorage.getItem(SESSION_KEY);
  if (bearer !== null) authorize(headers, bearer);
  else if (session !== null) headers.set("X-Paceline-Session", session);
  let response: Response;
  try {
    response = await fetch(path, { ...init, headers });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(null, "The server is not responding", "");
  }
  compareClocks(response);
  if (!response.ok) throw await failure(response);
  return response;
}

function authorize(headers: Headers, bearer: string): void {
  try {
    headers.set("Authorization", `Bearer ${bearer}`);
  } catch {
    // A header has no invisible characters such as those that a chat program adds.
    throw new ApiError(401, "Unauthorized", "it contains a character that no token has.");
  }
}

/** The error of a response that is not a 2xx. */
export async function failure(response: Response): Promise<ApiError> {
  let problem: Problem | null = null;
  try {
    problem = (await response.json()) as Problem | null;
  } catch {
    // Not a problem document.
  }
  if (typeof problem?.title !== "string") return foreign(response);
  return new ApiError(response.status, problem.title, problem.detail ?? "");
}

/** The error of a response that a proxy sent: that it finds no server does not mean that a job is missing. */
function foreign({ status, statusText }: Response): ApiError {
  const title = `The server is not responding (${[status, statusText].join(" ").trim()})`;
  return new ApiError(null, title, "The response is not from Paceline but from a proxy before it.");
}

/** Parse a response as JSON. Throws ApiError if it is something else. */
async function content<T>(response: Response): Promise<T> {
  try {
    return (await response.json()) as T;
  } catch (error) {
    if (error instanceof SyntaxError) throw foreign(response);
    throw new ApiError(null, "The server is not responding", "");
  }
}

/** A request without a response for longer has failed: a broken connection may never report it. */
const TIMEOUT_MS = 60_000;

async function get<T>(path: keyof paths, parameters: Parameters = {}): Promise<T> {
  const signal = AbortSignal.timeout(TIMEOUT_MS);
  return content(await request(address(path, parameters), { signal }));
}

/** All pages of a list, in order. */
async function list<T>(path: keyof paths, parameters: Parameters = {}): Promise<T[]> {
  const items: T[] = [];
  let cursor: string | null = null;
  do {
    const page: { items: T[]; next_cursor?: string | null } = await get(path, {
      ...parameters,
      ...(cursor === null ? {} : { cursor }),
    });
    items.push(...page.items);
    cursor = page.next_cursor ?? null;
  } while (cursor !== null);
  return items;
}

type Parameters = Readonly<Record<string, string | number>>;

/** Fill `{name}` in the path; the other parameters become the query. */
export function address(path: string, parameters: Parameters = {}): string {
  const rest = new Map(Object.entries(parameters));
  const filled = path.replace(/\{(\w+)\}/g, (_, name: string) => {
    const value = rest.get(name);
    if (value === undefined) throw new Error(`${path} needs ${name}`);
    rest.delete(name);
    return encodeURIComponent(value);
  });
  const query = new URLSearchParams([...rest].map(([name, value]) => [name, String(value)]));
  return rest.size === 0 ? filled : `${filled}?${query}`;
}

async function post<T>(path: keyof paths, parameters: Parameters, body: object): Promise<T> {
  const response = await request(address(path, parameters), {
    method: "POST",
    signal: AbortSignal.timeout(TIMEOUT_MS),
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  return content(response);
}

function decide(path: keyof paths, action_id: string): Promise<Action> {
  return post(path, { action_id }, { comment: "" });
}

/** How many steps a page keeps: at 0.5 s per step, the last 17 minutes. */
export const STEPS_KEPT = 2000;
/** Small enough that the median shows a slow rank about three steps after its onset. */
const GRID_STEPS = 5;

const RECOVERY_DAYS = 28;

export const api = {
  caller: () => get<Caller>("/api/v1/caller"),
  jobs: () => list<Job>("/api/v1/jobs"),
  job: (job_id: string) => get<Job>("/api/v1/jobs/{job_id}", { job_id }),
  ranks: (job_id: string) => list<Rank>("/api/v1/jobs/{job_id}/ranks", { job_id }),
  // One page: without `after` it is the newest `limit` steps.
  steps: async (job_id: string) =>
    (
      await get<{ items: Step[] }>("/api/v1/jobs/{job_id}/steps", { job_id, limit: STEPS_KEPT })
    ).items,
  grid: (job_id: string) => get<Grid>("/api/v1/jobs/{job_id}/grid", { job_id, steps: GRID_STEPS }),
  whatIf: (job_id: string) => get<WhatIf>("/api/v1/jobs/{job_id}/what-if", { job_id }),
  nodes: () => list<Node>("/api/v1/nodes"),
  incidents: (job: string) => list<Incident>("/api/v1/incidents", { job }),
  actions: (job: string) => list<Action>("/api/v1/actions", { job }),
  recoveries: (job: string) => get<RecoveryReport>("/api/v1/recoveries", { job, days: RECOVERY_DAYS }),
  approve: (id: string) => decide("/api/v1/actions/{action_id}/approve", id),
  reject: (id: string) => decide("/api/v1/actions/{action_id}/reject", id),
  restart: (job_id: string, body: RestartRequest) =>
    post<Action>("/api/v1/jobs/{job_id}/restart", { job_id }, body),
};
