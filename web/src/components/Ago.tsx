import { serverAhead } from "../api";
import * as format from "../format";
import { now } from "./clock";

/** "12 s ago", with the exact time on hover. A text is a time of the server, a number one of the browser. */
export function Ago({ time }: { time: string | number }) {
  const date = new Date(time);
  return (
    <time dateTime={date.toISOString()} title={date.toLocaleString()}>
      {format.ago(time, typeof time === "string" ? now.value + serverAhead.value : now.value)}
    </time>
  );
}
