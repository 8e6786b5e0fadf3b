import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

import type { Grid, GridCell, Rank } from "../api";
import * as format from "../format";
import * as heatmap from "../heatmap";
import { useWidth } from "./size";
import { colorOf, scheme, variable } from "./theme";

const HEIGHT_MAXIMUM = 360;
/** Left and right padding of the map, as in styles.css. */
const PADDING = 2;
/** Limit of rows; the slowest ranks come first. */
const TABLE_ROWS = 100;
/** Maximum, as in styles.css. */
const TOOLTIP_WIDTH = 260;

/** Slowdown of every rank: stages side by side, one row per data-parallel replica. */
export function Heatmap({ grid, ranks }: { grid: Grid; ranks: readonly Rank[] }) {
  const [frame, width] = useWidth<HTMLDivElement>();
  const scroller = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [chosen, setChosen] = useState<heatmap.Place | null>(null);
  const { dp, pp, tp } = grid.topology;
  const shape = useMemo(
    () => heatmap.geometry({ dp, pp, tp }, Math.max(width - PADDING, 1), HEIGHT_MAXIMUM),
    [dp, pp, tp, width],
  );
  const cells = useMemo(() => new Map(grid.cells.map((cell) => [heatmap.key(cell), cell])), [grid]);
  const colors = scheme.value;

  useLayoutEffect(() => {
    if (canvas.current !== null && width > 0) paint(canvas.current, shape, grid, chosen);
  }, [shape, grid, chosen, colors, width]);

  const cell = chosen === null ? undefined : cells.get(heatmap.key(chosen));
  const rank = cell === undefined ? undefined : ranks.find((one) => one.rank === cell.rank);

  const onPointer = (event: PointerEvent): void => {
    setChosen(heatmap.placeAt(shape, event.offsetX, event.offsetY));
  };
  const onKey = (event: KeyboardEvent): void => {
    const arrow = ARROWS[event.key];
    if (event.key === "Escape") setChosen(null);
    if (arrow === undefined) return;
    event.preventDefault();
    const start = chosen ?? heatmap.slowest(grid) ?? { dp_rank: 0, pp_rank: 0, tp_rank: 0 };
    setChosen(chosen === null ? start : heatmap.neighbor(shape, chosen, ...arrow));
  };

  return (
    <div class="heatmap" ref={frame}>
      <StageLabels shape={shape} />
      <div class="heatmap-map">
        <div class="heatmap-frame" ref={scroller}>
          <canvas
            ref={canvas}
            tabIndex={0}
            role="img"
            aria-label={`Slowdown of ${format.plural(grid.cells.length, "rank")}. ${slowestText(grid)} Arrow keys move between ranks.`}
            aria-describedby="heatmap-cell"
            style={{ width: `${shape.width}px`, height: `${shape.height}px` }}
            onPointerMove={onPointer}
            onPointerDown={onPointer}
            onPointerLeave={() => {
              setChosen(null);
            }}
            onKeyDown={onKey}
            onBlur={() => {
              setChosen(null);
            }}
          />
        </div>
        {cell !== undefined && chosen !== null && (
          <Tooltip
            cell={cell}
            rank={rank}
            box={heatmap.box(shape, chosen)}
            scrolled={scroller.current?.scrollLeft ?? 0}
            width={width}
          />
        )}
      </div>
      <p id="heatmap-cell" role="status">
        {cell === undefined ? slowestText(grid) : cellText(cell, rank)}
      </p>
      <Legend />
      <RankTable grid={grid} ranks={ranks} />
    </div>
  );
}

const ARROWS: Readonly<Record<string, [right: number, down: number]>> = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowUp: [0, -1],
  ArrowDown: [0, 1],
};

function slowestText(grid: Grid): string {
  const worst = heatmap.slowest(grid);
  if (worst === null) return heatmap.unknownText(grid);
  return `Slowest: rank ${worst.rank}, ${format.slowdown(worst.slowdown)}${worst.node === null ? "" : `, on ${worst.node}`}.`;
}

function cellText(cell: GridCell, rank: Rank | undefined): string {
  return [`Rank ${cell.rank}`, format.slowdown(cell.slowdown), placeText(cell), operationText(rank), cell.node ?? "no node"]
    .filter((part) => part !== "")
    .join(", ");
}

function placeText(place: heatmap.Place): string {
  return `dp ${place.dp_rank} · stage ${place.pp_rank} · tp ${place.tp_rank}`;
}

