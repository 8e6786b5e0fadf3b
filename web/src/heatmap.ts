// The position of a rank's cell on the heatmap, the rank at a point, and its color. Pure.
import type { Grid, GridCell, Rank, Topology } from "./api";

/** The three axes of the heatmap: replicas, stages and shards. */
export type Axes = Pick<Topology, "dp" | "pp" | "tp">;

/**
 * One axis of the map is the model (stages side by side, each `tp` cells wide, with a gap between
 * them), the other the data-parallel replicas. The model is the horizontal axis, unless there are
 * so many more replicas than model cells that the map would be narrow and tall; then the axes are
 * swapped.
 */
const LARGEST_CANVAS = 16_384; // pixels per side, in Safari; others draw more

export interface Geometry {
  topology: Axes;
  turned: boolean;
  cellWidth: number;
  cellHeight: number;
  /** Gap between pipeline stages. */
  gap: number;
  width: number;
  height: number;
}

export interface Place {
  dp_rank: number;
  pp_rank: number;
  tp_rank: number;
}

export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

const CELL_MINIMUM = 3;
const CELL_WIDTH_MAXIMUM = 120;
const CELL_HEIGHT_MAXIMUM = 44;
/** Narrow cells are this high, if there is room: one row of many replicas is no hairline. */
const ROW_HEIGHT = 14;

export function geometry(topology: Axes, width: number, height: number): Geometry {
  const model = topology.pp * topology.tp;
  const turned = topology.dp > 3 * model;
  const across = turned ? topology.dp : model;
  const down = turned ? model : topology.dp;
  const gap = topology.pp === 1 ? 0 : Math.min(10, Math.max(2, width / (across * 4)));
  const gaps = gap * (topology.pp - 1);
  const fit = (room: number, count: number, maximum: number): number => {
    const cell = Math.min(maximum, Math.max(CELL_MINIMUM, room / count));
    return cell > 8 ? Math.floor(cell) : cell;
  };
  const cellWidth = fit(width - (turned ? 0 : gaps), across, CELL_WIDTH_MAXIMUM);
  const cellHeight = fit(height - (turned ? gaps : 0), down, Math.min(CELL_HEIGHT_MAXIMUM, Math.max(cellWidth * 1.5, ROW_HEIGHT)));
  return {
    topology,
    turned,
    cellWidth,
    cellHeight,
    gap,
    width: across * cellWidth + (turned ? 0 : gaps),
    height: down * cellHeight + (turned ? gaps : 0),
  };
}

/** Column and row of a place, not counting gaps. */
function cell(shape: Geometry, place: Place): [column: number, row: number] {
  const model = place.pp_rank * shape.topology.tp + place.tp_rank;
  return shape.turned ? [place.dp_rank, model] : [model, place.dp_rank];
}

/**
 * Pixels of the canvas for each CSS pixel: those of the screen, or fewer if the canvas would be larger than browsers
 * draw. It stays empty then.
 */
export function resolution({ width, height }: Geometry, ofScreen: number): number {
  return Math.min(ofScreen, LARGEST_CANVAS / Math.max(width, height));
}

export function box(shape: Geometry, place: Place): Box {
  const [column, row] = cell(shape, place);
  const gaps = shape.gap * place.pp_rank;
  return {
    x: column * shape.cellWidth + (shape.turned ? 0 : gaps),
    y: row * shape.cellHeight + (shape.turned ? gaps : 0),
    width: shape.cellWidth,
    height: shape.cellHeight,
  };
}

/** The place at a point; null in a gap or outside. */
export function placeAt(shape: Geometry, x: number, y: number): Place | null {
  const { dp, pp, tp } = shape.topology;
  const [along, replica] = shape.turned
    ? [y, Math.floor(x / shape.cellWidth)]
    : [x, Math.floor(y / shape.cellHeight)];
  const size = shape.turned ? shape.cellHeight : shape.cellWidth;
  const period = tp * size + shape.gap;
  const pp_rank = Math.floor(along / period);
  const tp_rank = Math.floor((along - pp_rank * period) / size);
  const outside = (value: number, count: number): boolean => !(value >= 0 && value < count);
  if (outside(replica, dp) || outside(pp_rank, pp) || outside(tp_rank, tp)) return null;
  return { dp_rank: replica, pp_rank, tp_rank };
}

