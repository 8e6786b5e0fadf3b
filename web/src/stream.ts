// Server-sent events over fetch: EventSource cannot send a bearer token.
import { createParser, type EventSourceMessage } from "eventsource-parser";

import { request } from "./api";

/** A stream silent for longer is considered dead; comments of the server count as data. */
const SILENCE_MS = 30_000;
/** After a longer break, a new snapshot costs less than all missed events. */
const RESUME_WITHIN_MS = 60_000;
const RETRY_FIRST_MS = 500;
const RETRY_MAXIMUM_MS = 10_000;

export interface StreamHandlers {
  /** The stream is open. `resumed`: missed events follow; otherwise the caller fetches a snapshot. */
  onOpen: (resumed: boolean) => void;
  onMessage: (message: EventSourceMessage) => void;
  /** The connection failed. Return false to stop reconnecting. */
  onError: (error: unknown) => boolean;
}

/** Keep one event stream open until `close`, resuming with Last-Event-ID. */
export class EventStream {
  private readonly controller = new AbortController();
  private lastEventId: string | null = null;
  private heardAt = 0;

  constructor(
    private readonly path: string,
    private readonly handlers: StreamHandlers,
  ) {
    void this.run();
  }

  close(): void {
    this.controller.abort();
  }

  private closed(): boolean {
    return this.controller.signal.aborted;
  }

  private async run(): Promise<void> {
    let retry = RETRY_FIRST_MS;
    while (!this.closed()) {
      try {
        await this.read(() => (retry = RETRY_FIRST_MS));
        throw new Error("the server closed the stream");
      } catch (error) {
        // Closed by the page, or rejected permanently.
        if (this.closed() || !this.handlers.onError(error)) return;
      }
      // Jitter, so that open pages do not reconnect to a restarted server all at once.
      await pause(retry * (0.5 + Math.random()), this.controller.signal);
      retry = Math.min(retry * 2, RETRY_MAXIMUM_MS);
    }
  }

  private async read(onOpen: () => void): Promise<void> {
    if (Date.now() - this.heardAt > RESUME_WITHIN_MS) this.lastEventId = null;
    const attempt = new AbortController();
    const abort = (): void => {
      attempt.abort();
    };
    this.controller.signal.addEventListener("abort", abort);
    let silence = setTimeout(abort, SILENCE_MS);
    try {
      const headers: Record<string, string> = { Accept: "text/event-stream" };
      if (this.lastEventId !== null) headers["Last-Event-ID"] = this.lastEventId;
      const response = await request(this.path, { headers, signal: attempt.signal, cache: "no-store" });
      if (response.body === null) throw new Error("the stream has no body");
      onOpen();
      const isSnapshot = response.headers.get("Paceline-Stream-Start") === "snapshot";
      this.handlers.onOpen(this.lastEventId !== null && !isSnapshot);
      await readMessages(
        response.body,
        (message) => {
          if (message.id !== undefined) this.lastEventId = message.id;
          this.handlers.onMessage(message);
        },
        () => {
          this.heardAt = Date.now();
          clearTimeout(silence);
          silence = setTimeout(abort, SILENCE_MS);
        },
      );
    } finally {
      clearTimeout(silence);
      this.controller.signal.removeEventListener("abort", abort);
    }
  }
}

/** Parse `body` to its end, independent of chunk boundaries. `onBytes` is called per chunk. */
export async function readMessages(
  body: ReadableStream<Uint8Array>,
  onMessage: (message: EventSourceMessage) => void,
  onBytes: () => void = () => undefined,
): Promise<void> {
  const parser = createParser({ onEvent: onMessage });
  const decoder = new TextDecoder();
  const reader = body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    onBytes();
    parser.feed(decoder.decode(value, { stream: true }));
  }
}

function pause(duration_ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, duration_ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
