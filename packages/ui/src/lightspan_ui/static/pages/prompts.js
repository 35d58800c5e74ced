// A search for prompts: what was tried, what it scored by task, what was refused, was it luck.
import { Fragment, h } from "../vendor/preact.js";
import { useState } from "../vendor/hooks.js";
import { useApi } from "../client.js";
import { Badge, Difference, Heading, Problems, Scroller, Tile, Waiting } from "../components.js";
import { fixed, num, plural, visible } from "../format.js";
import { go, path, useAddress, withQuery } from "../router.js";
import { RunTabs } from "./run.js";
export function PromptsPage(props) {
    const address = `/runs/${encodeURIComponent(props.name)}`;
    const asked = useApi(`${address}/prompts`, `runs/${props.name}`);
    const detail = useApi(address);
    const { data } = asked;
    return (h("section", null,
        h(Heading, { title: "Prompts", trail: [["runs", "/"], [props.name, path(["runs", props.name])]] }),
        h(RunTabs, { name: props.name, summary: detail.data?.summary }),
        data ? (h(Fragment, null,
            h(Problems, { of: asked }),
            data.prompts.map((prompt) => (h(LearnedPrompt, { key: prompt.name, prompt: prompt }))),
            data.searches.map((search) => (h(Search, { key: search.name, search: search }))),
            data.prompts.length + data.searches.length === 0 && (h("p", { class: "panel empty" }, "No prompt was learned or proposed yet.")))) : (h(Waiting, { of: asked, what: "prompts" }))));
}
function LearnedPrompt(props) {
    const { name, before, after, is_changed } = props.prompt;
    return (h("section", { class: "panel" },
        h("h2", null,
            visible(name),
            " ",
            h("span", { class: "muted small" }, is_changed ? "changed" : "stays as it was")),
        is_changed ? h(Difference, { before: before, after: after }) : h("pre", null, visible(before))));
}
function Search(props) {
    const { search } = props;
    const address = useAddress();
    const number = Number(address.searchParams.get("candidate") ?? NaN);
    const chosen = search.candidates.find((candidate) => candidate.number === number);
    const choose = (candidate) => go(withQuery(address, { candidate }), true);
    return (h("section", null,
        h("h2", null,
            "Search ",
            visible(search.name),
            " ",
            search.is_running && h(Badge, { name: "running" })),
        search.verdict && h("p", { class: "result" }, visible(search.verdict)),
        h("div", { class: "grid four" },
            h(Tile, { name: "candidates", value: search.candidates.length, note: plural(search.proposals.length, "proposal") }),
            h(Tile, { name: "rollouts", value: num(search.rollouts), note: visible(search.ended) }),
            h(Tile, { name: "reflections", value: num(search.reflections), note: `${num(search.tokens)} tokens` }),
            h(Tile, { name: "cost", value: search.cost === null ? "not counted" : num(search.cost, 4), note: search.chance === null ? "" : `chance of such a lead: ${num(search.chance, 3)}` })),
        h(Candidates, { search: search, chosen: chosen, choose: choose }),
        chosen && h(CandidateText, { search: search, candidate: chosen }),
        h(Scores, { search: search, chosen: chosen, choose: choose }),
        h(Proposals, { proposals: search.proposals, search: search }),
        search.texts && h("p", { class: "small muted" }, visible(search.texts))));
}
/** Return the candidates below their first parents, with their depths. */
export function treeOf(candidates) {
    const children = new Map();
    const numbers = new Set(candidates.map((candidate) => candidate.number));
    for (const candidate of candidates) {
        const parent = candidate.parents.find((each) => numbers.has(each) && each < candidate.number);
        children.set(parent, [...(children.get(parent) ?? []), candidate]);
    }
    const below = (parent, depth) => (children.get(parent) ?? []).flatMap((candidate) => [{ candidate, depth }, ...below(candidate.number, depth + 1)]);
    return below(undefined, 0);
}
function Candidates(props) {
    return (h(Fragment, null,
        h("h3", null, "Candidates, below the one that they were made from"),
        h("div", { class: "panel tree plain", role: "group", "aria-label": "candidates" }, treeOf(props.search.candidates).map(({ candidate, depth }) => (h("button", { type: "button", key: candidate.number, "aria-pressed": candidate === props.chosen, onClick: () => props.choose(candidate.number) },
            h("span", { class: "name", style: { paddingLeft: `${depth * 18}px` } },
                h("b", null, candidate.number === 0 ? "0, the app's own prompts" : `candidate ${candidate.number}`),
                candidate.is_chosen && h("span", { class: "badge good" }, "chosen"),
                candidate.is_best && !candidate.is_chosen && h("span", { class: "badge info" }, "highest"),
                !candidate.is_whole && h("span", { class: "badge" }, "a part of the tasks"),
                h("span", { class: "small muted" },
                    visible(candidate.changed.join(", ")),
                    candidate.parents.length > 1 && `, merged of ${candidate.parents.join(" and ")}`)),
            h("span", { class: "line", "aria-hidden": "true" },
                h("i", { style: { left: "0", width: `${100 * Math.max(0, Math.min(1, candidate.mean ?? 0))}%` } })),
            h("span", { class: "number" }, fixed(candidate.mean, 3)))))),
        h("p", { class: "small muted" }, "The highest mean of several candidates is biased upwards; the held-out reward of the run is the result.")));
}
function CandidateText(props) {
    const { candidate, search } = props;
    const [isFirst, setFirst] = useState(false);
    const base = search.candidates.find((each) => each.number === (isFirst ? 0 : (candidate.parents[0] ?? 0)));
    return (h("section", { class: "panel" },
        h("div", { class: "row between" },
            h("h3", null,
                "Candidate ",
                candidate.number),
            h("span", { class: "row", role: "group", "aria-label": "compared with" },
                h("button", { type: "button", class: "small", "aria-pressed": !isFirst, onClick: () => setFirst(false) }, "against its parent"),
                h("button", { type: "button", class: "small", "aria-pressed": isFirst, onClick: () => setFirst(true) }, "against the first"))),
        Object.entries(candidate.texts).map(([name, text]) => (h(Fragment, { key: name },
            h("h4", null, visible(name)),
            base && base !== candidate ? (h(Difference, { before: base.texts[name] ?? "", after: text })) : (h("pre", null, visible(text))))))));
}
function shade(value, low, high) {
    if (value === null)
        return "none";
    return `h${Math.round((9 * (value - low)) / (high - low || 1))}`;
}
function Scores(props) {
    const { candidates, tasks } = props.search;
    const ids = Object.keys(tasks).filter((id) => candidates.some((candidate) => id in candidate.scores));
    if (!ids.length || !candidates.length)
        return null;
    const values = candidates.flatMap((candidate) => Object.values(candidate.scores)).filter((value) => value !== null);
    const [low, high] = [Math.min(0, ...values), Math.max(1, ...values)];
    return (h(Fragment, null,
        h("h3", null, "Reward by candidate and task of the selection split"),
        h(Scroller, { label: "rewards by candidate and task" },
            h("table", { class: "heat" },
                h("thead", null,
                    h("tr", null,
                        h("th", { scope: "col" }, "candidate"),
                        ids.map((id, n) => (h("th", { scope: "col", key: id, title: tasks[id] }, n + 1))))),
                h("tbody", null, candidates.map((candidate) => (h("tr", { key: candidate.number, class: candidate === props.chosen ? "on" : "" },
                    h("th", { scope: "row" },
                        h("button", { type: "button", class: "link", onClick: () => props.choose(candidate.number) }, candidate.number)),
                    ids.map((id) => {
                        const value = candidate.scores[id] ?? null;
                        const again = candidate.again[id];
                        const title = `${tasks[id] ?? id}: ${id in candidate.scores ? num(value) : "not run"}${again === undefined ? "" : `, again ${num(again)}`}`;
                        return (h("td", { key: id, class: shade(value, low, high), title: title }, id in candidate.scores ? num(value, 1) : ""));
                    }))))))),
        h("details", null,
            h("summary", null, "the tasks"),
            h("ol", { class: "small" }, ids.map((id) => (h("li", { key: id }, visible(tasks[id] ?? id))))))));
}
function Proposals(props) {
    const [open, setOpen] = useState(-1);
    if (!props.proposals.length)
        return null;
    return (h(Fragment, null,
        h("h3", null, "Proposals, refused ones too"),
        h(Scroller, { label: "proposals" },
            h("table", null,
                h("thead", null,
                    h("tr", null,
                        h("th", { scope: "col" }, "proposal"),
                        h("th", { scope: "col" }, "prompt"),
                        h("th", { scope: "col" }, "made from"),
                        h("th", { scope: "col" }, "reward on the same tasks"),
                        h("th", { scope: "col" }, "what became of it"))),
                h("tbody", null, props.proposals.map((proposal, n) => (h(Fragment, { key: n },
                    h("tr", { class: n === open ? "on" : "" },
                        h("td", null,
                            h("button", { type: "button", class: "link", "aria-expanded": n === open, onClick: () => setOpen(n === open ? -1 : n) }, n + 1)),
                        h("td", null, visible(proposal.prompt || "merge")),
                        h("td", null, proposal.parents.join(" and ")),
                        h("td", { class: "number" }, proposal.before === null ? "–" : `${fixed(proposal.before)} → ${fixed(proposal.after)} on ${plural(proposal.tasks, "task")}`),
                        h("td", null, proposal.candidate === null ? `dropped, ${visible(proposal.why)}` : `candidate ${proposal.candidate}`)),
                    n === open && (h("tr", null,
                        h("td", { colSpan: 5 },
                            h(ProposalText, { proposal: proposal, search: props.search }))))))))))));
}
function ProposalText(props) {
    const { proposal, search } = props;
    const parent = search.candidates.find((candidate) => candidate.number === proposal.parents[0]);
    const before = parent?.texts[proposal.prompt];
    if (!proposal.text)
        return h("p", { class: "muted" }, "the answer had no text");
    return before === undefined ? h("pre", null, visible(proposal.text)) : h(Difference, { before: before, after: proposal.text });
}
