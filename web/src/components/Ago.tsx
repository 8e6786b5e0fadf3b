import * as format from "../format";
import { now } from "./clock";

/** "12 s ago", with the exact time on hover. */
export function Ago({ time }: { time: string | number }) {
  const date = new Date(time);
  return (
    <time dateTime={date.toISOString()} title={date.toLocaleString()}>
      {format.ago(time, now.value)}
    </time>
  );
}
