// A store: what users saw in production, to read, filter, rate and train on.
import { Fragment, h } from "../vendor/preact.js";
import { useApi } from "../client.js";
import { Choice, Copyable, Heading, Pager, Problems, Waiting, rangeOf } from "../components.js";
import { Filters, apiPath, apiQuery, filtersOf, useWholeSearch } from "../filters.js";
import { clock, duration, plural, visible } from "../format.js";
import { useEffect, useRef } from "../vendor/hooks.js";
import { useKeys } from "../keys.js";
import { RatingForm, Ratings } from "../rating.js";
import { OF_ONE_PAGE, go, opens, path, useAddress, withQuery } from "../router.js";
import { ReadState, RowReward, RowTexts, SORTS } from "./rollouts.js";
import { Trace } from "./rollout.js";
export function StorePage(props) {
    const place = ["stores", props.name];
    const address = useAddress();
    const live = place.join("/");
    const page = useApi(apiPath(place, "rollouts") + apiQuery(address, true), live);
    const facets = useApi(apiPath(place, "facets") + apiQuery(address, false), live);
    const goesOn = useWholeSearch(page, facets, address.searchParams.has("sort"));
    const rows = page.data?.rows ?? [];
    const open = address.searchParams.get("open");
    const at = rows.findIndex((row) => row.rollout_id === open);
    const show = (n) => {
        const row = rows[Math.max(0, Math.min(rows.length - 1, n))];
        if (row)
            go(withQuery(address, { open: row.rollout_id, span: null, of: null }), true);
    };
    const nextUnrated = () => {
        const next = rows.findIndex((row, n) => n > at && !row.rated);
        if (next >= 0)
            show(next);
        else if (page.data?.cursor)
            go(withQuery(address, { ...OF_ONE_PAGE, cursor: page.data.cursor }));
    };
    useKeys({
        j: () => show(at + 1),
        k: () => show(at < 0 ? 0 : at - 1),
        n: nextUnrated,
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
                "keys: j, k, n next unrated, Enter opens, Esc closes",
                props.canWrite && ", 1 bad, 2 fair, 3 good")),
        h(Problems, { of: page }),
        h(ReadState, { page: page.data, isLoading: page.isLoading, goesOn: goesOn }),
        page.data ? (h("div", { class: "grid reader" },
            h("div", null,
                rows.length === 0 && h("p", { class: "panel empty" },
                    "No rollout matches",
                    page.data.is_partial && " so far",
                    "."),
                h("div", { role: "list", "aria-label": "rollouts" }, rows.map((row, n) => (h(Entry, { key: row.rollout_id, row: row, rows: rows, isOpen: n === at, address: withQuery(address, { open: row.rollout_id, span: null, of: null }) })))),
                h(Pager, { total: page.data.total, shown: rows.length, cursor: page.data.cursor, noun: "rollout", isPartial: page.data.is_partial }),
                h(ExportBox, { place: place })),
            h("div", { class: "pane" }, open ? (h(OpenRollout, { key: open, place: place, id: open, canWrite: props.canWrite, done: page.reload, next: nextUnrated })) : (h("p", { class: "panel empty" },
                "Choose a rollout to read it",
                props.canWrite && " and rate it",
                "."))))) : (!page.error && h(Waiting, { of: page, what: "rollouts" }))));
}
function Entry(props) {
    const { row } = props;
    return (h("div", { role: "listitem", class: props.isOpen ? "entry on" : "entry", onClick: opens(props.address) },
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
    const top = useRef(null);
    useEffect(() => {
        // in a narrow window it is below the list
        if (innerWidth <= 1100)
            top.current?.scrollIntoView();
    }, [id]);
    const asked = useApi(apiPath(place, "rollouts", id), place.join("/"));
    const { data } = asked;
    const address = useAddress();
    if (!data)
        return h(Waiting, { of: asked, what: "the rollout" });
    return (h(Fragment, null,
        h(Problems, { of: asked }),
        h("div", { class: "row between", ref: top },
            h("a", { href: path([...place, "rollouts", id], filtersOf(address)) }, "open the whole page"),
            h("button", { type: "button", class: "small", onClick: props.next }, "next unrated (n)")),
        props.canWrite ? (h(RatingForm, { place: place, id: data.row.attempt_id || id, ratings: data.ratings, done: () => {
                asked.reload();
                props.done();
            } })) : (h("p", { class: "small muted" }, "Read-only: start it with --write to rate.")),
        data.row.message && h("pre", { class: "box bad" }, visible(data.row.message)),
        h(Ratings, { ratings: data.ratings }),
        h(Trace, { place: place, detail: data })));
}
/** Offer the program and the command that train on what the filters match. */
function ExportBox(props) {
    const address = useAddress();
    const asked = useApi(apiPath(props.place, "export") + apiQuery(address, false), props.place.join("/"));
    if (!asked.data)
        return null;
    const { attempts, calls, program, command, preferences, note } = asked.data;
    return (h("details", { class: "panel" },
        h("summary", null,
            h("b", null, "Train on what is listed"),
            " ",
            h("span", { class: "muted small" },
                plural(attempts, "attempt"),
                ", ",
                plural(calls, "call"))),
        h("p", { class: "small muted" }, "This page starts no training: copy one of these."),
        note && (h("div", { class: "box warn", role: "note" }, visible(note))),
        h(Copyable, { label: "the program", text: program }),
        h(Copyable, { label: "the command", text: command }),
        preferences && (h(Fragment, null,
            h("p", { class: "small muted" }, "Or learn from good and bad ratings alike:"),
            h(Copyable, { label: "the program of Preferences", text: preferences })))));
}
