import { afterEach, beforeEach, expect, it, vi } from "vitest";

import { Refetch } from "./refetch";

beforeEach(() => {
  vi.useFakeTimers();
});

afterEach(() => {
  vi.useRealTimers();
});

interface Asked {
  resolve: (answer: string) => void;
  reject: (error: unknown) => void;
}

/** A server that responds when the test allows it. */
class Server {
  readonly taken: string[] = [];
  private readonly asked: Asked[] = [];

  readonly refetch = new Refetch<string>(
    () =>
      new Promise((resolve, reject) => {
        this.asked.push({ resolve, reject });
      }),
    (answer) => {
      this.taken.push(answer);
    },
    (error) => error === "refused",
  );

  get last(): Asked {
    const last = this.asked.at(-1);
    if (last === undefined) throw new Error("nothing was asked");
    return last;
  }

  get times(): number {
    return this.asked.length;
  }
}

async function pass(duration_ms: number): Promise<void> {
  await vi.advanceTimersByTimeAsync(duration_ms);
}

it("asks once for what is asked for often", async () => {
  const server = new Server();
  server.refetch.ask(1000);
  server.refetch.ask(1000);
  await pass(999);
  expect(server.times).toBe(0);
  await pass(1);
  server.last.resolve("new");
  await pass(60_000);
  expect([server.taken, server.times]).toEqual([["new"], 1]);
});

it("asks again for what changed while the answer was on its way", async () => {
  const server = new Server();
  server.refetch.ask(0);
  await pass(0);
  server.refetch.ask(1000);
  await pass(5000);
  expect(server.times).toBe(1);
  server.last.resolve("old");
  await pass(999);
  expect(server.times).toBe(1);
  await pass(1);
  server.last.resolve("new");
  await pass(60_000);
  expect([server.taken, server.times]).toEqual([["old", "new"], 2]);
});

it("asks again for what failed, but not for what is refused", async () => {
  const server = new Server();
  server.refetch.ask(0);
  await pass(0);
  server.last.reject("busy");
  await pass(5000);
  server.last.reject("refused");
  await pass(60_000);
  expect([server.taken, server.times]).toEqual([[], 2]);
});

it("takes nothing that comes after its end", async () => {
  const server = new Server();
  server.refetch.ask(0);
  await pass(0);
  const before = server.last;
  server.refetch.stop();
  server.refetch.ask(0);
  await pass(0);
  before.resolve("old");
  server.last.resolve("new");
  await pass(60_000);
  expect([server.taken, server.times]).toEqual([["new"], 2]);
});
