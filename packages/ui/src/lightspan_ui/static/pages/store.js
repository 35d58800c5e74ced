// A store: what users saw in production, to read, filter, rate and train on.
import { Fragment, h } from "../vendor/preact.js";
import { useApi } from "../client.js";
import { Choice, Copyable, Heading, Pager, Problems, Waiting, rangeOf } from "../components.js";
import { Filters, apiPath, apiQuery } from "../filters.js";
import { clock, duration, plural, visible } from "../format.js";
import { useKeys } from "../keys.js";
import { RatingForm } from "../rating.js";
import { go, path, useAddress, withQuery } from "../router.js";
import { ReadState, RowReward, RowTexts, SORTS } from "./rollouts.js";
import { Trace } from "./rollout.js";
export function StorePage(props) {
    const place = ["stores", props.name];
    const address = useAddress();
    const live = place.join("/");
    const page = useApi(apiPath(place, "rollouts") + apiQuery(address, true), live);
    const facets = useApi(apiPath(place, "facets") + apiQuery(address, false), live);
    const rows = page.data?.rows ?? [];
    const open = address.searchParams.get("open");
    const at = rows.findIndex((row) => row.rollout_id === open);
    const show = (n) => {
        const row = rows[Math.max(0, Math.min(rows.length - 1, n))];
        if (row)
            go(withQuery(address, { open: row.rollout_id, span: null, of: null }), true);
    };
    useKeys({
        j: () => show(at + 1),
        k: () => show(at < 0 ? 0 : at - 1),
        n: () => show(at + 1),
        Escape: () => go(withQuery(address, { open: null, span: null, of: null }), true),
        ...(open ? { Enter: () => go(path([...place, "rollouts", open])) } : {}),
    });
    return (h("section", null,
        h(Heading, { title: props.name, trail: [["stores", "/"]] },
            h("a", { href: path([...place, "groups"]) }, "by task")),
        h(Filters, { facets: facets.data, isProduction: true }),
        h("div", { class: "row between" },
            h(Choice, { name: "sort", label: "order", empty: "newest first", values: SORTS.slice(1) }),
            h("span", { class: "muted small" },
                "keys: j, k, Enter",
                props.canWrite && ", 1 bad, 2 fair, 3 good")),
        h(Problems, { of: page }),
        h(ReadState, { page: page.data, isLoading: page.isLoading }),
        page.data ? (h("div", { class: "grid reader" },
            h("div", null,
                rows.length === 0 && h("p", { class: "panel empty" }, "No rollout matches."),
                h("div", { role: "list", "aria-label": "rollouts" }, rows.map((row, n) => (h(Entry, { key: row.rollout_id, row: row, rows: rows, isOpen: n === at, address: withQuery(address, { open: row.rollout_id, span: null, of: null }) })))),
                h(Pager, { total: page.data.total, shown: rows.length, cursor: page.data.cursor, noun: "rollout", isPartial: page.data.is_partial }),
                h(ExportBox, { place: place })),
            h("div", null, open ? (h(OpenRollout, { key: open, place: place, id: open, canWrite: props.canWrite, done: page.reload, next: () => show(at + 1) })) : (h("p", { class: "panel empty" },
                "Choose a rollout to read it",
                props.canWrite && " and rate it",
                "."))))) : (!page.error && h(Waiting, { of: page, what: "rollouts" }))));
}
function Entry(props) {
    const { row } = props;
    return (h("div", { role: "listitem", class: props.isOpen ? "entry on" : "entry" },
        h("div", { class: "row between small" },
            h("a", { href: props.address, title: row.rollout_id, "aria-current": props.isOpen ? "true" : undefined }, clock(row.started ?? row.created)),
            h("span", { class: "muted" },
                visible(row.run_id),
                " \u00B7 ",
                duration(row.seconds))),
        h(RowReward, { row: row, ...rangeOf(props.rows.map((each) => each.reward)) }),
        h(RowTexts, { row: row }),
        (row.user || row.tags.length > 0) && (h("div", { class: "small muted" }, visible([row.user, ...row.tags].filter(Boolean).join(", "))))));
}
function OpenRollout(props) {
    const { place, id } = props;
    const asked = useApi(apiPath(place, "rollouts", id), place.join("/"));
    const { data } = asked;
    if (!data)
        return h(Waiting, { of: asked, what: "the rollout" });
    return (h(Fragment, null,
        h(Problems, { of: asked }),
        h("div", { class: "row between" },
            h("a", { href: path([...place, "rollouts", id]) }, "open the whole page"),
            h("button", { class: "small", onClick: props.next }, "next (n)")),
        props.canWrite ? (h(RatingForm, { place: place, id: data.row.attempt_id || id, ratings: data.ratings, done: () => {
                asked.reload();
                props.done();
            } })) : (h("p", { class: "small muted" }, "Read-only: start it with --write to rate.")),
        data.row.message && h("pre", { class: "box bad" }, visible(data.row.message)),
        data.ratings
            .filter((rating) => rating.comment)
            .map((rating) => (h("p", { class: "small", key: rating.at },
            "\u201C",
            visible(rating.comment),
            "\u201D"))),
        h(Trace, { place: place, detail: data })));
}
/** Offer the program and the command that train on what the filters match. */
function ExportBox(props) {
    const address = useAddress();
    const asked = useApi(apiPath(props.place, "export") + apiQuery(address, false));
    if (!asked.data)
        return null;
    const { attempts, calls, program, command } = asked.data;
    return (h("details", { class: "panel" },
        h("summary", null,
            h("b", null, "Train on these"),
            " ",
            h("span", { class: "muted small" },
                plural(attempts, "attempt"),
                ", ",
                plural(calls, "call"))),
        h("p", { class: "small muted" }, "This page starts no training: copy one of these."),
        h(Copyable, { label: "the program", text: program }),
        h(Copyable, { label: "the command", text: command })));
}
