import { afterEach, beforeEach, expect, it, vi } from "vitest";

import { api, ApiError, keepSession, serverAhead, token } from "./api";

function storage(): Pick<Storage, "getItem" | "setItem" | "removeItem"> {
  const values = new Map<string, string>();
  return {
    getItem: (key) => values.get(key) ?? null,
    setItem: (key, value) => void values.set(key, value),
    removeItem: (key) => void values.delete(key),
  };
}

const sent: Headers[] = [];

function answer(body: string, init: ResponseInit): void {
  vi.stubGlobal("fetch", (_: string, { headers }: { headers: Headers }) => {
    sent.push(headers);
    return Promise.resolve(new Response(body, init));
  });
}

async function failure(request: Promise<unknown> = api.job("job-1")): Promise<ApiError> {
  const error: unknown = await request.then(
    () => null,
    (problem: unknown) => problem,
  );
  if (error instanceof ApiError) return error;
  throw new Error(`not an ApiError: ${String(error)}`);
}

beforeEach(() => {
  vi.stubGlobal("sessionStorage", storage());
  vi.stubGlobal("localStorage", storage());
  sent.length = 0;
});

afterEach(() => {
  vi.unstubAllGlobals();
  vi.restoreAllMocks();
  vi.useRealTimers();
});

it("takes a page of a proxy for a server that is away, not for a missing job or a missing token", async () => {
  for (const status of [200, 401, 403, 404, 502]) {
    answer("<html>404 page not found</html>", { status, statusText: "Text" });
    const error = await failure();
    expect([error.away, error.refused]).toEqual([true, false]);
    expect(error.title).toContain(`${status} Text`);
  }
  answer("null", { status: 404 });
  expect((await failure()).away).toBe(true);
});

it("takes the server's own 404 for a missing job", async () => {
  answer('{"title": "Not Found", "status": 404, "detail": "There is no job"}', { status: 404 });
  const error = await failure();
  expect([error.missing, error.detail]).toEqual([true, "There is no job"]);
});

it("rejects a token that no header can contain, so that another one can be entered", async () => {
  answer("{}", { status: 200 });
  token.set("pl_secret\u200b");
  expect((await failure()).unauthorized).toBe(true);
});

it("uses the session of a login link instead of the token that this tab had before", async () => {
  answer("{}", { status: 200 });
  token.set("revoked");
  vi.stubGlobal("location", { hash: "#session=half", pathname: "/", search: "" });
  vi.stubGlobal("history", { replaceState: () => undefined });
  keepSession();
  await api.job("job-1");
  expect([sent[0]?.get("Authorization"), sent[0]?.get("X-Paceline-Session")]).toEqual([null, "half"]);
});

it("gives up on a response that does not arrive", async () => {
  vi.spyOn(AbortSignal, "timeout").mockReturnValue(AbortSignal.abort(new DOMException("", "TimeoutError")));
  vi.stubGlobal("fetch", (_: string, { signal }: { signal?: AbortSignal }) =>
    signal?.aborted ? Promise.reject(signal.reason as Error) : new Promise(() => undefined),
  );
  expect((await failure()).away).toBe(true);
  expect((await failure(api.approve("act-1"))).away).toBe(true);
});

it.each([
  ["Sun, 29 Nov 2026 12:00:50 GMT", 50_000],
  ["Sun, 29 Nov 2026 11:58:00 GMT", -120_000],
  ["Sun, 29 Nov 2026 11:59:59 GMT", 0],
  ["yesterday", 7],
])("compares the clocks: %s", async (date, ahead) => {
  vi.useFakeTimers({ now: Date.parse("2026-11-29T12:00:00Z") });
  serverAhead.value = 7;
  answer("{}", { headers: { Date: date } });
  await api.job("job-1");
  expect(serverAhead.value).toBe(ahead);
});
