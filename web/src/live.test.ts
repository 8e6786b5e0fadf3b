import { afterEach, beforeEach, expect, it, vi } from "vitest";

import type { Job } from "./api";
import { LiveJob } from "./live";

type Answer = () => Response | Promise<Response>;

/** A server with one job, whose responses and events a test chooses. */
class Server {
  readonly answers = new Map<string, Answer>();
  readonly asked: string[] = [];
  /** The open streams, newest last. */
  readonly streams: ReadableStreamDefaultController<Uint8Array>[] = [];

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
    return new Response(body);
  }
}

const job = (text: string): Job => ({ id: "job-1", verdict: { text } }) as Job;

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
