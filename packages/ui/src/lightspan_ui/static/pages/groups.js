// Groups: the rollouts of one task, which are compared with each other.
import { Fragment, h } from "../vendor/preact.js";
import { Strip } from "../charts.js";
import { useApi } from "../client.js";
import { Badge, Choice, Dimensions, Heading, Pager, Problems, Scroller, Waiting, rangeOf } from "../components.js";
import { Filters, apiPath, apiQuery, useWholeSearch } from "../filters.js";
import { fixed, num, pretty, shortId, signed, visible } from "../format.js";
import { useKeys, useRowKeys } from "../keys.js";
import { go, opens, path, useAddress } from "../router.js";
import { RunTabs } from "./run.js";
const SORTS = [
    ["spread", "widest spread first"],
    ["flat", "no spread first"],
    ["worst", "worst mean first"],
    ["best", "best mean first"],
];
function groupAddress(place, group) {
    return path([...place, "groups", group.group], { step: group.step });
}
export function GroupsPage(props) {
    const [kind, name] = props.place;
    const address = useAddress();
    const page = useApi(apiPath(props.place, "groups") + apiQuery(address, true), props.place.join("/"));
    const facets = useApi(apiPath(props.place, "facets") + apiQuery(address, false), props.place.join("/"));
    const goesOn = useWholeSearch(page, facets, true);
    return (h("section", null,
        h(Heading, { title: "Groups", trail: [[kind, "/"], [name, path([kind, name])]] }),
        kind === "runs" && h(RunTabs, { name: name }),
        h("p", { class: "muted" },
            "The rollouts of one task",
            kind === "runs" && ". A group whose rewards are all equal teaches nothing: its spread is 0",
            "."),
        h(Filters, { facets: facets.data, isProduction: kind === "stores" }),
        h(Choice, { name: "sort", label: "order", empty: "newest first", values: SORTS }),
        h(Problems, { of: page }),
        h("p", { class: "muted small", role: "status" }, goesOn && "still searching older attempts…"),
        page.data ? h(GroupTable, { place: props.place, page: page.data }) : !page.error && h(Waiting, { of: page, what: "groups" })));
}
function GroupTable(props) {
    const { groups, total, cursor, is_partial } = props.page;
    const at = useRowKeys(groups.length, (n) => {
        const group = groups[n];
        if (group)
            go(groupAddress(props.place, group));
    });
    const range = rangeOf(groups.flatMap((group) => group.members.map((member) => member.reward)));
    if (!groups.length)
        return h("p", { class: "panel empty" },
            "No group matches",
            is_partial && " so far",
            ".");
    return (h(Fragment, null,
        h(Scroller, { label: "groups" },
            h("table", null,
                h("thead", null,
                    h("tr", null,
                        h("th", { scope: "col" }, "task"),
                        h("th", { scope: "col" }, "step"),
                        h("th", { scope: "col" }, "rewards"),
                        h("th", { scope: "col", class: "number" }, "mean"),
                        h("th", { scope: "col", class: "number" }, "spread"),
                        h("th", { scope: "col", class: "number" }, "rollouts"))),
                h("tbody", null, groups.map((group, n) => (h("tr", { key: `${group.group} ${group.step} ${group.mode}`, class: n === at ? "linked on" : "linked", onClick: opens(groupAddress(props.place, group)) },
                    h("td", null,
                        h("a", { class: "clip two-lines", href: groupAddress(props.place, group) }, visible(group.task || group.group))),
                    h("td", null,
                        group.mode,
                        " ",
                        group.step),
                    h("td", null,
                        h(Strip, { values: group.members.flatMap((member) => member.reward === null ? [] : [{ value: member.reward, title: `${num(member.reward)} ${member.status}` }]), mean: group.mean, ...range })),
                    h("td", { class: "number" }, fixed(group.mean)),
                    h("td", { class: "number" }, group.spread === 0 ? "0: teaches nothing" : fixed(group.spread)),
                    h("td", { class: "number" }, group.size))))))),
        h(Pager, { total: total, shown: groups.length, cursor: cursor, noun: "group", isPartial: is_partial })));
}
export function GroupPage(props) {
    const [kind, name] = props.place;
    const step = useAddress().searchParams.get("step");
    const query = step === null ? "" : `?step=${encodeURIComponent(step)}`;
    const asked = useApi(apiPath(props.place, "groups", props.id) + query, props.place.join("/"));
    const groups = path([kind, name, "groups"]);
    useKeys({ Escape: () => go(groups) });
    const { data } = asked;
    return (h("section", null,
        h(Heading, { title: "One task's rollouts", trail: [[kind, "/"], [name, path([kind, name])], ["groups", groups]] }),
        data ? (h(Fragment, null,
            h(Problems, { of: asked }),
            h("div", { class: "panel" },
                h("div", { class: "row between" },
                    h("b", null, kind === "runs" ? `${data.mode} step ${data.step}` : ""),
                    h("span", null,
                        "mean ",
                        fixed(data.mean),
                        ", spread ",
                        data.spread === 0 ? "0: teaches nothing" : fixed(data.spread))),
                h("details", { open: data.task.length < 300 },
                    h("summary", null, "task"),
                    h("pre", null, visible(pretty(data.task))))),
            h(SideBySide, { place: props.place, detail: data }))) : (h(Waiting, { of: asked, what: "the group" }))));
}
/** Show the rollouts as columns, best first, and each agent's answers as a row. */
function SideBySide(props) {
    const { detail, place } = props;
    return (h("div", { class: "scroller", role: "region", "aria-label": "rollouts side by side", tabIndex: 0 },
        h("table", { class: "columns" },
            h("thead", null,
                h("tr", null,
                    h("th", { scope: "col" }, "agent"),
                    detail.rollouts.map(({ row }) => (h("th", { scope: "col", key: row.rollout_id },
                        h("a", { href: path([...place, "rollouts", row.rollout_id]) },
                            h("code", null, shortId(row.rollout_id))),
                        h("div", { class: "big" }, row.reward === null ? "unscored" : fixed(row.reward)),
                        h(Dimensions, { of: row.dimensions }),
                        row.status !== "succeeded" && h(Badge, { name: row.status, title: row.message })))))),
            h("tbody", null, detail.agents.map((agent) => (h("tr", { key: agent },
                h("th", { scope: "row" }, visible(agent)),
                detail.rollouts.map(({ row, answers }) => (h("td", { key: row.rollout_id }, answers
                    .filter((answer) => answer.agent === agent)
                    .map((answer) => (h(AnswerBox, { key: `${answer.call_id} ${answer.choice}`, answer: answer, address: path([...place, "rollouts", row.rollout_id, "calls", answer.call_id]) })))))))))))));
}
function AnswerBox(props) {
    const { answer } = props;
    return (h("div", { class: "answer" },
        h("a", { class: "row between small", href: props.address },
            h("span", null, answer.fate === "recorded" ? "the call" : h(Badge, { name: answer.fate, title: answer.reason })),
            answer.advantage !== null && (h("span", { class: answer.advantage > 0 ? "plus" : answer.advantage < 0 ? "minus" : "" },
                "advantage ",
                signed(answer.advantage)))),
        h("pre", null, visible(pretty(answer.text)))));
}
