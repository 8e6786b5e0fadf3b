// Keeps what is fetched whole (it is too large for an event) as new as the events are.

/** Before what could not be fetched is asked for again. */
const RETRY_MS = 5000;

/**
 * One fetch at a time, some time after it was asked for. What is asked for during a fetch may be
 * newer than its answer, so it is fetched again; so is what failed, unless `isFinal` says that
 * asking again would not help.
 */
export class Refetch<T> {
  private timer: ReturnType<typeof setTimeout> | null = null;
  private running: symbol | null = null;
  /** How long after this fetch the next is to be made; null: nobody asked for it. */
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

  /** What is under way is not taken any more. */
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
