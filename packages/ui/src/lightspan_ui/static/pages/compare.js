// Runs beside each other: is one better, is the difference real, and what was set differently.
import { h } from "../vendor/preact.js";
import { Chart } from "../charts.js";
import { useApi } from "../client.js";
import { Gain, Heading, Problems, Scroller, Waiting } from "../components.js";
import { visible } from "../format.js";
import { path, useAddress } from "../router.js";
import { evaluationPoints } from "../series.js";
const CURVES = [
    ["reward", "Training reward"],
    ["learner/entropy", "Entropy, nats per token"],
    ["learner/approx_kl", "KL divergence of an update, nats per token"],
    ["seconds", "Seconds per step"],
];
const MAX_RUNS = 8;
export function ComparePage() {
    const names = useAddress().searchParams.getAll("run").slice(0, MAX_RUNS);
    const query = names.map((name) => `run=${encodeURIComponent(name)}`).join("&");
    const comparison = useApi(names.length ? `/compare?${query}` : null, "*");
    const { data } = comparison;
    return (h("section", null,
        h(Heading, { title: "Compare runs", trail: [["runs", "/"]] }),
        names.length < 2 && h("p", { class: "panel empty" }, "Tick two or more runs in the list of runs."),
        !data && names.length > 0 && h(Waiting, { of: comparison, what: "runs" }),
        data && (h("div", null,
            h(Problems, { of: comparison }),
            h(Pairs, { comparison: data }),
            h("div", { class: "grid two" },
                h("div", { class: "panel" },
                    h(Chart, { label: "Held-out reward", series: evaluationSeries(data.runs) })),
                CURVES.map(([name, label]) => (h(Curve, { key: name, name: name, label: label, runs: data.runs.map((run) => run.name) })))),
            h(Settings, { comparison: data })))));
}
function evaluationSeries(runs) {
    return runs.map((run, color) => ({ name: run.name, color, hasDots: true, points: evaluationPoints(run, "held-out") }));
}
function Curve(props) {
    const series = [];
    props.runs.forEach((run, color) => {
        const points = useCurve(run, props.name); // the number of runs is constant while the page lives
        if (points.length)
            series.push({ name: run, color, points });
    });
    if (!series.length)
        return null;
    return (h("div", { class: "panel" },
        h(Chart, { label: props.label, series: series })));
}
function useCurve(run, name) {
    const address = `/runs/${encodeURIComponent(run)}/metrics?names=${encodeURIComponent(name)}&points=300`;
    return useApi(address, `runs/${run}`).data?.series[name] ?? [];
}
function Pairs(props) {
    const { pairs } = props.comparison;
    return (h("div", null, pairs.map((pair) => (h("div", { class: "panel", key: `${pair.first} ${pair.second}` },
        h("div", { class: "row" },
            h("span", null,
                "last held-out reward of ",
                h("a", { href: path(["runs", pair.second]) }, visible(pair.second)),
                " minus that of",
                " ",
                h("a", { href: path(["runs", pair.first]) }, visible(pair.first)),
                ":"),
            h(Gain, { of: pair.difference })),
        h("div", null, visible(pair.sentence)))))));
}
function Settings(props) {
    const { runs, settings } = props.comparison;
    return (h("section", null,
        h("h2", null, "Settings that differ"),
        settings.length === 0 ? (h("p", { class: "muted" }, "none")) : (h(Scroller, { label: "settings that differ" },
            h("table", null,
                h("thead", null,
                    h("tr", null,
                        h("th", { scope: "col" }, "setting"),
                        runs.map((run) => (h("th", { scope: "col", key: run.name }, visible(run.name)))))),
                h("tbody", null, settings.map((setting) => (h("tr", { key: setting.name },
                    h("th", { scope: "row" }, visible(setting.name)),
                    runs.map((run) => (h("td", { class: "code", key: run.name }, visible(setting.values[run.name] ?? "–")))))))))))));
}
