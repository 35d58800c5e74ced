// Charts as SVG, each with a sentence for screen readers and a table of its numbers.

import { Fragment, h } from "./vendor/preact.js";
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import type { Bin, Point } from "./api.js";
import { fixed, num, plural } from "./format.js";

export interface Series {
  name: string;
  points: readonly Point[];
  /** Number of the colour, 0 to 7. */
  color: number;
  /** Draw the points with error bars, such as evaluations. */
  hasDots?: boolean;
}

const LEFT = 46;
const RIGHT = 12;
const TOP = 8;
const BOTTOM = 22;

interface Scale {
  low: number;
  high: number;
  at: (value: number) => number;
}

function scale(values: readonly number[], from: number, to: number, margin: number): Scale {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (low === high) {
    low -= 0.5;
    high += 0.5;
  }
  low -= margin * (high - low);
  high += margin * (high - low);
  return { low, high, at: (value) => from + ((value - low) / (high - low)) * (to - from) };
}

/** Return round numbers between the ends of a scale, about `count` of them. */
export function ticks(low: number, high: number, count: number): number[] {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? rough;
  const first = Math.ceil(low / step);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}

function line(points: readonly Point[], x: Scale, y: Scale): string {
  return points.map((p, n) => `${n ? "L" : "M"}${x.at(p.x).toFixed(1)},${y.at(p.y).toFixed(1)}`).join("");
}

function band(points: readonly Point[], x: Scale, y: Scale): string {
  const known = points.filter((p) => p.low !== null && p.high !== null);
  if (known.length < 2) return "";
  const edge = (p: Point, value: number | null) => `${x.at(p.x).toFixed(1)},${y.at(value ?? p.y).toFixed(1)}`;
  const upper = known.map((p) => edge(p, p.high));
  const lower = [...known].reverse().map((p) => edge(p, p.low));
  return `M${[...upper, ...lower].join("L")}Z`;
}

function withInterval(point: Point): string {
  const interval = point.low === null || point.high === null ? "" : ` (${num(point.low)} to ${num(point.high)})`;
  return num(point.y, 4) + interval;
}

function sentence(label: string, unit: string, series: readonly Series[]): string {
  const ends = series.map((s) => {
    const [first, last] = [s.points[0], s.points.at(-1)];
    if (!first || !last) return "";
    return `${s.name} from ${num(first.y)} at ${unit} ${num(first.x)} to ${num(last.y)} at ${unit} ${num(last.x)}`;
  });
  return `${label} by ${unit}: ${ends.filter(Boolean).join("; ")}.`;
}