/** The neighbor in an arrow key's direction; the same place at an edge. */
export function neighbor(shape: Geometry, place: Place, right: number, down: number): Place {
  const { dp, pp, tp } = shape.topology;
  const [along, across] = shape.turned ? [down, right] : [right, down];
  const clamp = (value: number, count: number): number => Math.min(count - 1, Math.max(0, value));
  const model = clamp(place.pp_rank * tp + place.tp_rank + along, pp * tp);
  return {
    dp_rank: clamp(place.dp_rank + across, dp),
    pp_rank: Math.floor(model / tp),
    tp_rank: model % tp,
  };
}

export function key({ dp_rank, pp_rank, tp_rank }: Place): string {
  return `${dp_rank}/${pp_rank}/${tp_rank}`;
}

export type Color = readonly [red: number, green: number, blue: number];

/** Slowdowns from this value on have the last color. */
export const HOTTEST = 3;

/** Ranks always differ by a few percent; such differences get no color. */
export const NOISE = 1.06;

/** NOISE and faster -> 0, HOTTEST and slower -> 1, logarithmic in between. */
export function heat(slowdown: number): number {
  return Math.min(1, Math.max(0, Math.log(slowdown / NOISE) / Math.log(HOTTEST / NOISE)));
}

export function color(slowdown: number | null, stops: readonly Color[], unknown: Color): Color {
  if (slowdown === null || stops.length === 0) return unknown;
  const position = heat(slowdown) * (stops.length - 1);
  const index = Math.min(Math.floor(position), stops.length - 2);
  const [low, high] = [stops[index] ?? unknown, stops[index + 1] ?? unknown];
  const part = position - index;
  const mix = (a: number, b: number): number => Math.round(a + (b - a) * part);
  return [mix(low[0], high[0]), mix(low[1], high[1]), mix(low[2], high[2])];
}

const BLACK: Color = [0, 0, 0];
const WHITE: Color = [255, 255, 255];

/** Black or white, whichever has the higher contrast on `ground` (at least 4.58 to 1). */
export function textOn(ground: Color): Color {
  return contrast(BLACK, ground) > contrast(WHITE, ground) ? BLACK : WHITE;
}

/** WCAG 2.1, "contrast ratio". */
export function contrast(one: Color, other: Color): number {
  const [a, b] = [luminance(one), luminance(other)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}

/** WCAG 2.1, "relative luminance". */
function luminance(color: Color): number {
  const linear = (part: number): number =>
    part <= 10 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
  return 0.2126 * linear(color[0]) + 0.7152 * linear(color[1]) + 0.0722 * linear(color[2]);
}

/** One pixel per rank, stages without gaps, so that 10,000 cells are one small image. */
export function pixels(
  shape: Geometry,
  cells: readonly GridCell[],
  stops: readonly Color[],
  unknown: Color,
): { data: Uint8ClampedArray<ArrayBuffer>; columns: number; rows: number } {
  const model = shape.topology.pp * shape.topology.tp;
  const [columns, rows] = shape.turned ? [shape.topology.dp, model] : [model, shape.topology.dp];
  const data = new Uint8ClampedArray(columns * rows * 4);
  for (let offset = 0; offset < data.length; offset += 4) data.set([...unknown, 255], offset);
  for (const one of cells) {
    const [column, row] = cell(shape, one);
    if (column >= columns || row >= rows) continue;
    const [red, green, blue] = color(one.slowdown, stops, unknown);
    const offset = (row * columns + column) * 4;
    data[offset] = red;
    data[offset + 1] = green;
    data[offset + 2] = blue;
  }
  return { data, columns, rows };
}

/** The slowest rank, if any is known. */
export function slowest(grid: Grid): GridCell | null {
  return grid.cells.reduce<GridCell | null>(
    (worst, one) => (one.slowdown !== null && one.slowdown > (worst?.slowdown ?? 0) ? one : worst),
    null,
  );
}

/** Why no rank's slowdown is known. */
export function unknownText(grid: Grid): string {
  if (grid.last_step === null) return "No finished step of this generation is stored.";
  return grid.cells.every((cell) => cell.self_seconds === null)
    ? "Slowdowns are shown while the ranks are known to train."
    : "No rank has peers that do the same work to be compared with.";
}

/**
 * State of a rank: its trainer's status while the process is alive, otherwise the process state.
 */
export function stateOf(cell: GridCell, rank: Rank | undefined): string {
  const { state, condition } = rank ?? cell;
  if (["hung", "dead", "blocked", "unknown"].includes(condition)) return condition;
  return state === "exited" ? state : (rank?.status ?? state);
}