function operationText(rank: Rank | undefined): string {
  if (rank?.operation == null) return "";
  return rank.operation_seconds === null
    ? rank.operation
    : `${rank.operation} for ${format.seconds(rank.operation_seconds)}`;
}

interface TooltipProps {
  cell: GridCell;
  rank: Rank | undefined;
  box: heatmap.Box;
  /** Horizontal scroll position of the map, in pixels. */
  scrolled: number;
  /** Width of the panel, in pixels. */
  width: number;
}

/** Outside the scrolling frame, which would clip it. */
function Tooltip({ cell, rank, box, scrolled, width }: TooltipProps) {
  const middle = box.x + box.width / 2 - scrolled;
  const left = Math.max(Math.min(middle, width - TOOLTIP_WIDTH / 2), TOOLTIP_WIDTH / 2);
  return (
    <div class="tooltip" style={{ left: `${left}px`, top: `${box.y + box.height + 6}px` }} aria-hidden>
      <strong>
        Rank {cell.rank} <span class="muted">{cell.node ?? "no node"}</span>
      </strong>
      <dl>
        <dt>Place</dt>
        <dd>{placeText(cell)}</dd>
        <dt>Slowdown</dt>
        <dd>{format.slowdown(cell.slowdown)}</dd>
        <dt>Self time</dt>
        <dd>{format.seconds(cell.self_seconds)} per step</dd>
        <dt>State</dt>
        <dd>{heatmap.stateOf(cell, rank)}</dd>
        {rank?.operation != null && (
          <>
            <dt>Operation</dt>
            <dd>{operationText(rank)}</dd>
          </>
        )}
      </dl>
    </div>
  );
}

function StageLabels({ shape }: { shape: heatmap.Geometry }) {
  const { dp, pp, tp } = shape.topology;
  const model = [pp > 1 && format.plural(pp, "stage"), tp > 1 && format.plural(tp, "tp rank")].filter(Boolean).join(" × ");
  const replicas = dp > 1 ? format.plural(dp, "dp replica") : "";
  const stageWidth = tp * shape.cellWidth;
  if (shape.turned || pp === 1 || stageWidth < 16) {
    const [columns, rows] = shape.turned ? [replicas, model] : [model, replicas];
    const axes = [columns && `columns: ${columns}`, rows && `rows: ${rows}`].filter(Boolean).join(", ");
    return axes === "" ? null : <p class="axis muted">{axes}</p>;
  }
  return (
    <div class="stages muted" aria-hidden style={{ gap: `${shape.gap}px` }}>
      {Array.from({ length: pp }, (_, stage) => (
        <span key={stage} style={{ width: `${stageWidth}px` }}>
          {stageWidth >= 60 ? `stage ${stage}` : stage}
        </span>
      ))}
    </div>
  );
}

function Legend() {
  return (
    <span class="legend muted">
      1× <i class="heat-scale" /> {heatmap.HOTTEST}× or more <i class="heat-unknown" /> unknown
    </span>
  );
}

function RankTable({ grid, ranks }: { grid: Grid; ranks: readonly Rank[] }) {
  const [open, setOpen] = useState(false);
  return (
    <details
      onToggle={(event) => {
        setOpen(event.currentTarget.open);
      }}
    >
      <summary>Ranks as a table</summary>
      {open && <RankRows grid={grid} ranks={ranks} />}
    </details>
  );
}

