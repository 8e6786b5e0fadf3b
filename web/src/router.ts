// Two routes: `/` and `/jobs/ID`. The server returns index.html for both.
import { signal } from "@preact/signals";

export type Route = { view: "jobs" } | { view: "job"; id: string } | { view: "missing" };

export function parse(path: string): Route {
  if (path === "/" || path === "/jobs" || path === "/jobs/") return { view: "jobs" };
  const match = /^\/jobs\/([^/]+)\/?$/.exec(path);
  if (match?.[1] === undefined) return { view: "missing" };
  try {
    return { view: "job", id: decodeURIComponent(match[1]) };
  } catch {
    return { view: "missing" };
  }
}

export const route = signal<Route>({ view: "jobs" });

export function startRouter(): void {
  const read = (): void => {
    route.value = parse(location.pathname);
  };
  addEventListener("popstate", read);
  // Only unmodified clicks on links of this origin are handled here.
  document.addEventListener("click", (event) => {
    if (event.defaultPrevented || event.button !== 0) return;
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const anchor = event.target instanceof Element ? event.target.closest("a") : null;
    const href = anchor?.getAttribute("href");
    if (!href?.startsWith("/") || anchor?.target) return;
    event.preventDefault();
    history.pushState(null, "", href);
    read();
    scrollTo(0, 0);
  });
  read();
}
