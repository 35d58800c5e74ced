// A run: what went wrong, what was learned, what became of the calls.
import { Fragment, h } from "../vendor/preact.js";
import { useState } from "../vendor/hooks.js";
import { Chart } from "../charts.js";
import { useApi } from "../client.js";
import { Alerts, Badge, Gain, Heading, Problems, Scroller, Tile, Waiting, gainInWords } from "../components.js";
import { ago, clock, duration, fixed, num, percent, plural, visible } from "../format.js";
import { go, path, useAddress, withQuery } from "../router.js";
import { evaluationPoints } from "../series.js";
/** Show the tabs of a run. */
export function RunTabs(props) {
    const { pathname } = useAddress();
    const places = useApi(props.summary ? null : "/places");
    const summary = props.summary ?? places.data?.runs.find((run) => run.name === props.name);
    const tabs = [["overview", ["runs", props.name]]];
    if (summary?.has_rollouts ?? true) {
        tabs.push(["rollouts", ["runs", props.name, "rollouts"]], ["groups", ["runs", props.name, "groups"]]);
    }
    if (summary?.has_prompts)
        tabs.push(["prompts", ["runs", props.name, "prompts"]]);
    tabs.push(["settings", ["runs", props.name, "settings"]]);
    return (h("nav", { class: "tabs", "aria-label": "Pages of the run" }, tabs.map(([label, segments]) => (h("a", { key: label, href: path(segments, label === "groups" ? { mode: "train" } : {}), "aria-current": pathname === path(segments) ? "page" : undefined }, label)))));
}
export function RunPage(props) {
    const place = `runs/${props.name}`;
    const asked = useApi(`/runs/${encodeURIComponent(props.name)}`, place);
    const { data } = asked;
    return (h("section", null,
        h(Heading, { title: props.name, trail: [["runs", "/"]] }, data && h(Badge, { name: data.summary.state })),
        h(RunTabs, { name: props.name, summary: data?.summary }),
        data ? (h(Fragment, null,
            h(Problems, { of: asked, error: data.error || data.summary.error }),
            h("p", { class: "muted" },
                visible([data.summary.algorithm, data.summary.model, data.summary.app].filter(Boolean).join(" · ")),
                data.summary.optimize && visible(`, ${data.summary.has_prompts ? "searches prompts of" : "trains"} ${data.summary.optimize}`)),
            h(Alerts, { alerts: data.summary.alerts }),
            h(Tiles, { detail: data }),
            h(Curves, { name: props.name, detail: data }),
            h(Coverage, { detail: data, name: props.name }),
            h(OtherMetrics, { name: props.name, names: data.metric_names }))) : (h(Waiting, { of: asked, what: "the run" }))));
}
function Tiles(props) {
    const { summary, result, kept } = props.detail;
    const evaluations = summary.evaluations.filter((each) => each.split === "held-out");
    const [first, last] = [evaluations[0], evaluations.at(-1)];
    const lastReward = summary.rewards.filter((value) => value !== null).at(-1);
    return (h(Fragment, null,
        h("div", { class: "grid four" },
            h(Tile, { name: "progress", value: `${summary.steps}${summary.planned ? ` of ${summary.planned}` : ""} steps`, note: summary.eta_s === null ? `last change ${ago(summary.changed)}` : `about ${duration(summary.eta_s)} to go` }),
            h(Tile, { name: `held-out ${summary.metric}`, value: first && last && first !== last
                    ? `${fixed(first.reward.mean)} → ${fixed(last.reward.mean)}`
                    : fixed(first?.reward.mean), note: last && evaluationNote(last) }),
            h(Tile, { name: "gain, 95 % interval", value: h(Gain, { of: summary.gain }), note: summary.gain ? `${gainInWords(summary.gain)}; n=${summary.gain.n}` : "needs two evaluations" }),
            h(Tile, { name: `training ${summary.metric}, latest`, value: fixed(lastReward), note: `${duration(summary.seconds)} of training${summary.cost === null ? "" : `, cost ${num(summary.cost)}`}` })),
        result && h("p", { class: "result" }, visible(result)),
        kept !== null && (h("p", { class: "muted" },
            "The weights of step ",
            kept,
            " are kept, the best by the selection split. Its score there is biased upwards, as the highest of several; the held-out reward is the result."))));
}
function evaluationNote(evaluation) {
    const parts = [`n=${evaluation.reward.n}`];
    if (evaluation.failed)
        parts.push(`${evaluation.failed} failed`);
    if (evaluation.unscored)
        parts.push(`${evaluation.unscored} unscored`);
    if (evaluation.silent)
        parts.push(`${evaluation.silent} without a call of the policy`);
    return parts.join(", ");
}
const FAILURES = "Rollouts that failed";
/** Charts below that of the reward: a label, and which metrics it shows under which name. */
const CURVES = [
    ["Mean reward of the rollouts in which an agent acted", /^agent\/(.+)\/reward$/],
    ["Entropy, nats per token", /^learner\/(?:(.+)\/)?entropy$/],
    ["KL divergence of an update, nats per token", /^learner\/(?:(.+)\/)?approx_kl$/],
    [FAILURES, /^(failed)$/],
    ["Seconds per step", /^(seconds)$/],
];
function useMetrics(name, names, kind = "train") {
    const query = `names=${names.map(encodeURIComponent).join(",")}&kind=${kind}&points=600`;
    return useApi(names.length ? `/runs/${encodeURIComponent(name)}/metrics?${query}` : null, `runs/${name}`);
}
function Curves(props) {
    const { summary, metric_names } = props.detail;
    const charts = CURVES.map(([label, pattern]) => ({
        label,
        metrics: metric_names.flatMap((metric) => {
            const match = pattern.exec(metric);
            return match ? [[metric, match[1] ?? label]] : [];
        }),
    }));
    const asked = useMetrics(props.name, ["reward", ...charts.flatMap(({ metrics }) => metrics.map(([metric]) => metric))]);
    const series = asked.data?.series ?? {};
    const trained = new Set((series["reward"] ?? []).map((point) => Math.round(point.x)));
    const open = summary.has_rollouts
        ? (x) => {
            const step = Math.round(x);
            const isEvaluated = summary.evaluations.some((each) => each.step === step);
            const mode = trained.has(step) || !isEvaluated ? "train" : "val";
            go(path(["runs", props.name, "rollouts"], { step, mode }));
        }
        : undefined;
    return (h("div", { class: "grid two" },
        h("div", { class: "panel wide" },
            h(Chart, { label: `Mean ${summary.metric}`, height: 240, series: [
                    { name: "training, ± 1.96 standard errors", color: 0, points: series["reward"] ?? [] },
                    ...evaluationSeries(summary),
                ], onPick: open })),
        charts.map(({ label, metrics }) => {
            const curves = metrics.map(([metric, name], color) => ({ name, color, points: series[metric] ?? [] }));
            const isTold = curves.some((curve) => curve.points.length > 1) && (label !== FAILURES || curves.some((curve) => curve.points.some((point) => point.y)));
            return isTold ? (h("div", { class: "panel", key: label },
                h(Chart, { label: label, series: curves, onPick: open }))) : null;
        })));
}
function evaluationSeries(summary) {
    return ["held-out", "selection"]
        .map((split, n) => ({ name: split, color: n + 1, hasDots: true, points: evaluationPoints(summary, split) }))
        .filter(({ points }) => points.length);
}
function Coverage(props) {
    const { agents, coverage_of, rollouts, pruned, overrides, scorers } = props.detail;
    if (!agents.length && !pruned)
        return null;
    return (h("section", null,
        h("h2", null, "What became of the model calls"),
        h("p", { class: "muted" },
            coverage_of < rollouts
                ? `counted in ${coverage_of.toLocaleString("en")} of ${plural(rollouts, "rollout")}`
                : `in ${plural(rollouts, "rollout")}`,
            pruned && `; ${visible(pruned)}`),
        h(Scroller, { label: "calls by agent" },
            h("table", null,
                h("thead", null,
                    h("tr", null,
                        h("th", { scope: "col" }, "agent"),
                        h("th", { scope: "col", class: "number" }, "calls"),
                        h("th", { scope: "col" }, "share"),
                        h("th", { scope: "col", class: "number" }, "trained"),
                        h("th", { scope: "col", class: "number" }, "frozen"),
                        h("th", { scope: "col", class: "number" }, "in evaluations"),
                        h("th", { scope: "col", class: "number", title: "mean reward of the rollouts in which the agent acted" }, "reward"),
                        h("th", { scope: "col" }, "rejected, why"))),
                h("tbody", null, agents.map((agent) => (h(AgentRow, { key: agent.path, agent: agent, run: props.name })))))),
        h("p", { class: "small muted" }, "Reward: the mean over the rollouts in which the agent acted. An agent that acts only when another has failed sees harder rollouts than the others."),
        Object.keys(overrides).length > 0 && (h("p", { class: "small muted" },
            "Sampling that the app asked for and training replaced, in calls:",
            " ",
            Object.entries(overrides)
                .map(([name, n]) => `${visible(name)} ${n}`)
                .join(", "))),
        Object.entries(scorers).map(([name, mean]) => (h("p", { class: "small muted", key: name },
            "reward ",
            visible(name),
            ": mean ",
            fixed(mean.mean, 3),
            " of ",
            mean.n)))));
}
/** Say whether an agent learns; in a search for prompts all others are only recorded. */
function roleOf(agent) {
    return agent.learns ? "learns" : agent.recorded ? "" : "frozen";
}
function AgentRow(props) {
    const { agent } = props;
    const rejected = Object.values(agent.rejected).reduce((sum, n) => sum + n, 0);
    const share = (n) => ({ width: `${(100 * n) / (agent.calls || 1)}%` });
    return (h("tr", null,
        h("td", null,
            h("a", { href: path(["runs", props.run, "rollouts"], { agent: agent.path }) }, visible(agent.path)),
            " ",
            h("span", { class: "small muted" }, roleOf(agent))),
        h("td", { class: "number" }, agent.calls),
        h("td", null,
            h("span", { class: "stack", role: "img", "aria-label": `${percent(agent.trained / (agent.calls || 1))} trained, ${percent(rejected / (agent.calls || 1))} rejected` },
                h("i", { class: "good", style: share(agent.trained) }),
                h("i", { class: "warn", style: share(rejected) }),
                h("i", { class: "plain", style: share(agent.frozen) }))),
        h("td", { class: "number" }, agent.trained),
        h("td", { class: "number" }, agent.frozen),
        h("td", { class: "number" }, agent.evaluation),
        h("td", { class: "number" }, fixed(agent.reward)),
        h("td", { class: "small" }, Object.entries(agent.rejected)
            .map(([reason, n]) => `${n} ${visible(reason)}`)
            .join(", "))));
}
function OtherMetrics(props) {
    const address = useAddress();
    const chosen = address.searchParams.get("metric") ?? "";
    const asked = useMetrics(props.name, chosen ? [chosen] : []);
    if (!props.names.length)
        return null;
    return (h("section", null,
        h("h2", null, "Any metric"),
        h("label", { class: "field" },
            h("span", null, "metric"),
            h("select", { value: chosen, onChange: (event) => go(withQuery(address, { metric: event.currentTarget.value }), true) },
                h("option", { value: "" }, "choose\u2026"),
                props.names.map((name) => (h("option", { key: name, value: name }, visible(name)))))),
        chosen && asked.data && (h("div", { class: "panel" },
            h(Chart, { label: chosen, series: [{ name: chosen, color: 0, points: asked.data.series[chosen] ?? [] }] }))),
        chosen && !asked.data && h(Waiting, { of: asked, what: chosen })));
}
export function SettingsPage(props) {
    const asked = useApi(`/runs/${encodeURIComponent(props.name)}`);
    const [part, setPart] = useState("");
    const rows = Object.entries(asked.data?.settings ?? {}).filter(([name]) => name.includes(part));
    return (h("section", null,
        h(Heading, { title: "Settings", trail: [["runs", "/"], [props.name, path(["runs", props.name])]] }),
        h(RunTabs, { name: props.name, summary: asked.data?.summary }),
        asked.data ? (h(Fragment, null,
            h("p", { class: "muted" },
                "From the run's ",
                h("code", null, "config.json"),
                "; started ",
                clock(asked.data.summary.started),
                "."),
            h("label", { class: "field" },
                h("span", null, "find"),
                h("input", { type: "search", value: part, onInput: (event) => setPart(event.currentTarget.value) })),
            h(Scroller, { label: "settings" },
                h("table", null,
                    h("thead", null,
                        h("tr", null,
                            h("th", { scope: "col" }, "setting"),
                            h("th", { scope: "col" }, "value"))),
                    h("tbody", null, rows.map(([name, value]) => (h("tr", { key: name },
                        h("th", { scope: "row" }, visible(name)),
                        h("td", { class: "code" }, visible(value)))))))))) : (h(Waiting, { of: asked, what: "settings" }))));
}
