// What-if figures as people read them. Pure.
const OPTYPES: Readonly<Record<string, string>> = {
  "forward-compute": "every forward",
  "backward-compute": "every backward",
  "backward-weight-compute": "every backward of the weights",
  "forward-pp-comm": "activations sent on",
  "backward-pp-comm": "gradients sent back",
  "params-all-gather": "parameter all-gather",
  "grads-reduce-scatter": "gradient reduction",
  "optimizer-clip-main-grad": "the meeting of all ranks",
  optimizer: "optimizer and checkpoint",
  "data-wait": "wait for data",
  gc: "garbage collection",
};

/** An operation type of a trace in words; one that is not known stays as it is. */
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
