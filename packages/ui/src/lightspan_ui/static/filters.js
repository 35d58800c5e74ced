// Filters of rollouts, which are parameters of the address.
import { Fragment, h } from "./vendor/preact.js";
import { useEffect } from "./vendor/hooks.js";
import { Histogram } from "./charts.js";
import { Choice, TextField } from "./components.js";
import { fixed, num, percent } from "./format.js";
import { OF_ONE_PAGE, go, useAddress, withQuery } from "./router.js";
/** Return the path of a place below the root of the API. */
export function apiPath(place, ...rest) {
    return `/${[...place, ...rest].map(encodeURIComponent).join("/")}`;
}
const FILTERS = [
    ...["text", "mode", "status", "outcome", "service", "agent", "user", "session", "tag", "rated"],
    ...["task", "group", "step", "step_min", "step_max", "reward_min", "reward_max"],
    ...["since", "until", "tokens_min", "tokens_max", "cost_min", "cost_max", "seconds_min", "seconds_max"],
];
const PAGING = ["sort", "limit", "cursor"];
/** Return the query of the API for the filters (and the page) that an address names. */
export function apiQuery(address, withPage) {
    const query = new URLSearchParams();
    for (const name of withPage ? [...FILTERS, ...PAGING] : FILTERS) {
        const value = address.searchParams.get(name);
        if (value)
            query.set(name, value);
    }
    return query.size ? `?${query}` : "";
}
/** Return the filters and the order of an address, to pass them on to a page that leads back. */
export function filtersOf(address) {
    return Object.fromEntries([...FILTERS, "sort"].map((name) => [name, address.searchParams.get(name)]));
}
/** Return the address without any filter. */
export function withoutFilters(address) {
    const url = new URL(address);
    for (const name of FILTERS)
        url.searchParams.delete(name);
    return withQuery(url, OF_ONE_PAGE);
}
/** Ask again while a search for text has neither filled the page nor reached the oldest attempt.
 *
 * @param needsAll whether the page needs all that match, such as to sort them
 * @returns whether the search goes on
 */
export function useWholeSearch(page, facets, needsAll) {
    const { data } = page;
    const goesOn = data !== null && data.is_partial && (needsAll || !data.cursor);
    useEffect(() => {
        if (!goesOn)
            return;
        page.reload();
        facets.reload();
    }, [data]);
    return goesOn;
}
/** Return the values of a filter with their counts, which are lower bounds while a search goes on. */
function counted(facets, name) {
    const more = facets?.is_partial ? "+" : "";
    return (facets?.[name] ?? []).map((count) => [count.name, `${count.name} (${count.n.toLocaleString("en")}${more})`]);
}
/** Show the filters with the numbers of rollouts that each value leaves. */
export function Filters(props) {
    const { facets } = props;
    const address = useAddress();
    const isFiltered = FILTERS.some((name) => address.searchParams.has(name));
    return (h("form", { class: "filters row", role: "search", onSubmit: (event) => event.preventDefault() },
        h(TextField, { name: "text", label: "text", type: "search", placeholder: "prompt, answer, tool" }),
        !props.isProduction && (h(Fragment, null,
            h(Choice, { name: "mode", label: "mode", empty: "all", values: counted(facets, "mode") }),
            h(TextField, { name: "step", label: "step", type: "number" }))),
        props.isProduction && (h(Choice, { name: "service", label: "service", empty: "all", values: counted(facets, "service") })),
        h(Choice, { name: "status", label: "status", empty: "all", values: counted(facets, "status") }),
        h(Choice, { name: "agent", label: "agent", empty: "all", values: counted(facets, "agent") }),
        props.isProduction && h(ProductionFilters, { facets: facets }),
        facets && facets.rewards.length > 0 && h(RewardFilter, { facets: facets }),
        isFiltered && h("a", { href: withoutFilters(address) }, "clear")));
}
function ProductionFilters(props) {
    const { facets } = props;
    return (h(Fragment, null,
        h(Choice, { name: "rated", label: "rated", empty: "all", values: counted(facets, "rated") }),
        facets && facets.user.length > 0 && h(Choice, { name: "user", label: "user", empty: "all", values: counted(facets, "user") }),
        facets && facets.session.length > 0 && (h(Choice, { name: "session", label: "session", empty: "all", values: counted(facets, "session") })),
        facets && facets.tag.length > 0 && h(Choice, { name: "tag", label: "tag", empty: "all", values: counted(facets, "tag") }),
        h(TextField, { name: "since", label: "since", placeholder: "2h, 7d, 2026-11-20" }),
        h("details", { class: "more" },
            h("summary", null, "more"),
            h("div", { class: "row" },
                h(TextField, { name: "until", label: "until", placeholder: "1h, 2026-11-21" }),
                h(TextField, { name: "tokens_min", label: "tokens from", type: "number" }),
                h(TextField, { name: "cost_min", label: "cost from", type: "number" }),
                h(TextField, { name: "seconds_min", label: "seconds from", type: "number" })))));
}
function RewardFilter(props) {
    const { facets } = props;
    const address = useAddress();
    const bound = (name) => {
        const text = address.searchParams.get(name);
        return text === null ? null : Number(text);
    };
    const [low, high] = [bound("reward_min"), bound("reward_max")];
    const pick = (bin) => {
        const isPicked = low === bin.low && high === bin.high;
        go(withQuery(address, {
            reward_min: isPicked ? null : bin.low,
            reward_max: isPicked ? null : bin.high,
            ...OF_ONE_PAGE,
        }));
    };
    return (h("div", { class: "field" },
        h("span", null,
            "rewards",
            facets.is_partial && " of those found so far",
            ": mean ",
            fixed(facets.mean),
            ", ",
            percent(facets.scored / (facets.total || 1)),
            " scored",
            (low !== null || high !== null) && `; ${num(low)} to ${num(high)}`),
        h(Histogram, { label: "rewards", bins: facets.rewards, low: low, high: high, onPick: pick })));
}
