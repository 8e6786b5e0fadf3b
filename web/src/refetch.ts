// Refetches resources that are too large for events after an event reports a change of them.

/** Delay before a failed fetch is retried. */
const RETRY_MS = 5000;

/**
 * Runs one fetch at a time, with a delay after each request. A request during a fetch may need
 * newer data than its response, so the resource is fetched again. A failed fetch is repeated too,
 * unless `isFinal` says that a retry would not help.
 */
export class Refetch<T> {
  private timer: ReturnType<typeof setTimeout> | null = null;
  private running: symbol | null = null;
  /** Delay until the next fetch; null if none was requested. */
  private next_ms: number | null = null;

  constructor(
    private readonly fetch: () => Promise<T>,
    private readonly take: (answer: T) => void,
    private readonly isFinal: (error: unknown) => boolean,
  ) {}

  ask(after_ms: number): void {
    if (this.running !== null) this.next_ms = after_ms;
    else
      this.timer ??= setTimeout(() => {
        void this.run();
      }, after_ms);
  }

  /** Ignore the result of the current fetch. */
  stop(): void {
    if (this.timer !== null) clearTimeout(this.timer);
    this.timer = this.running = null;
    this.next_ms = null;
  }

  private async run(): Promise<void> {
    const run = (this.running = Symbol());
    this.timer = null;
    let retry_ms: number | null = null;
    try {
      const answer = await this.fetch();
      if (run === this.running) this.take(answer);
    } catch (error) {
      if (!this.isFinal(error)) retry_ms = RETRY_MS;
    }
    if (run !== this.running) return;
    const next_ms = this.next_ms ?? retry_ms;
    this.running = this.next_ms = null;
    if (next_ms !== null) this.ask(next_ms);
  }
}
