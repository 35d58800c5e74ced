// Charts as SVG, each with a sentence for screen readers and a table of its numbers.
import { Fragment, h } from "./vendor/preact.js";
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { fixed, num, plural } from "./format.js";
const LEFT = 46;
const RIGHT = 12;
const TOP = 8;
const BOTTOM = 22;
function scale(values, from, to, margin) {
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
export function ticks(low, high, count) {
    const rough = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? rough;
    const first = Math.ceil(low / step);
    const last = Math.floor(high / step + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}
function line(points, x, y) {
    return points.map((p, n) => `${n ? "L" : "M"}${x.at(p.x).toFixed(1)},${y.at(p.y).toFixed(1)}`).join("");
}
function band(points, x, y) {
    const known = points.filter((p) => p.low !== null && p.high !== null);
    if (known.length < 2)
        return "";
    const edge = (p, value) => `${x.at(p.x).toFixed(1)},${y.at(value ?? p.y).toFixed(1)}`;
    const upper = known.map((p) => edge(p, p.high));
    const lower = [...known].reverse().map((p) => edge(p, p.low));
    return `M${[...upper, ...lower].join("L")}Z`;
}
function withInterval(point) {
    const interval = point.low === null || point.high === null ? "" : ` (${num(point.low)} to ${num(point.high)})`;
    return num(point.y, 4) + interval;
}
function sentence(label, unit, series) {
    const ends = series.map((s) => {
        const [first, last] = [s.points[0], s.points.at(-1)];
        if (!first || !last)
            return "";
        return `${s.name} from ${num(first.y)} at ${unit} ${num(first.x)} to ${num(last.y)} at ${unit} ${num(last.x)}`;
    });
    return `${label} by ${unit}: ${ends.filter(Boolean).join("; ")}.`;
}
/** Draw curves with their intervals. The arrow keys move from step to step; Enter opens a step. */
export function Chart(props) {
    const box = useRef(null);
    const [width, setWidth] = useState(520);
    const [at, setAt] = useState(null);
    const [isTable, setTable] = useState(false);
    useEffect(() => {
        if (!box.current)
            return undefined;
        const observer = new ResizeObserver(([entry]) => {
            if (entry)
                setWidth(Math.max(220, entry.contentRect.width));
        });
        observer.observe(box.current);
        return () => observer.disconnect();
    }, []);
    const unit = props.unit ?? "step";
    const series = props.series.filter((s) => s.points.length);
    const steps = [...new Set(series.flatMap((s) => s.points.map((p) => p.x)))].sort((a, b) => a - b);
    return (h("figure", { class: "chart", ref: box },
        h("figcaption", { class: "row between" },
            h("h3", null, props.label),
            h("span", { class: "row" },
                series.length > 1 && h(Legend, { series: series }),
                steps.length > 0 && (h("button", { type: "button", class: "small quiet", "aria-pressed": isTable, onClick: () => setTable(!isTable) }, isTable ? "chart" : "table")))),
        steps.length === 0 ? (h("p", { class: "muted" }, "no values yet")) : isTable ? (h(ChartTable, { series: series, steps: steps, unit: unit, label: props.label })) : (h(Curves, { series, steps, unit, width, at, setAt, label: props.label, height: props.height ?? 190, onPick: props.onPick }))));
}
function Legend(props) {
    return (h("span", { class: "legend" }, props.series.map((s) => (h("span", { key: s.name },
        h("i", { class: `c${s.color % 8}`, "aria-hidden": "true" }),
        s.name)))));
}
function ChartTable(props) {
    const byStep = props.series.map((s) => new Map(s.points.map((p) => [p.x, p])));
    return (h("div", { class: "scroller short", role: "region", tabIndex: 0, "aria-label": `numbers of ${props.label}` },
        h("table", null,
            h("thead", null,
                h("tr", null,
                    h("th", { scope: "col" }, props.unit),
                    props.series.map((s) => (h("th", { scope: "col", class: "number", key: s.name }, s.name))))),
            h("tbody", null, props.steps.map((step) => (h("tr", { key: step },
                h("td", null, num(step)),
                byStep.map((points, n) => {
                    const point = points.get(step);
                    return (h("td", { class: "number", key: n }, point ? withInterval(point) : ""));
                }))))))));
}
function Curves(props) {
    const { series, steps, width, height, at, setAt, onPick, unit } = props;
    const points = series.flatMap((s) => s.points);
    const x = scale(steps, LEFT, width - RIGHT, 0);
    const extremes = points.flatMap((p) => [p.low ?? p.y, p.high ?? p.y]);
    const y = scale(extremes, height - BOTTOM, TOP, 0.04);
    const nearest = (event) => {
        const left = event.currentTarget.getBoundingClientRect().left;
        const place = event.clientX - left;
        const distance = (step) => Math.abs(x.at(step) - place);
        setAt(steps.reduce((best, step) => (distance(step) < distance(best) ? step : best), steps[0] ?? 0));
    };
    const move = (event) => {
        const index = at === null ? -1 : steps.indexOf(at);
        const last = steps.length - 1;
        if (event.key === "ArrowRight")
            setAt(steps[Math.min(last, index + 1)] ?? null);
        else if (event.key === "ArrowLeft")
            setAt(steps[index < 0 ? last : Math.max(0, index - 1)] ?? null);
        else if (event.key === "Home")
            setAt(steps[0] ?? null);
        else if (event.key === "End")
            setAt(steps[last] ?? null);
        else if (event.key === "Escape")
            setAt(null);
        else if (event.key === "Enter" && at !== null && onPick)
            onPick(at);
        else
            return;
        event.preventDefault();
        event.stopPropagation();
    };
    const xTicks = ticks(x.low, x.high, Math.max(2, width / 90)).filter(Number.isInteger);
    return (h(Fragment, null,
        h("svg", { viewBox: `0 0 ${width} ${height}`, height: height, role: "img", "aria-label": sentence(props.label, unit, series), tabindex: 0, class: onPick ? "clickable" : "", onMouseMove: nearest, onMouseLeave: () => setAt(null), onKeyDown: move, onClick: () => at !== null && onPick?.(at) },
            ticks(y.low, y.high, 4).map((value) => (h("g", { key: value },
                h("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y.at(value), y2: y.at(value) }),
                h("text", { x: LEFT - 6, y: y.at(value) + 4, "text-anchor": "end" }, num(value, 4))))),
            xTicks.map((value) => (h("text", { key: value, x: x.at(value), y: height - 5, "text-anchor": "middle" }, value))),
            series.map((s, n) => (h("g", { key: s.name, class: `c${s.color % 8}`, "data-series": s.name },
                !s.hasDots && h("path", { class: "band", d: band(s.points, x, y) }),
                h("path", { class: s.hasDots ? "curve thin" : "curve", style: s.hasDots ? {} : { strokeWidth: widthOf(series.length - n) }, d: line(s.points, x, y) }),
                (s.hasDots || s.points.length === 1) && s.points.map((p) => h(Dot, { key: p.x, point: p, x: x, y: y }))))),
            at !== null && h("line", { class: "cursor", x1: x.at(at), x2: x.at(at), y1: TOP, y2: height - BOTTOM })),
        at !== null && (h("div", { class: "tip", role: "status", style: { left: `${Math.max(0, Math.min(width - 210, x.at(at) + 10))}px` } },
            h("b", null,
                unit,
                " ",
                num(at)),
            series.map((s) => {
                const point = s.points.find((p) => p.x === at);
                return (point && (h("div", { key: s.name },
                    h("i", { class: `key c${s.color % 8}`, "aria-hidden": "true" }),
                    " ",
                    s.name,
                    ": ",
                    withInterval(point))));
            }),
            onPick && h("div", { class: "muted" }, "click: its rollouts")))));
}
/** Return the width of a curve; those below others are wider, so that equal curves are all seen. */
function widthOf(curvesAbove) {
    return `${Math.min(6, 1.8 + 1.6 * (curvesAbove - 1))}px`;
}
function Dot(props) {
    const { point, x, y } = props;
    const place = x.at(point.x);
    return (h("g", null,
        point.low !== null && point.high !== null && (h("line", { class: "error", x1: place, x2: place, y1: y.at(point.low), y2: y.at(point.high) })),
        h("circle", { cx: place, cy: y.at(point.y), r: "4" })));
}
/** Draw a small curve without axes. */
export function Sparkline(props) {
    const points = props.values.flatMap((value, n) => (value === null ? [] : [{ x: n, y: value, low: null, high: null }]));
    if (points.length < 2)
        return h("span", { class: "muted" }, "\u2013");
    const x = scale(points.map((p) => p.x), 2, 108, 0);
    const y = scale(points.map((p) => p.y), 22, 4, 0);
    const [first, last] = [points[0], points.at(-1)];
    return (h("svg", { class: "spark c0", width: "110", height: "26", role: "img", "aria-label": `${props.label} from ${num(first?.y)} to ${num(last?.y)}` },
        h("path", { class: "curve", d: line(points, x, y) })));
}
/** Draw a histogram whose bars are filters. */
export function Histogram(props) {
    const most = Math.max(1, ...props.bins.map((bin) => bin.n));
    const isChosen = (bin) => (props.low === null || bin.high > props.low) && (props.high === null || bin.low <= props.high);
    return (h("div", { class: "histogram", role: "group", "aria-label": props.label }, props.bins.map((bin) => {
        const text = `${fixed(bin.low)} to ${fixed(bin.high)}: ${plural(bin.n, "rollout")}`;
        return (h("button", { type: "button", key: bin.low, title: text, "aria-label": text, disabled: bin.n === 0, onClick: () => props.onPick(bin) },
            h("i", { class: isChosen(bin) ? "chosen" : "", style: { height: `${bin.n ? 2 + (34 * bin.n) / most : 1}px` } })));
    })));
}
/** Draw values on a line: the rewards of a group, with its mean. */
export function Strip(props) {
    const place = (value) => `${(100 * (value - props.low)) / (props.high - props.low || 1)}%`;
    const text = `rewards ${props.values.map((v) => num(v.value)).join(", ")}; mean ${num(props.mean)}`;
    return (h("div", { class: "strip", role: "img", "aria-label": text },
        props.mean !== null && h("u", { style: { left: place(props.mean) }, title: `mean ${num(props.mean)}` }),
        props.values.map((v, n) => (h("i", { key: n, class: v.isThis ? "this" : "", style: { left: place(v.value) }, title: v.title })))));
}