/** Draw curves with their intervals. The arrow keys move from step to step; Enter opens a step. */
export function Chart(props: {
  label: string;
  series: readonly Series[];
  unit?: string;
  height?: number;
  onPick?: ((x: number) => void) | undefined;
}) {
  const box = useRef<HTMLElement>(null);
  const [width, setWidth] = useState(520);
  const [at, setAt] = useState<number | null>(null);
  const [isTable, setTable] = useState(false);
  useEffect(() => {
    if (!box.current) return undefined;
    const observer = new ResizeObserver(([entry]) => {
      if (entry) setWidth(Math.max(220, entry.contentRect.width));
    });
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const unit = props.unit ?? "step";
  const series = props.series.filter((s) => s.points.length);
  const steps = [...new Set(series.flatMap((s) => s.points.map((p) => p.x)))].sort((a, b) => a - b);
  return (
    <figure class="chart" ref={box}>
      <figcaption class="row between">
        <h3>{props.label}</h3>
        <span class="row">
          {series.length > 1 && <Legend series={series} />}
          {steps.length > 0 && (
            <button type="button" class="small quiet" aria-pressed={isTable} onClick={() => setTable(!isTable)}>
              {isTable ? "chart" : "table"}
            </button>
          )}
        </span>
      </figcaption>
      {steps.length === 0 ? (
        <p class="muted">no values yet</p>
      ) : isTable ? (
        <ChartTable series={series} steps={steps} unit={unit} label={props.label} />
      ) : (
        <Curves
          {...{ series, steps, unit, width, at, setAt }}
          label={props.label}
          height={props.height ?? 190}
          onPick={props.onPick}
        />
      )}
    </figure>
  );
}

function Legend(props: { series: readonly Series[] }) {
  return (
    <span class="legend">
      {props.series.map((s) => (
        <span key={s.name}>
          <i class={`c${s.color % 8}`} aria-hidden="true" />
          {s.name}
        </span>
      ))}
    </span>
  );
}

function ChartTable(props: { series: readonly Series[]; steps: readonly number[]; unit: string; label: string }) {
  const byStep = props.series.map((s) => new Map(s.points.map((p) => [p.x, p])));
  return (
    <div class="scroller short" role="region" tabIndex={0} aria-label={`numbers of ${props.label}`}>
      <table>
        <thead>
          <tr>
            <th scope="col">{props.unit}</th>
            {props.series.map((s) => (
              <th scope="col" class="number" key={s.name}>
                {s.name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {props.steps.map((step) => (
            <tr key={step}>
              <td>{num(step)}</td>
              {byStep.map((points, n) => {
                const point = points.get(step);
                return (
                  <td class="number" key={n}>
                    {point ? withInterval(point) : ""}
                  </td>
                );
              })}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Curves(props: {
  label: string;
  unit: string;
  series: readonly Series[];
  steps: readonly number[];
  width: number;
  height: number;
  at: number | null;
  setAt: (x: number | null) => void;
  onPick: ((x: number) => void) | undefined;
}) {
  const { series, steps, width, height, at, setAt, onPick, unit } = props;
  const points = series.flatMap((s) => s.points);
  const x = scale(steps, LEFT, width - RIGHT, 0);
  const extremes = points.flatMap((p) => [p.low ?? p.y, p.high ?? p.y]);
  const y = scale(extremes, height - BOTTOM, TOP, 0.04);
  const nearest = (event: MouseEvent) => {
    const left = (event.currentTarget as Element).getBoundingClientRect().left;
    const place = event.clientX - left;
    const distance = (step: number) => Math.abs(x.at(step) - place);
    setAt(steps.reduce((best, step) => (distance(step) < distance(best) ? step : best), steps[0] ?? 0));
  };
  const move = (event: KeyboardEvent) => {
    const index = at === null ? -1 : steps.indexOf(at);
    const last = steps.length - 1;
    if (event.key === "ArrowRight") setAt(steps[Math.min(last, index + 1)] ?? null);
    else if (event.key === "ArrowLeft") setAt(steps[index < 0 ? last : Math.max(0, index - 1)] ?? null);
    else if (event.key === "Home") setAt(steps[0] ?? null);
    else if (event.key === "End") setAt(steps[last] ?? null);
    else if (event.key === "Escape") setAt(null);
    else if (event.key === "Enter" && at !== null && onPick) onPick(at);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const xTicks = ticks(x.low, x.high, Math.max(2, width / 90)).filter(Number.isInteger);
  return (
    <Fragment>
      <svg
        viewBox={`0 0 ${width} ${height}`}
        height={height}
        role="img"
        aria-label={sentence(props.label, unit, series)}
        tabindex={0}
        class={onPick ? "clickable" : ""}
        onMouseMove={nearest}
        onMouseLeave={() => setAt(null)}
        onKeyDown={move}
        onClick={() => at !== null && onPick?.(at)}
      >
        {ticks(y.low, y.high, 4).map((value) => (
          <g key={value}>
            <line class="rule" x1={LEFT} x2={width - RIGHT} y1={y.at(value)} y2={y.at(value)} />
            <text x={LEFT - 6} y={y.at(value) + 4} text-anchor="end">
              {num(value, 4)}
            </text>
          </g>
        ))}
        {xTicks.map((value) => (
          <text key={value} x={x.at(value)} y={height - 5} text-anchor="middle">
            {value}
          </text>
        ))}
        {series.map((s, n) => (
          <g key={s.name} class={`c${s.color % 8}`} data-series={s.name}>
            {!s.hasDots && <path class="band" d={band(s.points, x, y)} />}
            <path
              class={s.hasDots ? "curve thin" : "curve"}
              style={s.hasDots ? {} : { strokeWidth: widthOf(series.length - n) }}
              d={line(s.points, x, y)}
            />
            {(s.hasDots || s.points.length === 1) && s.points.map((p) => <Dot key={p.x} point={p} x={x} y={y} />)}
          </g>
        ))}
        {at !== null && <line class="cursor" x1={x.at(at)} x2={x.at(at)} y1={TOP} y2={height - BOTTOM} />}
      </svg>
      {at !== null && (
        <div class="tip" role="status" style={{ left: `${Math.max(0, Math.min(width - 210, x.at(at) + 10))}px` }}>
          <b>
            {unit} {num(at)}
          </b>
          {series.map((s) => {
            const point = s.points.find((p) => p.x === at);
            return (
              point && (
                <div key={s.name}>
                  <i class={`key c${s.color % 8}`} aria-hidden="true" /> {s.name}: {withInterval(point)}
                </div>
              )
            );
          })}
          {onPick && <div class="muted">click: its rollouts</div>}
        </div>
      )}
    </Fragment>
  );
}

/** Return the width of a curve; those below others are wider, so that equal curves are all seen. */
function widthOf(curvesAbove: number): string {
  return `${Math.min(6, 1.8 + 1.6 * (curvesAbove - 1))}px`;
}

function Dot(props: { point: Point; x: Scale; y: Scale }) {
  const { point, x, y } = props;
  const place = x.at(point.x);
  return (
    <g>
      {point.low !== null && point.high !== null && (
        <line class="error" x1={place} x2={place} y1={y.at(point.low)} y2={y.at(point.high)} />
      )}
      <circle cx={place} cy={y.at(point.y)} r="4" />
    </g>
  );
}

/** Draw a small curve without axes. */
export function Sparkline(props: { values: readonly (number | null)[]; label: string }) {
  const points = props.values.flatMap((value, n) => (value === null ? [] : [{ x: n, y: value, low: null, high: null }]));
  if (points.length < 2) return <span class="muted">–</span>;
  const x = scale(points.map((p) => p.x), 2, 108, 0);
  const y = scale(points.map((p) => p.y), 22, 4, 0);
  const [first, last] = [points[0], points.at(-1)];
  return (
    <svg class="spark c0" width="110" height="26" role="img" aria-label={`${props.label} from ${num(first?.y)} to ${num(last?.y)}`}>
      <path class="curve" d={line(points, x, y)} />
    </svg>
  );
}

/** Draw a histogram whose bars are filters. */
export function Histogram(props: {
  bins: readonly Bin[];
  label: string;
  low: number | null;
  high: number | null;
  onPick: (bin: Bin) => void;
}) {
  const most = Math.max(1, ...props.bins.map((bin) => bin.n));
  const isChosen = (bin: Bin) =>
    (props.low === null || bin.high > props.low) && (props.high === null || bin.low <= props.high);
  return (
    <div class="histogram" role="group" aria-label={props.label}>
      {props.bins.map((bin) => {
        const text = `${fixed(bin.low)} to ${fixed(bin.high)}: ${plural(bin.n, "rollout")}`;
        return (
          <button type="button" key={bin.low} title={text} aria-label={text} disabled={bin.n === 0} onClick={() => props.onPick(bin)}>
            <i
              class={isChosen(bin) ? "chosen" : ""}
              style={{ height: `${bin.n ? 2 + (34 * bin.n) / most : 1}px` }}
            />
          </button>
        );
      })}
    </div>
  );
}

/** Draw values on a line: the rewards of a group, with its mean. */
export function Strip(props: {
  values: readonly { value: number; title: string; isThis?: boolean }[];
  mean: number | null;
  low: number;
  high: number;
}) {
  const place = (value: number) => `${(100 * (value - props.low)) / (props.high - props.low || 1)}%`;
  const text = `rewards ${props.values.map((v) => num(v.value)).join(", ")}; mean ${num(props.mean)}`;
  return (
    <div class="strip" role="img" aria-label={text}>
      {props.mean !== null && <u style={{ left: place(props.mean) }} title={`mean ${num(props.mean)}`} />}
      {props.values.map((v, n) => (
        <i key={n} class={v.isThis ? "this" : ""} style={{ left: place(v.value) }} title={v.title} />
      ))}
    </div>
  );
}
