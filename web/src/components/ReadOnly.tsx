import { useEffect, useState } from "preact/hooks";

import { api, type Caller } from "../api";

const REFRESH_MS = 30_000;

/** A note that this browser may not change anything, and how to sign in. */
export function ReadOnly() {
  const [caller, setCaller] = useState<Caller | null>(null);

  useEffect(() => {
    const load = async (): Promise<void> => {
      // Without a response, the page itself shows the reason.
      setCaller(await api.caller().catch(() => null));
    };
    void load();
    const timer = setInterval(() => {
      if (!document.hidden) void load();
    }, REFRESH_MS);
    return () => {
      clearInterval(timer);
    };
  }, []);

  if (caller === null || caller.can_change) return null;
  return (
    <p class="readonly muted">
      Read only: {caller.name} may not change anything. To sign in, run{" "}
      <code>paceline login --server {location.origin}</code> where the server runs and open the link that it prints.
    </p>
  );
}
