import type { ComponentChildren } from "preact";

import type { WhatIf as Replay } from "../api";
import * as format from "../format";
import * as whatIf from "../whatif";

/** Where the time of the last steps is lost, and the gain of fixing each part. */
export function WhatIf({ replay }: { replay: Replay }) {
  if (replay.slowdown == null) return <p class="empty">{replay.verdict.text}</p>;
  return (
    <div class="what-if">
      <p>{replay.verdict.text}</p>
      <Fixes replay={replay} />
      {replay.topology.pp > 1 && <Advice replay={replay} />}
      <AllSlowdowns replay={replay} />
    </div>
  );
}

function Fixes({ replay }: { replay: Replay }) {
  const { fixes, step_seconds } = replay;
  if (fixes.length === 0) return null;
  const most = Math.max(...fixes.map(({ speedup }) => speedup)) - 1;
  return (
    <div class="scroll">
      <table class="gains">
        <thead>
          <tr>
            <th>If this part were as fast as its peers</th>
            <th class="wide">
              <span class="sr">Bar</span>
            </th>
            <th class="num">Gain</th>
            <th class="num">Step</th>
          </tr>
        </thead>
        <tbody>
          {fixes.map(({ kind, target, speedup }) => (
            <tr key={target}>
              <th scope="row">{kind === "optype" ? <Optype name={target} /> : target}</th>
              <td class="wide">
                <Bar ratio={(speedup - 1) / most} />
              </td>
              <td class="num">
                <b>{format.speedup(speedup)}</b>
              </td>
              <td class="num">{format.seconds(step_seconds == null ? null : step_seconds / speedup)}</td>
            </tr>
          ))}
        </tbody>
        <caption>
          A step takes {format.seconds(step_seconds)} now. The rows overlap: a slow rank slows its stage, too.
        </caption>
      </table>
    </div>
  );
}

function Optype({ name }: { name: string }) {
  return <span title={name}>{whatIf.optypeLabel(name)}</span>;
}

function Bar({ ratio }: { ratio: number }) {
  return (
    <span class="bar" aria-hidden>
      <i style={{ width: `${Math.max(0, ratio) * 100}%` }} />
    </span>
  );
}

function Advice({ replay }: { replay: Replay }) {
  const { advice } = replay;
  return (
    <div class="evidence">
      <h3>Other pipeline schedules (simulated)</h3>
      {advice.length === 0 ? (
        <p class="muted">No simulated schedule gains 2% or saves memory.</p>
      ) : (
        <div class="scroll">
          <table class="advised">
            <thead>
              <tr>
                <th>Change</th>
                <th class="num">Gain</th>
                <th class="num">Bubble</th>
                <th class="num" title="peak stage memory relative to now">
                  Activation memory
                </th>
              </tr>
            </thead>
            <tbody>
              {advice.map((each) => (
                <tr key={each.change}>
                  <td>{each.change}</td>
                  <td class="num">
                    <b>{format.speedup(each.speedup)}</b>
                  </td>
                  <td class="num">
                    {format.percent(each.bubble_ratio_now, 0)} → {format.percent(each.bubble_ratio, 0)}
                  </td>
                  <td class="num">{format.speedup(each.memory_ratio)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </div>
  );
}

/** All figures of `paceline analyze`. */
function AllSlowdowns({ replay }: { replay: Replay }) {
  return (
    <details class="muted">
      <summary>All slowdowns</summary>
      <p>
        S = {replay.slowdown?.toFixed(3)}: the step as it was against one in which each operation takes the mean of
        its kind (the median, if it communicates). Below, with only this part as it was. The slowest workers
        explain {format.percent(replay.m_w, 0)} of the slowdown (M<sub>W</sub>)
        {Object.keys(replay.slowdown_by_stage).length > 1 && (
          <>
            , the last stage {format.percent(replay.m_s, 0)} (M<sub>S</sub>)
          </>
        )}
        .
      </p>
      <div class="slowdowns">
        <Slowdowns title="Operation" values={replay.slowdown_by_optype} name={(key) => <Optype name={key} />} />
        <Slowdowns title="Stage" values={replay.slowdown_by_stage} name={(key) => `stage ${key}`} />
        <Slowdowns title="dp rank" values={replay.slowdown_by_dp_rank} name={(key) => `dp rank ${key}`} />
      </div>
    </details>
  );
}

interface SlowdownsProps {
  title: string;
  values: Readonly<Record<string, number>>;
  name: (key: string) => ComponentChildren;
}

function Slowdowns({ title, values, name }: SlowdownsProps) {
  const worst = whatIf.worst(values);
  const more = Object.keys(values).length - worst.length;
  return (
    <table>
      <thead>
        <tr>
          <th>{title}</th>
          <th class="num">Slowdown</th>
        </tr>
      </thead>
      <tbody>
        {worst.map(([key, value]) => (
          <tr key={key}>
            <td>{name(key)}</td>
            <td class="num">{value.toFixed(3)}</td>
          </tr>
        ))}
        {more > 0 && (
          <tr>
            <td colSpan={2}>{format.number(more)} more, less slow</td>
          </tr>
        )}
      </tbody>
    </table>
  );
}
