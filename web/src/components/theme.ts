// Colors of styles.css for canvas drawing.
import { signal } from "@preact/signals";

import type { Color } from "../heatmap";

const dark = matchMedia("(prefers-color-scheme: dark)");

/** Changes with the color scheme; components that read it are redrawn. */
export const scheme = signal(dark.matches ? "dark" : "light");

dark.addEventListener("change", () => {
  scheme.value = dark.matches ? "dark" : "light";
});

export function variable(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** `--NAME` as numbers; styles.css writes the ones used here as #rrggbb. */
export function colorOf(name: string): Color {
  const value = parseInt(variable(name).slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}
