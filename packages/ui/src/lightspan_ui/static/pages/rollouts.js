// The rollouts of a run or store, as a table.
import { Fragment, h } from "../vendor/preact.js";
import { useApi } from "../client.js";
import { Badge, Choice, Dimensions, Heading, Pager, Problems, Reward, Scroller, Waiting, rangeOf } from "../components.js";
import { Filters, apiPath, apiQuery, filtersOf, useWholeSearch } from "../filters.js";
import { clock, duration, num, plural, shortId, visible } from "../format.js";
import { useRowKeys } from "../keys.js";
import { go, opens, path, useAddress, withQuery } from "../router.js";
import { RunTabs } from "./run.js";
export const SORTS = [
    ["newest", "newest first"],
    ["oldest", "oldest first"],
    ["best", "best first"],
    ["worst", "worst first"],
    ["longest", "longest first"],
    ["tokens", "most tokens first"],
    ["cost", "dearest first"],
];
export function RolloutsPage(props) {
    const [kind, name] = props.place;
    const address = useAddress();
    const page = useApi(apiPath(props.place, "rollouts") + apiQuery(address, true), props.place.join("/"));
    const facets = useApi(apiPath(props.place, "facets") + apiQuery(address, false), props.place.join("/"));
    const goesOn = useWholeSearch(page, facets, address.searchParams.has("sort"));
    return (h("section", null,
        h(Heading, { title: "Rollouts", trail: [[kind, "/"], [name, path([kind, name])]] }),
        kind === "runs" && h(RunTabs, { name: name }),
        h(Filters, { facets: facets.data, isProduction: kind === "stores" }),
        h("div", { class: "row between" },
            h(Choice, { name: "sort", label: "order", empty: "newest first", values: SORTS.slice(1) }),
            h("span", { class: "muted small" }, "keys: j, k, Enter")),
        h(Problems, { of: page }),
        h(ReadState, { page: page.data, isLoading: page.isLoading, goesOn: goesOn }),
        page.data ? (h(RolloutTable, { place: props.place, page: page.data })) : (!page.error && h(Waiting, { of: page, what: "rollouts" }))));
}
/** Say what of the store was not read yet, so that an empty table is not taken for none. */
export function ReadState(props) {
    const { page } = props;
    return (h("p", { class: "muted small", role: "status" },
        props.isLoading && "looking… ",
        page?.is_partial &&
            (props.goesOn ? "still searching older attempts… " : "not everything is searched yet: the next page goes on. "),
        page && page.read < page.readable && `spans of ${page.read.toLocaleString("en")} of ${plural(page.readable, "attempt")} are read: agents, tokens and users of the others are not known yet`));
}
function RolloutTable(props) {
    const { rows, total, cursor, is_partial } = props.page;
    const address = useAddress();
    const [kind, name] = props.place;
    const addressOf = (row) => path([kind, name, "rollouts", row.rollout_id], filtersOf(address));
    const open = (row) => row && go(addressOf(row));
    const at = useRowKeys(rows.length, (n) => open(rows[n]));
    const range = rangeOf(rows.map((row) => row.reward));
    const isRun = kind === "runs";
    const isUnread = address.searchParams.has("agent") && props.page.read < props.page.readable;
    if (!rows.length)
        return h("p", { class: "panel empty" },
            "No rollout matches",
            is_partial && " so far",
            ".");
    return (h(Fragment, null,
        h(Scroller, { label: "rollouts" },
            h("table", null,
                h("thead", null,
                    h("tr", null,
                        h("th", { scope: "col" }, "rollout"),
                        h("th", { scope: "col" }, isRun ? "step" : "service"),
                        h("th", { scope: "col" }, "reward"),
                        h("th", { scope: "col" }, "task, answer"),
                        h("th", { scope: "col" }, "calls by agent"),
                        h("th", { scope: "col", class: "number" }, "tokens"),
                        h("th", { scope: "col", class: "number" }, "time"))),
                h("tbody", null, rows.map((row, n) => (h("tr", { key: row.rollout_id, class: n === at ? "linked on" : "linked", onClick: opens(addressOf(row)) },
                    h("td", null,
                        h("a", { href: addressOf(row), title: row.rollout_id },
                            h("code", null, shortId(row.rollout_id))),
                        row.fork_of && (h("a", { class: "small", href: path([kind, name, "rollouts", row.fork_of]), title: row.fork_of },
                            " ",
                            row.fork_call ? "fork of" : "repeats",
                            " ",
                            shortId(row.fork_of))),
                        h("div", { class: "small muted", title: clock(row.created) }, clock(row.started ?? row.created).slice(5))),
                    h("td", null, isRun ? (h("a", { href: withQuery(address, { step: row.step, mode: row.mode, cursor: null }) },
                        row.mode,
                        " ",
                        row.step)) : (visible(row.run_id))),
                    h("td", null,
                        h(RowReward, { row: row, ...range })),
                    h("td", null,
                        h(RowTexts, { row: row })),
                    h("td", { class: "small" }, Object.entries(row.agents)
                        .map(([agent, calls]) => `${visible(agent)} ${calls}`)
                        .join(", ")),
                    h("td", { class: "number" }, num(row.tokens)),
                    h("td", { class: "number" }, duration(row.seconds)))))))),
        h(Pager, { total: total, shown: rows.length, cursor: cursor, noun: "rollout", isPartial: is_partial || isUnread })));
}
export function RowReward(props) {
    const { row, low, high } = props;
    return (h(Fragment, null,
        h(Reward, { value: row.reward, low: low, high: high }),
        " ",
        h(Dimensions, { of: row.dimensions }),
        " ",
        row.status !== "succeeded" && h(Badge, { name: row.status, title: row.message }),
        row.outcome && row.outcome !== "ok" && h("span", { class: "small muted" },
            " ",
            visible(row.outcome)),
        row.damaged > 0 && h(Badge, { name: "damaged" }),
        row.rated && h("span", { class: "small plus" }, " rated")));
}
export function RowTexts(props) {
    const { row } = props;
    return (h(Fragment, null,
        h("div", { class: "clip two-lines" }, visible(row.question || row.task)),
        h("div", { class: "clip two-lines muted" }, visible(row.answer || row.message))));
}
