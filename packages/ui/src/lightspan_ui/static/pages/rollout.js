// A rollout: its spans as a tree with a waterfall, its conversation, and what became of each call.
import { Fragment, h } from "../vendor/preact.js";
import { useState } from "../vendor/hooks.js";
import { useApi } from "../client.js";
import { Badge, Dimensions, Heading, MessageBox, Problems, Scroller, Waiting } from "../components.js";
import { apiPath, apiQuery, filtersOf } from "../filters.js";
import { clock, duration, fixed, num, plural, pretty, shortId, signed, visible } from "../format.js";
import { useKeys } from "../keys.js";
import { go, path, useAddress, withQuery } from "../router.js";
import { RatingForm, Ratings } from "../rating.js";
export function RolloutPage(props) {
    const { place, id } = props;
    const [kind, name] = place;
    const address = useAddress();
    const filters = filtersOf(address);
    const asked = useApi(apiPath(place, "rollouts", id) + apiQuery(address, true), place.join("/"));
    const { data } = asked;
    const rollouts = path(kind === "runs" ? [kind, name, "rollouts"] : [kind, name], filters);
    const addressOf = (other) => path([kind, name, "rollouts", other], filters);
    const open = (other) => other && go(addressOf(other));
    const hasSpan = address.searchParams.has("span");
    useKeys({
        j: () => open(data?.older),
        k: () => open(data?.newer),
        Escape: () => (hasSpan ? go(withQuery(address, { span: null }), true) : go(rollouts)),
    });
    return (h("section", null,
        h(Heading, { title: `Rollout ${shortId(id)}`, trail: [[kind, "/"], [name, path([kind, name])], ["rollouts", rollouts]] },
            data?.newer && h("a", { href: addressOf(data.newer) }, "previous (k)"),
            data?.older && h("a", { href: addressOf(data.older) }, "next (j)"),
            h("span", { class: "muted small" }, "Esc: back to the list")),
        data ? (h(Fragment, null,
            h(Problems, { of: asked }),
            h(Summary, { place: place, detail: data }),
            props.canWrite && data.row.attempt_id && (h(RatingForm, { place: place, id: data.row.attempt_id, ratings: data.ratings, done: asked.reload })),
            h(Trace, { place: place, detail: data }))) : (h(Waiting, { of: asked, what: "the rollout" }))));
}
function Summary(props) {
    const { detail, place } = props;
    const { row } = detail;
    return (h("div", { class: "panel" },
        h("div", { class: "row between" },
            h("span", { class: "row" },
                h("span", { class: "big" }, row.reward === null ? "unscored" : fixed(row.reward, 3)),
                h(Badge, { name: row.status }),
                row.outcome && row.outcome !== "ok" && h("span", { class: "muted" }, visible(row.outcome)),
                detail.rank !== null && (h("a", { href: path([...place, "groups", row.group || row.task_id], { step: row.step }) },
                    "rank ",
                    detail.rank,
                    " of ",
                    detail.group_size,
                    " in its group")),
                row.fork_of && h(ForkLink, { place: place, row: row }),
                h(Dimensions, { of: row.dimensions })),
            h("span", { class: "muted small" },
                place[0] === "runs" && `${row.mode} step ${row.step} · `,
                clock(row.started),
                " \u00B7 ",
                duration(row.seconds),
                row.tokens !== null && ` · ${num(row.tokens)} tokens`,
                row.cost !== null && ` · cost ${num(row.cost)}`)),
        detail.source && h("p", { class: "small muted" },
            "source of the reward: ",
            visible(detail.source)),
        row.message && (h("pre", { class: "box bad", role: "note" }, visible(row.message))),
        detail.capture_errors.map((text) => (h("div", { class: "box bad", key: text },
            "not trained, the recording is damaged: ",
            visible(text)))),
        detail.notes.map((text) => (h("p", { class: "small muted", key: text }, visible(text)))),
        h("details", { open: detail.task.length < 400 },
            h("summary", null, "task"),
            h("pre", null, visible(pretty(detail.task)))),
        h(Facts, { detail: detail })));
}
/** Link a fork to the rollout that it repeats. */
function ForkLink(props) {
    const { fork_of, fork_call } = props.row;
    const call = fork_call ? ["calls", fork_call] : [];
    return (h("a", { href: path([...props.place, "rollouts", fork_of, ...call]), title: fork_of },
        fork_call ? "fork of" : "repeats",
        " ",
        shortId(fork_of)));
}
function Facts(props) {
    const { row, attempts, ratings, links, trace_id } = props.detail;
    return (h("dl", { class: "facts" },
        h("dt", null, "ids"),
        h("dd", null,
            h("code", null, row.rollout_id),
            " ",
            row.attempt_id && h("code", null, row.attempt_id)),
        (row.user || row.session || row.tags.length > 0) && (h(Fragment, null,
            h("dt", null, "user"),
            h("dd", null, visible(row.user || "–")),
            h("dt", null, "session"),
            h("dd", null, visible(row.session || "–")),
            h("dt", null, "tags"),
            h("dd", null, visible(row.tags.join(", ") || "–")))),
        attempts.length > 1 && (h(Fragment, null,
            h("dt", null, "attempts"),
            h("dd", null, attempts.map((attempt) => `${attempt.number} ${attempt.status}${attempt.message ? `: ${visible(attempt.message)}` : ""}`).join("; ")))),
        ratings.length > 0 && (h(Fragment, null,
            h("dt", null, "ratings"),
            h("dd", null,
                h(Ratings, { ratings: ratings })))),
        trace_id && (h(Fragment, null,
            h("dt", null, "trace"),
            h("dd", null,
                h("code", null, trace_id),
                " ",
                links.map((link) => (h("a", { key: link.url, href: link.url, target: "_blank", rel: "noreferrer noopener" },
                    "open in ",
                    link.name))))))));
}
/** Show the tree of spans beside the chosen span, or beside the whole conversation. */
export function Trace(props) {
    const { detail, place } = props;
    const address = useAddress();
    const chosen = detail.spans.find((span) => span.span_id === address.searchParams.get("span"));
    const agents = [...new Set(detail.spans.filter((span) => span.call_id).map((span) => span.agent))];
    const agent = address.searchParams.get("of") ?? "";
    const choose = (span) => go(withQuery(address, { span: span?.span_id ?? null }), true);
    return (h("div", { class: "grid trace" },
        h(Tree, { spans: detail.spans, calls: detail.calls, chosen: chosen, choose: choose }),
        h("div", null, chosen ? (h(Fragment, null,
            h("button", { type: "button", class: "small quiet", onClick: () => choose(undefined) }, "whole conversation"),
            h(SpanBox, { place: place, detail: detail, span: chosen, isAlone: true }))) : (h(Fragment, null,
            agents.length > 1 && (h("div", { class: "row", role: "group", "aria-label": "conversation of" }, ["", ...agents].map((name) => (h("button", { type: "button", key: name, class: "small", "aria-pressed": agent === name, onClick: () => go(withQuery(address, { of: name }), true) }, name ? visible(name) : "all"))))),
            detail.spans
                .filter((span) => isShown(span) && (!agent || span.agent === agent))
                .map((span) => (h(SpanBox, { key: span.span_id, place: place, detail: detail, span: span }))))))));
}
function isShown(span) {
    return Boolean(span.call_id || span.output.length || span.arguments || span.result || span.reward !== null || span.message);
}
function Tree(props) {
    const { spans, chosen } = props;
    const end = Math.max(1e-9, ...spans.filter((span) => !span.is_late).map((span) => span.end));
    const move = (event) => {
        const by = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
        if (!by)
            return;
        const index = chosen ? spans.indexOf(chosen) + by : 0;
        const next = spans[Math.max(0, Math.min(spans.length - 1, index))];
        props.choose(next);
        event.preventDefault();
        const buttons = event.currentTarget.querySelectorAll("button");
        buttons[Math.max(0, Math.min(spans.length - 1, index))]?.focus();
    };
    return (h("nav", { class: "panel tree", "aria-label": "spans", onKeyDown: move },
        spans.length === 0 && h("p", { class: "muted" }, "no span was recorded"),
        spans.map((span) => (h("button", { type: "button", key: span.span_id, "aria-pressed": span === chosen, onClick: () => props.choose(span === chosen ? undefined : span) },
            h("span", { class: "name", style: { paddingLeft: `${Math.min(span.depth, 12) * 14}px` } },
                h("i", { class: `kind ${span.kind.toLowerCase()}` }, span.kind.toLowerCase()),
                h("b", null, visible(span.name)),
                h(Fates, { calls: props.calls.filter((call) => call.span_id === span.span_id) })),
            h("span", { class: "line", "aria-hidden": "true" },
                h("i", { class: span.status === "error" ? "bad" : "", style: {
                        left: `${Math.min(99, (100 * Math.max(0, span.start)) / end)}%`,
                        width: `${Math.min(100, (100 * Math.max(0, span.end - span.start)) / end)}%`,
                    } })),
            h("span", { class: "small muted number" }, span.reward !== null ? num(span.reward) : duration(span.end - span.start)))))));
}
/** Return whether training decided about a call; calls of production are only recorded. */
function isJudged(call) {
    return call.fate !== "recorded" && !call.replayed_from;
}
function fateClass(call) {
    if (call.fate !== "trained" || call.advantage === null)
        return call.fate;
    return call.advantage > 0 ? "trained" : call.advantage < 0 ? "negative" : "";
}
function Fates(props) {
    return (h(Fragment, null,
        props.calls.some((call) => call.is_fork) && h("span", { class: "fate frozen" }, "fork"),
        props.calls.filter((call) => call.replayed_from).map((call) => (h("span", { key: call.choice, class: "fate frozen", title: call.reason }, "replayed"))),
        props.calls.filter(isJudged).map((call) => (h("span", { key: call.choice, class: `fate ${fateClass(call)}`, title: `${call.fate} ${call.reason}` }, call.advantage === null ? (call.fate === "trained" ? "trained" : call.fate) : signed(call.advantage))))));
}
function SpanBox(props) {
    const { span, detail, place } = props;
    const calls = detail.calls.filter((call) => call.span_id === span.span_id);
    const last = span.input.at(-1);
    return (h("article", { class: "panel span" },
        h("header", { class: "row between" },
            h("b", null,
                visible(span.agent || span.name),
                " ",
                h("span", { class: "muted small" }, span.kind.toLowerCase())),
            calls.map((call) => (h("a", { key: call.choice, class: "small", href: path([...place, "rollouts", detail.row.rollout_id, "calls", call.call_id]) },
                call.replayed_from && h(Badge, { name: "replayed", title: call.reason }),
                isJudged(call) && h(Badge, { name: call.fate, title: call.reason }),
                " ",
                isJudged(call) ? "why" : "the call")))),
        calls.filter(isJudged).map((call) => (h("p", { class: "small muted", key: call.choice }, visible(call.why || call.reason)))),
        calls[0]?.replayed_from && (h("p", { class: "small muted" },
            "answered as in",
            " ",
            h("a", { href: path([...place, "rollouts", calls[0].replayed_from, "calls", calls[0].call_id]) },
                "rollout ",
                shortId(calls[0].replayed_from)),
            ", which has its texts")),
        span.message && h("pre", { class: "box bad" }, visible(span.message)),
        props.isAlone ? (span.input.map((message, n) => h(MessageBox, { key: n, message: message, place: place }))) : (last && (h(Fragment, null,
            span.input.length > 1 && (h("details", null,
                h("summary", { class: "small muted" }, plural(span.input.length - 1, "earlier message")),
                span.input.slice(0, -1).map((message, n) => (h(MessageBox, { key: n, message: message, place: place }))))),
            h(MessageBox, { message: last, place: place })))),
        span.arguments && h("pre", { class: "code" }, visible(pretty(span.arguments))),
        span.result && h("pre", null, visible(pretty(span.result))),
        span.output.map((message, n) => (h(MessageBox, { key: n, message: message, place: place }))),
        span.reward !== null && h("p", null,
            "reward ",
            num(span.reward)),
        props.isAlone && h(Attributes, { place: place, rollout: detail.row.rollout_id, span: span.span_id })));
}
function Attributes(props) {
    const [isOpen, setOpen] = useState(false);
    const asked = useApi(isOpen ? apiPath(props.place, "rollouts", props.rollout, "spans", props.span) : null);
    return (h("details", { onToggle: (event) => setOpen(event.currentTarget.open) },
        h("summary", null, "all attributes"),
        asked.data ? (h(Scroller, { label: "attributes" },
            h("table", null,
                h("tbody", null, Object.entries(asked.data.attributes).map(([name, value]) => (h("tr", { key: name },
                    h("th", { scope: "row" }, visible(name)),
                    h("td", null,
                        h("pre", null, visible(pretty(value))))))))))) : (isOpen && h(Waiting, { of: asked, what: "attributes" }))));
}
