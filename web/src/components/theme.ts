// The colors of styles.css, for drawing on a canvas.
import { signal } from "@preact/signals";

import type { Color } from "../heatmap";

const dark = matchMedia("(prefers-color-scheme: dark)");

/** The color scheme; components that read it are redrawn when it changes. */
export const scheme = signal(dark.matches ? "dark" : "light");

dark.addEventListener("change", () => {
  scheme.value = dark.matches ? "dark" : "light";
});

export function variable(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** `--NAME` as numbers; styles.css defines the ones used here as #rrggbb. */
export function colorOf(name: string): Color {
  const value = parseInt(variable(name).slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}
