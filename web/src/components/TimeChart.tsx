import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";

import type { Step } from "../api";
import { ceiling, known, timeLabels, type Mark, type Points } from "../chart";
import * as format from "../format";
import { useWidth } from "./size";
import { scheme, variable } from "./theme";

interface Props {
  title: string;
  points: Points;
  marks: readonly Mark[];
  format: (value: number | null) => string;
  /** Format of the axis labels; default `format`. */
  axis?: (value: number) => string;
  color: `--${string}`;
  height: number;
  fromZero: boolean;
  labels: boolean;
}

/** Possible distances of labels on the time axis, which has no fractions of a second. */
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 604800];

/** One series over wall time. Charts of one page share their cursor. */
export function TimeChart(props: Props) {
  const { points, marks, color, height } = props;
  const [frame, width] = useWidth<HTMLDivElement>();
  const readout = useRef<HTMLSpanElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const colors = scheme.value;

  useEffect(() => {
    const target = frame.current;
    if (target === null || width === 0) return;
    const chart = create(target, width, height, color, latest, readout);
    plot.current = chart;
    return () => {
      chart.destroy();
      plot.current = null;
    };
  }, [frame, width, height, color, colors]);

  useEffect(() => {
    plot.current?.setData([points.times, points.values]);
  }, [points, marks]);

  return (
    <figure class="chart">
      <figcaption>
        <span>{props.title}</span>
        <span class="readout" ref={readout} />
      </figcaption>
      <div ref={frame} style={{ height: `${height}px` }} />
    </figure>
  );
}

function create(
  target: HTMLElement,
  width: number,
  height: number,
  color: string,
  latest: { current: Props },
  readout: { current: HTMLElement | null },
): uPlot {
  const text = variable("--text-2");
  const axis: uPlot.Axis = {
    stroke: text,
    font: "11px system-ui, sans-serif",
    grid: { stroke: variable("--grid"), width: 1 },
    ticks: { show: false },
  };
  const options: uPlot.Options = {
    width,
    height,
    legend: { show: false },
    cursor: { sync: { key: "job" }, drag: { x: false, y: false }, points: { size: 6 }, y: false },
    scales: {
      x: { time: true, range: (_, low, high) => [low, Math.max(high, lastMark(latest.current.marks), low + 1)] },
      y: {
        range: (_, low, high): uPlot.Range.MinMax =>
          latest.current.fromZero ? [0, ceiling(known(latest.current.points))] : spread(low, high),
      },
    },
    axes: [
      { ...axis, space: 70, size: 28, incrs: SECONDS, values: (_, splits) => timeLabels(splits) },
      {
        ...axis,
        size: 58,
        space: height < 150 ? 16 : 24,
        values: (_, splits) => splits.map(latest.current.axis ?? latest.current.format),
      },
    ],
    series: [
      {},
      { stroke: variable(color), width: 1.5, points: { show: () => known(latest.current.points).length < 40 } },
    ],
    hooks: {
      drawClear: [(chart) => { bands(chart, latest.current.marks); }],
      draw: [(chart) => { lines(chart, latest.current.marks, latest.current.labels); }],
      setCursor: [(chart) => { showValue(chart, latest.current, readout.current); }],
      setData: [(chart) => { showValue(chart, latest.current, readout.current); }],
    },
  };
  const { points } = latest.current;
  const chart = new uPlot(options, [points.times, points.values], target);
  showValue(chart, latest.current, readout.current);
  return chart;
}

/** The end of the last mark: a hang or a restart may follow the last step. */
function lastMark(marks: readonly Mark[]): number {
  return marks.reduce((last, { at, until }) => Math.max(last, until ?? at), -Infinity);
}

function spread(low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low === null || high === null) return [0, 1];
  const margin = (high - low) * 0.1 || Math.abs(high) * 0.05 || 1;
  return [low - margin, high + margin];
}

/** The value under the cursor, or the newest one. */
function showValue(chart: uPlot, { points, format: show }: Props, target: HTMLElement | null): void {
  if (target === null) return;
  const under = chart.cursor.idx;
  const index = under ?? points.values.findLastIndex((value) => value != null);
  const step: Step | null | undefined = points.steps[index];
  if (step == null) {
    target.textContent = "";
    return;
  }
  const at = under == null ? "" : ` · ${format.clock((points.times[index] ?? 0) * 1000)}`;
  target.textContent = `step ${format.number(step.step)}${at} · ${show(points.values[index] ?? null)}`;
}

/** Shade the time between generations. */
function bands(chart: uPlot, marks: readonly Mark[]): void {
  const { ctx, bbox } = chart;
  ctx.save();
  clip(chart);
  ctx.fillStyle = variable("--band");
  for (const mark of marks) {
    if (mark.until === null) continue;
    const from = chart.valToPos(mark.at, "x", true);
    ctx.fillRect(from, bbox.top, Math.max(chart.valToPos(mark.until, "x", true) - from, 1), bbox.height);
  }
  ctx.restore();
}

function lines(chart: uPlot, marks: readonly Mark[], labels: boolean): void {
  const { ctx, bbox } = chart;
  const ratio = uPlot.pxRatio;
  ctx.save();
  clip(chart);
  ctx.lineWidth = ratio;
  ctx.font = `${10.5 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  // End of the text in each of two rows, so that labels never overlap.
  const ends = [-Infinity, -Infinity];
  for (const mark of marks) {
    const x = Math.round(chart.valToPos(mark.until ?? mark.at, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = variable(`--${mark.tone}`);
    ctx.setLineDash(mark.dashed ? [3 * ratio, 3 * ratio] : []);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (!labels) continue;
    const length = ctx.measureText(mark.label).width + 8 * ratio;
    const left = x + length > bbox.left + bbox.width ? x - length : x;
    const row = ends.findIndex((end) => end <= left);
    if (row < 0) continue;
    ends[row] = left + length;
    ctx.fillText(mark.label, left + 4 * ratio, bbox.top + (2 + row * 13) * ratio);
  }
  ctx.restore();
}

function clip({ ctx, bbox }: uPlot): void {
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
}
