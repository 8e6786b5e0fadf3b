import { afterEach, beforeEach, expect, it, vi } from "vitest";

import type { Incident, Job, Node } from "./api";
import { LiveJob } from "./live";

type Answer = () => Response | Promise<Response>;

/** A server with one job, whose responses and events a test chooses. */
class Server {
  readonly answers = new Map<string, Answer>();
  readonly asked: string[] = [];
  /** The open streams, newest last. */
  readonly streams: ReadableStreamDefaultController<Uint8Array>[] = [];

  /** How the next stream starts. */
  start: "resumed" | "snapshot" = "snapshot";

  constructor() {
    for (const path of ["/incidents", "/actions", "/nodes", "/jobs/job-1/ranks", "/jobs/job-1/steps"])
      this.has(path, { items: [] });
    this.has("/jobs/job-1", job("healthy"));
    this.has("/jobs/job-1/grid", { cells: [] });
    this.has("/jobs/job-1/what-if", {});
  }

  has(path: string, body: unknown): void {
    this.answers.set(path, () => Response.json(body));
  }

  /** Hold back the next answer of a path until the returned function is called. */
  hold(path: string, body: unknown): () => void {
    const before = this.answers.get(path);
    let release: () => void = () => undefined;
    this.answers.set(path, () => {
      if (before !== undefined) this.answers.set(path, before);
      return new Promise((resolve) => {
        release = () => {
          resolve(Response.json(body));
        };
      });
    });
    return () => {
      release();
    };
  }

  count(path: string): number {
    return this.asked.filter((each) => each === path).length;
  }

  readonly fetch = async (input: string, init: RequestInit): Promise<Response> => {
    const path = input.replace("/api/v1", "").replace(/\?.*/, "");
    this.asked.push(path);
    if (path === "/events") return this.open(init);
    const answer = this.answers.get(path);
    return answer === undefined ? new Response("", { status: 404 }) : answer();
  };

  /** Break the open stream. */
  cut(): void {
    this.streams.at(-1)?.error(new TypeError("network error"));
  }

  send(event: string, data: unknown): void {
    const text = `id: ${this.asked.length}\nevent: ${event}\ndata: ${JSON.stringify(data)}\n\n`;
    this.streams.at(-1)?.enqueue(new TextEncoder().encode(text));
  }

  private open({ signal }: RequestInit): Response {
    const body = new ReadableStream<Uint8Array>({
      start: (controller) => {
        this.streams.push(controller);
        signal?.addEventListener("abort", () => {
          controller.error(signal.reason);
        });
      },
    });
    return new Response(body, { headers: { "Paceline-Stream-Start": this.start } });
  }
}

const job = (text: string): Job => ({ id: "job-1", verdict: { text } }) as Job;
const incident = (id: string, state: string): Incident =>
  ({ id, state, urgency: 1, detected_at: "2026-01-01T00:00:00Z" }) as Incident;

const page = Object.assign(new EventTarget(), { hidden: false });
let server: Server;
let live: LiveJob;

beforeEach(async () => {
  vi.useFakeTimers();
  server = new Server();
  vi.stubGlobal("fetch", server.fetch);
  vi.stubGlobal("document", page);
  vi.stubGlobal("sessionStorage", { getItem: () => null });
  vi.stubGlobal("localStorage", { getItem: () => null });
  vi.stubGlobal("requestAnimationFrame", (draw: () => void) => setTimeout(draw, 16));
  vi.stubGlobal("cancelAnimationFrame", (frame: ReturnType<typeof setTimeout>) => {
    clearTimeout(frame);
  });
  live = new LiveJob("job-1");
  await pass(100);
});

afterEach(() => {
  live.close();
  page.hidden = false;
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

async function pass(duration_ms: number): Promise<void> {
  await vi.advanceTimersByTimeAsync(duration_ms);
}

function show(hidden: boolean): void {
  page.hidden = hidden;
  page.dispatchEvent(new Event("visibilitychange"));
}

const verdict = (): string | undefined => live.state.value?.job.verdict.text;

it("fetches a job again that no longer changes, while the nodes of others do", async () => {
  server.has("/jobs/job-1", job("outdated"));
  for (let second = 0; second < 12; second++) {
    server.send("node", { id: "node-9" });
    await pass(1000);
  }
  expect(verdict()).toBe("outdated");
});

it("asks a slow server for a quiet job once at a time", async () => {
  const before = server.count("/jobs/job-1");
  server.answers.set("/jobs/job-1", () => new Promise(() => undefined));
  await pass(25_000);
  expect(server.count("/jobs/job-1") - before).toBe(1);
});

it("fetches the nodes again, because a silent one sends no event that it is lost", async () => {
  const node = (state: string): Node => ({ id: "node-1", state }) as Node;
  server.send("node", node("ready"));
  await pass(100);
  server.has("/nodes", { items: [node("lost")] });
  for (let second = 0; second < 60; second++) {
    server.send("job", job("healthy"));
    await pass(1000);
  }
  expect(live.state.value?.nodes.map(({ state }) => state)).toEqual(["lost"]);
});

it("drops events of before it was hidden, which the new snapshot contains", async () => {
  server.send("incident", incident("inc-1", "open"));
  await pass(0);
  show(true);
  server.has("/incidents", { items: [incident("inc-1", "resolved")] });
  await pass(3_600_000);
  show(false);
  await pass(100);
  expect(live.state.value?.incidents.map(({ state }) => state)).toEqual(["resolved"]);
});

it("drops the answer to an earlier request for the snapshot", async () => {
  show(true);
  show(false);
  const release = server.hold("/incidents", { items: [] });
  await pass(100);
  server.cut();
  server.has("/incidents", { items: [incident("inc-1", "open")] });
  await pass(5000);
  release();
  await pass(100);
  expect(live.state.value?.incidents.map(({ id }) => id)).toEqual(["inc-1"]);
});

it.each(["resumed", "snapshot"] as const)("fetches the job after a break unless the stream is resumed: %s", async (start) => {
  server.send("incident", incident("inc-1", "open"));
  await pass(100);
  const before = server.count("/incidents");
  server.has("/incidents", { items: [incident("inc-1", "resolved")] });
  server.start = start;
  server.cut();
  await pass(5000);
  expect(server.streams).toHaveLength(2);
  expect(server.count("/incidents") - before).toBe(start === "snapshot" ? 1 : 0);
  const state = start === "snapshot" ? "resolved" : "open";
  expect(live.state.value?.incidents.map((each) => each.state)).toEqual([state]);
});
