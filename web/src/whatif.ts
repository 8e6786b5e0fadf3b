// Labels of what-if figures. Pure.
const OPTYPES: Readonly<Record<string, string>> = {
  "forward-compute": "all forward passes",
  "backward-compute": "all backward passes",
  "backward-weight-compute": "all weight-gradient passes",
  "forward-pp-comm": "sending activations",
  "backward-pp-comm": "sending gradients",
  "params-all-gather": "parameter all-gather",
  "grads-reduce-scatter": "gradient reduction",
  "optimizer-clip-main-grad": "gradient norm all-reduce",
  optimizer: "optimizer and checkpoint",
  "data-wait": "data wait",
  gc: "garbage collection",
};

/** Label of a trace operation type; unknown types are returned unchanged. */
export function optypeLabel(name: string): string {
  return OPTYPES[name] ?? name;
}

const SHOWN = 8;

/** The largest values, largest first. */
export function worst(values: Readonly<Record<string, number>>): [string, number][] {
  return Object.entries(values)
    .sort(([, a], [, b]) => b - a)
    .slice(0, SHOWN);
}
