// Number formats. Unknown values are null and shown as a dash.
export const UNKNOWN = "–";

const THIN_SPACE = "\u202f";

type Maybe<T> = T | null | undefined;

/** "480 ms", "1.24 s", "4 min 05 s", "2 h 13 min", "3 d 4 h". */
export function seconds(value: Maybe<number>): string {
  if (value == null || !Number.isFinite(value)) return UNKNOWN;
  if (value < 0) return `−${seconds(-value)}`;
  if (value === 0) return unit("0", "s");
  if (value < 0.00995) return unit((value * 1e3).toFixed(2), "ms");
  if (value < 0.0995) return unit((value * 1e3).toFixed(1), "ms");
  if (value < 0.9995) return unit((value * 1e3).toFixed(0), "ms");
  if (value < 9.995) return unit(value.toFixed(2), "s");
  if (value < 59.95) return unit(value.toFixed(1), "s");
  const whole = Math.round(value);
  if (whole < 3600) return pair(Math.floor(whole / 60), "min", whole % 60, "s");
  const minutes = Math.round(value / 60);
  if (minutes < 1440) return pair(Math.floor(minutes / 60), "h", minutes % 60, "min");
  const hours = Math.round(value / 3600);
  return pair(Math.floor(hours / 24), "d", hours % 24, "h");
}

function pair(major: number, majorUnit: string, minor: number, minorUnit: string): string {
  return `${unit(String(major), majorUnit)} ${unit(String(minor).padStart(2, "0"), minorUnit)}`;
}

function unit(value: string, name: string): string {
  return `${value}${THIN_SPACE}${name}`;
}

/** 0.984 -> "98.4%". */
export function percent(ratio: Maybe<number>, digits = 1): string {
  if (ratio == null || !Number.isFinite(ratio)) return UNKNOWN;
  return `${(ratio * 100).toFixed(digits)}%`;
}

/** 0.62 -> "62%"; never 0% or 100%, because nothing is certain. */
export function likelihood(ratio: number): string {
  if (ratio > 0.99) return ">99%";
  return ratio < 0.01 ? "<1%" : percent(ratio, 0);
}

/** 2.5 -> "2.5×". */
export function slowdown(value: Maybe<number>): string {
  if (value == null || !Number.isFinite(value)) return UNKNOWN;
  return `${value.toFixed(value < 9.95 ? (value < 1.095 ? 2 : 1) : 0)}×`;
}

/** 1.2134 -> "1.21×". */
export function speedup(value: Maybe<number>): string {
  return value == null || !Number.isFinite(value) ? UNKNOWN : `${value.toFixed(2)}×`;
}

/** 12345.678 -> "12,346"; small numbers keep three significant digits. */
export function number(value: Maybe<number>): string {
  if (value == null || !Number.isFinite(value)) return UNKNOWN;
  return Math.abs(value) >= 100 || Number.isInteger(value)
    ? value.toLocaleString("en", { maximumFractionDigits: 0 })
    : value.toLocaleString("en", { maximumSignificantDigits: 3 });
}

/** A metric's value in the unit of its name; booleans as words. A counter of seconds is its rate, a share of time. */
export function measured(metric: string | null | undefined, value: number): string {
  if (metric == null) return number(value);
  if (metric.endsWith("_throttle_reason")) return value === 0 ? "off" : "on";
  if (metric.endsWith("_CLOCK")) return unit(number(value), "MHz");
  if (metric.endsWith("_TEMP")) return celsius(value);
  if (metric.endsWith("POWER_USAGE")) return watts(value);
  if (metric.endsWith("_mhz")) return unit(number(value), "MHz");
  if (metric.endsWith("_celsius")) return celsius(value);
  if (metric.endsWith("_seconds")) return seconds(value);
  if (metric.endsWith("_bytes")) return bytes(value);
  if (metric.endsWith("_UTIL")) return percent(value / 100);
  if (/_(ratio|share|seconds_total)$/.test(metric)) return percent(value);
  return number(value);
}

/** 1610612736 -> "1.5 GiB". */
export function bytes(value: Maybe<number>): string {
  if (value == null || !Number.isFinite(value)) return UNKNOWN;
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(Math.floor(Math.log2(value) / 10), names.length - 1);
  return unit(number(value / 1024 ** power), names[power] ?? "B");
}

export function loss(value: Maybe<number>): string {
  if (value == null) return UNKNOWN;
  if (!Number.isFinite(value)) return String(value);
  return Math.abs(value) >= 1000 || (value !== 0 && Math.abs(value) < 0.001)
    ? value.toExponential(2)
    : value.toFixed(3);
}

export function hertz(value: Maybe<number>): string {
  return value == null ? UNKNOWN : unit((value / 1e6).toFixed(0), "MHz");
}

export function celsius(value: Maybe<number>): string {
  return value == null ? UNKNOWN : unit(value.toFixed(0), "°C");
}

export function watts(value: Maybe<number>): string {
  return value == null ? UNKNOWN : unit(value.toFixed(0), "W");
}

/** "just now", "12 s ago", "3 min ago", "2 h ago", "5 d ago". */
export function ago(time: string | number, now: number): string {
  const passed = (now - milliseconds(time)) / 1000;
  if (passed < 1.5) return "just now";
  if (passed < 90) return `${unit(passed.toFixed(0), "s")} ago`;
  if (passed < 5400) return `${unit((passed / 60).toFixed(0), "min")} ago`;
  if (passed < 129600) return `${unit((passed / 3600).toFixed(0), "h")} ago`;
  return `${unit((passed / 86400).toFixed(0), "d")} ago`;
}

/** Local time of day, "03:12:45"; with the date when it is another day than `now`. */
export function clock(time: string | number, now: number = Date.now()): string {
  const date = new Date(milliseconds(time));
  const day = date.toDateString() === new Date(now).toDateString() ? "" : `${isoDay(date)} `;
  return day + date.toLocaleTimeString("en-GB");
}

/** "28 Nov", in local time. */
export function day(time: number): string {
  return new Date(time).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}

function isoDay(date: Date): string {
  const two = (value: number): string => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
}

export function milliseconds(time: string | number): number {
  return typeof time === "number" ? time : Date.parse(time);
}

export function topology(value: { dp: number; pp: number; tp: number; cp?: number; ep?: number }): string {
  const further = [["cp", value.cp ?? 1], ["ep", value.ep ?? 1]] as const;
  const used = further.filter(([, size]) => size > 1).map(([axis, size]) => ` × ${axis}${size}`);
  return `dp${value.dp} × pp${value.pp} × tp${value.tp}${used.join("")}`;
}

/** [0, 1, 2, 5] -> "0–2, 5". */
export function ranges(values: readonly number[]): string {
  const sorted = [...values].sort((a, b) => a - b);
  const parts: string[] = [];
  for (let start = 0; start < sorted.length; ) {
    let end = start;
    while (sorted[end + 1] === (sorted[end] ?? NaN) + 1) end++;
    const [first, last] = [sorted[start] ?? 0, sorted[end] ?? 0];
    parts.push(first === last ? `${first}` : last === first + 1 ? `${first}, ${last}` : `${first}–${last}`);
    start = end + 1;
  }
  return parts.length === 0 ? "none" : parts.join(", ");
}

/** "sw_thermal_slowdown" -> "sw thermal slowdown". */
export function words(name: string): string {
  return name.replaceAll("_", " ");
}

export function plural(count: number, noun: string): string {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** "step 30", "steps 30–37". */
export function steps(first: number, last: number): string {
  return first === last ? `step ${number(first)}` : `steps ${number(first)}–${number(last)}`;
}
