// The list of runs.
import { Fragment, h } from "../vendor/preact.js";
import { useState } from "../vendor/hooks.js";
import { Sparkline } from "../charts.js";
import { Badge, Gain, Heading, Problems, Scroller, Waiting } from "../components.js";
import { ago, clock, duration, fixed, num, plural, visible } from "../format.js";
import { useRowKeys } from "../keys.js";
import { go, opens, path } from "../router.js";
export function RunsPage(props) {
    const { data } = props.places;
    return (h("section", null,
        h(Heading, { title: "Runs" }),
        data ? (h(Fragment, null,
            h(Problems, { of: props.places }),
            data.runs.length > 0 && h(RunTable, { runs: data.runs }),
            data.stores.length > 0 && h(StoreTable, { stores: data.stores }),
            data.runs.length + data.stores.length === 0 && h(Nothing, null))) : (h(Waiting, { of: props.places, what: "runs" }))));
}
function Nothing() {
    return (h("p", { class: "panel empty" },
        "There is no run here yet. A training writes its run to the folder that ",
        h("code", null, "Trainer(folder=\u2026)"),
        " ",
        "names, by default below ",
        h("code", null, "runs/"),
        "; it appears here by itself."));
}
function RunTable(props) {
    const [chosen, setChosen] = useState([]);
    const row = useRowKeys(props.runs.length, (n) => go(path(["runs", props.runs[n]?.name ?? ""])));
    const toggle = (name) => setChosen(chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name]);
    const address = new URL("/compare", location.origin);
    for (const name of chosen)
        address.searchParams.append("run", name);
    return (h(Fragment, null,
        h("div", { class: "row between" },
            h("span", { class: "muted" }, plural(props.runs.length, "run")),
            chosen.length > 1 ? (h("a", { class: "button", href: address.pathname + address.search },
                "compare ",
                chosen.length,
                " runs")) : (h("span", { class: "muted small" }, "tick two or more runs to compare them"))),
        h(Scroller, { label: "runs" },
            h("table", null,
                h("thead", null,
                    h("tr", null,
                        h("th", { scope: "col" },
                            h("span", { class: "hidden" }, "compare")),
                        h("th", { scope: "col" }, "run"),
                        h("th", { scope: "col" }, "state"),
                        h("th", { scope: "col", class: "wide-only" }, "training reward"),
                        h("th", { scope: "col" }, "held out"),
                        h("th", { scope: "col" }, "gain, 95 % interval"),
                        h("th", { scope: "col" }, "warnings"),
                        h("th", { scope: "col", class: "wide-only" }, "changed"))),
                h("tbody", null, props.runs.map((run, n) => (h("tr", { key: run.name, class: n === row ? "linked on" : "linked", onClick: opens(path(["runs", run.name])) },
                    h("td", null,
                        h("input", { type: "checkbox", "aria-label": `compare ${run.name}`, checked: chosen.includes(run.name), onChange: () => toggle(run.name) })),
                    h(RunCells, { run: run })))))))));
}
function RunCells(props) {
    const { run } = props;
    const evaluations = run.evaluations.filter((each) => each.split === "held-out");
    const [first, last] = [evaluations[0], evaluations.at(-1)];
    return (h(Fragment, null,
        h("td", null,
            h("a", { href: path(["runs", run.name]) },
                h("b", null, visible(run.name))),
            h("div", { class: "small muted" }, visible([run.algorithm, run.model].filter(Boolean).join(" · "))),
            run.error && h("div", { class: "small minus" }, visible(run.error))),
        h("td", null,
            h(Badge, { name: run.state }),
            h("div", { class: "small muted" },
                run.steps,
                run.planned ? ` of ${run.planned} steps` : " steps",
                run.eta_s !== null && `, ${duration(run.eta_s)} to go`)),
        h("td", { class: "wide-only" },
            h(Sparkline, { values: run.rewards, label: "training reward" })),
        h("td", { class: "number" },
            first ? fixed(first.reward.mean) : "–",
            last && last !== first && ` → ${fixed(last.reward.mean)}`),
        h("td", null,
            h(Gain, { of: run.gain })),
        h("td", null, run.alerts.length > 0 && (h("span", { class: "badge warn", title: run.alerts.map((alert) => alert.text).join("\n") }, run.alerts.length))),
        h("td", { class: "small muted wide-only", title: clock(run.changed) },
            ago(run.changed),
            run.cost !== null && h("div", null,
                "cost ",
                num(run.cost)))));
}
function StoreTable(props) {
    return (h(Fragment, null,
        h("h2", null, "Stores"),
        h(Scroller, { label: "stores" },
            h("table", null,
                h("thead", null,
                    h("tr", null,
                        h("th", { scope: "col" }, "store"),
                        h("th", { scope: "col" }, "rollouts by status"))),
                h("tbody", null, props.stores.map((store) => (h("tr", { key: store.name },
                    h("td", null,
                        h("a", { href: path(["stores", store.name]) },
                            h("b", null, visible(store.name))),
                        h("div", { class: "small muted" }, visible(store.url))),
                    h("td", null, store.error ? (h("span", { class: "minus" }, visible(store.error))) : (Object.entries(store.rollouts)
                        .map(([status, n]) => `${n.toLocaleString("en")} ${status}`)
                        .join(", ") || "none"))))))))));
}