function RankRows({ grid, ranks }: { grid: Grid; ranks: readonly Rank[] }) {
  const byRank = new Map(ranks.map((rank) => [rank.rank, rank]));
  const few = grid.cells.length <= TABLE_ROWS;
  const rows = few
    ? [...grid.cells].sort((a, b) => a.rank - b.rank)
    : [...grid.cells].sort((a, b) => (b.slowdown ?? 0) - (a.slowdown ?? 0)).slice(0, TABLE_ROWS);
  return (
    <div class="scroll">
      <table>
        {!few && <caption>The {TABLE_ROWS} slowest of {format.number(grid.cells.length)} ranks</caption>}
        <thead>
          <tr>
            <th class="num">Rank</th>
            <th>Node</th>
            <th>Place</th>
            <th class="num">Slowdown</th>
            <th class="num">Step</th>
            <th>State</th>
            <th>Operation</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((cell) => {
            const rank = byRank.get(cell.rank);
            return (
              <tr key={cell.rank}>
                <td class="num">{cell.rank}</td>
                <td class="nowrap">{cell.node ?? format.UNKNOWN}</td>
                <td class="nowrap">{placeText(cell)}</td>
                <td class="num">{format.slowdown(cell.slowdown)}</td>
                <td class="num">{format.number(rank?.step)}</td>
                <td>{heatmap.stateOf(cell, rank)}</td>
                <td class="nowrap">{operationText(rank)}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function paint(
  canvas: HTMLCanvasElement,
  shape: heatmap.Geometry,
  grid: Grid,
  chosen: heatmap.Place | null,
): void {
  const ratio = heatmap.resolution(shape, devicePixelRatio);
  canvas.width = Math.round(shape.width * ratio);
  canvas.height = Math.round(shape.height * ratio);
  const context = canvas.getContext("2d");
  if (context === null) return;
  context.scale(ratio, ratio);
  context.imageSmoothingEnabled = false;
  const stops = ["--heat-0", "--heat-1", "--heat-2", "--heat-3"].map(colorOf);
  const unknown = colorOf("--heat-unknown");
  const image = heatmap.pixels(shape, grid.cells, stops, unknown);
  paintStages(context, shape, image);
  if (Math.min(shape.cellWidth, shape.cellHeight) >= 6) paintLines(context, shape);
  if (shape.cellWidth >= 34 && shape.cellHeight >= 22)
    paintTexts(context, shape, grid.cells, (cell) => heatmap.color(cell.slowdown, stops, unknown));
  if (chosen !== null) {
    const { x, y, width, height } = heatmap.box(shape, chosen);
    context.strokeStyle = variable("--text");
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, width - 2, height - 2);
  }
}

function paintStages(
  context: CanvasRenderingContext2D,
  shape: heatmap.Geometry,
  image: ReturnType<typeof heatmap.pixels>,
): void {
  const small = new OffscreenCanvas(image.columns, image.rows);
  small.getContext("2d")?.putImageData(new ImageData(image.data, image.columns, image.rows), 0, 0);
  const { pp, tp, dp } = shape.topology;
  for (let stage = 0; stage < pp; stage++) {
    const { x, y } = heatmap.box(shape, { dp_rank: 0, pp_rank: stage, tp_rank: 0 });
    if (shape.turned) context.drawImage(small, 0, stage * tp, dp, tp, x, y, shape.width, tp * shape.cellHeight);
    else context.drawImage(small, stage * tp, 0, tp, dp, x, y, tp * shape.cellWidth, shape.height);
  }
}

/** Thin lines between cells, in the panel's color. */
function paintLines(context: CanvasRenderingContext2D, shape: heatmap.Geometry): void {
  const { dp, pp, tp } = shape.topology;
  context.fillStyle = variable("--surface");
  for (let dp_rank = 1; dp_rank < dp; dp_rank++) {
    const { x, y } = heatmap.box(shape, { dp_rank, pp_rank: 0, tp_rank: 0 });
    if (shape.turned) context.fillRect(x - 0.5, 0, 1, shape.height);
    else context.fillRect(0, y - 0.5, shape.width, 1);
  }
  for (let pp_rank = 0; pp_rank < pp; pp_rank++) {
    for (let tp_rank = 1; tp_rank < tp; tp_rank++) {
      const { x, y } = heatmap.box(shape, { dp_rank: 0, pp_rank, tp_rank });
      if (shape.turned) context.fillRect(0, y - 0.5, shape.width, 1);
      else context.fillRect(x - 0.5, 0, 1, shape.height);
    }
  }
}

function paintTexts(
  context: CanvasRenderingContext2D,
  shape: heatmap.Geometry,
  cells: readonly GridCell[],
  ground: (cell: GridCell) => heatmap.Color,
): void {
  context.textBaseline = "middle";
  context.textAlign = "center";
  const two = shape.cellHeight >= 34;
  for (const cell of cells) {
    const { x, y, width, height } = heatmap.box(shape, cell);
    const middle = x + width / 2;
    context.fillStyle = `rgb(${heatmap.textOn(ground(cell)).join(" ")})`;
    context.font = "600 12px system-ui, sans-serif";
    context.fillText(format.slowdown(cell.slowdown), middle, y + height / 2 + (two ? 7 : 0.5));
    if (!two) continue;
    context.font = "10.5px system-ui, sans-serif";
    context.fillText(`rank ${cell.rank}`, middle, y + height / 2 - 8);
  }
}
