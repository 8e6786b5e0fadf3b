// Keeps one job's state current: a snapshot, then the event stream, rendered once per frame.
import { signal, type Signal } from "@preact/signals";

import { api, ApiError, type Grid, type Job, type Node, type Rank, type WhatIf } from "./api";
import { Refetch } from "./refetch";
import { apply, begin, decode, type Change, type JobState } from "./store";
import { EventStream } from "./stream";

export type Connection = "connecting" | "live" | "lost";

/** The grid and the what-if replay are refetched after new steps, at most this often. */
const GRID_INTERVAL_MS = 1000;
const GRID_MS_PER_CELL = 0.5;
const WHAT_IF_INTERVAL_MS = 5000;
/**
 * Without an event of the job for this long it is fetched again, because a verdict becomes outdated
 * over time. Events of nodes do not count: nodes send them also while nothing analyzes the job.
 */
const QUIET_MS = 5000;
/** Shortest pause between two such fetches. */
const QUIET_INTERVAL_MS = 1000;
/** Pause between two fetches of all nodes: a silent node is lost without an event. */
const NODES_INTERVAL_MS = 30_000;

export class LiveJob {
  readonly state: Signal<JobState | null> = signal(null);
  readonly connection: Signal<Connection> = signal("connecting");
  readonly error: Signal<ApiError | null> = signal(null);
  /** Epoch milliseconds on this browser's clock. */
  readonly lastDataAt: Signal<number | null> = signal(null);

  private stream: EventStream | null = null;
  private waiting: Change[] = [];
  private frame: number | null = null;
  private timer: ReturnType<typeof setInterval> | undefined;
  private loads = 0;
  private newestLoad: symbol | null = null;
  /** When the job itself was received last, on this browser's clock. */
  private jobAt = 0;
  private readonly summary: Refetch<[Job, Rank[]]>;
  private readonly nodes: Refetch<Node[]>;
  private readonly grid: Refetch<Grid>;
  private readonly whatIf: Refetch<WhatIf>;
  private closed = false;

  constructor(private readonly id: string) {
    this.summary = new Refetch(
      () => Promise.all([api.job(id), api.ranks(id)]),
      ([job, ranks]) => {
        // An event that arrived in the meantime may be newer.
        if (!this.isQuiet()) return;
        this.lastDataAt.value = Date.now();
        this.push({ type: "job", data: job });
        this.push({ type: "ranks", data: ranks });
        this.grid.ask(0);
      },
      isRefused,
    );
    this.nodes = new Refetch(
      api.nodes,
      (data) => {
        this.push({ type: "nodes", data });
      },
      isRefused,
    );
    this.grid = new Refetch(
      () => api.grid(id),
      (data) => {
        this.push({ type: "grid", data });
      },
      isRefused,
    );
    this.whatIf = new Refetch(
      () => api.whatIf(id),
      (data) => {
        this.push({ type: "what-if", data });
      },
      isRefused,
    );
    document.addEventListener("visibilitychange", this.onVisibility);
    this.onVisibility();
  }

  close(): void {
    this.closed = true;
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.disconnect();
  }

  /** Apply a change from a response instead of an event. */
  push(change: Change): void {
    this.waiting.push(change);
    // Changes wait for the snapshot, which may be older than they are.
    if (this.loads === 0) this.frame ??= requestAnimationFrame(this.flush);
  }

  // A hidden tab holds no connection: browsers allow six per origin over HTTP/1.1.
  private readonly onVisibility = (): void => {
    if (document.hidden) this.disconnect();
    else this.connect();
  };

  private connect(): void {
    if (this.stream !== null || this.closed) return;
    this.connection.value = "connecting";
    this.timer = setInterval(() => {
      if (this.isQuiet()) this.summary.ask(QUIET_INTERVAL_MS);
      this.nodes.ask(NODES_INTERVAL_MS);
    }, QUIET_MS);
    this.stream = new EventStream(`/api/v1/events?job=${encodeURIComponent(this.id)}`, {
      onOpen: (resumed) => {
        this.error.value = null;
        if (resumed) this.connection.value = "live";
        else void this.load();
      },
      onMessage: ({ event, data }) => {
        this.lastDataAt.value = Date.now();
        const change = decode(event, data);
        if (change === null) return;
        this.push(change);
        if (change.type === "job") this.jobAt = Date.now();
        if (change.type === "step" || change.type === "ranks") this.grid.ask(this.gridInterval());
        if (change.type === "step") this.whatIf.ask(WHAT_IF_INTERVAL_MS);
      },
      onError: (error) => this.onError(error),
    });
  }

  private isQuiet(): boolean {
    return Date.now() - this.jobAt >= QUIET_MS;
  }

  private disconnect(): void {
    clearInterval(this.timer);
    this.stream?.close();
    this.stream = null;
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
    // The next connection starts with a snapshot, which is newer.
    this.waiting = [];
    this.summary.stop();
    this.nodes.stop();
    this.grid.stop();
    this.whatIf.stop();
  }

  private onError(error: unknown): boolean {
    const refused = isRefused(error);
    this.connection.value = "lost";
    if (error instanceof ApiError) this.error.value = error;
    if (refused) this.disconnect();
    return !refused;
  }

  private async load(): Promise<void> {
    const load = (this.newestLoad = Symbol());
    const stream = this.stream;
    this.loads++;
    try {
      const [job, incidents, actions] = await Promise.all([
        api.job(this.id),
        api.incidents(this.id),
        api.actions(this.id),
      ]);
      // The stream was opened again in the meantime, and a newer snapshot was requested.
      if (load !== this.newestLoad || stream !== this.stream) return;
      this.state.value = begin(job, incidents, actions, this.state.value);
      this.connection.value = "live";
      this.error.value = null;
      this.lastDataAt.value = this.jobAt = Date.now();
      void this.loadLarge();
      this.grid.ask(0);
      this.whatIf.ask(0);
    } catch (error) {
      if (load !== this.newestLoad || stream !== this.stream) return;
      // Restart instead of resuming, because events are applied to a snapshot.
      this.disconnect();
      if (this.onError(error)) setTimeout(this.onVisibility, 2000);
    } finally {
      this.loads--;
      if (this.loads === 0) this.flush();
    }
  }

  /** An event received in the meantime may be reverted until the next one arrives. */
  private async loadLarge(): Promise<void> {
    const stream = this.stream;
    const take = (change: Change): void => {
      if (stream === this.stream) this.push(change);
    };
    const results = await Promise.allSettled([
      api.nodes().then((data) => {
        take({ type: "nodes", data });
      }),
      api.ranks(this.id).then((data) => {
        take({ type: "ranks", data });
      }),
      api.steps(this.id).then((data) => {
        take({ type: "steps", data });
      }),
    ]);
    if (results.every(({ status }) => status === "fulfilled")) take({ type: "complete" });
    else if (stream !== null && stream === this.stream) {
      // The server does not resend the event, so start over.
      this.disconnect();
      this.connection.value = "lost";
      setTimeout(this.onVisibility, 2000);
    }
  }

  private readonly flush = (): void => {
    this.frame = null;
    if (this.state.value === null || this.waiting.length === 0) return;
    const changes = this.waiting;
    this.waiting = [];
    this.state.value = apply(this.state.value, changes);
  };

  private gridInterval(): number {
    const cells = this.state.value?.grid?.cells.length ?? 0;
    return Math.max(GRID_INTERVAL_MS, cells * GRID_MS_PER_CELL);
  }
}

function isRefused(error: unknown): boolean {
  return error instanceof ApiError && error.refused;
}
