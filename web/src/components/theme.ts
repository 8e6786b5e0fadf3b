// The colours of styles.css for what is painted on a canvas.
import { signal } from "@preact/signals";

import type { Colour } from "../heatmap";

const dark = matchMedia("(prefers-color-scheme: dark)");

/** Changes when the colours do: read it to be drawn again. */
export const scheme = signal(dark.matches ? "dark" : "light");

dark.addEventListener("change", () => {
  scheme.value = dark.matches ? "dark" : "light";
});

export function variable(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** `--NAME` as numbers; styles.css writes the ones used here as #rrggbb. */
export function colourOf(name: string): Colour {
  const value = parseInt(variable(name).slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}
