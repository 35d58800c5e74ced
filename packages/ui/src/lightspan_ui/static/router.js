// Keep everything that is shown in the address: filters, order, page, chosen span.
import { useEffect, useState } from "./vendor/hooks.js";
const listeners = new Set();
/** Show another address of this page. `replace` adds no entry to the history. */
export function go(address, replace = false) {
    history[replace ? "replaceState" : "pushState"](null, "", address);
    for (const listener of listeners)
        listener();
}
/** Return the present address, and render again when it changes. */
export function useAddress() {
    const [, render] = useState(0);
    useEffect(() => {
        const changed = () => render((n) => n + 1);
        listeners.add(changed);
        addEventListener("popstate", changed);
        return () => {
            listeners.delete(changed);
            removeEventListener("popstate", changed);
        };
    }, []);
    return new URL(location.href);
}
/** Parameters that belong to one answer of a list; a change of its filters removes them. */
export const OF_ONE_PAGE = { cursor: null, open: null, span: null, of: null };
/** Return the address with other parameters; a parameter of null or "" is removed. */
export function withQuery(address, changes) {
    const url = new URL(address);
    for (const [name, value] of Object.entries(changes)) {
        if (value === null || value === undefined || value === "")
            url.searchParams.delete(name);
        else
            url.searchParams.set(name, String(value));
    }
    return url.pathname + url.search;
}
/** Return an address from path segments, which may have any characters, and parameters. */
export function path(segments, query = {}) {
    const url = new URL(location.origin);
    url.pathname = segments.map(encodeURIComponent).join("/");
    return withQuery(url, query);
}
/** Return a handler that opens an address by a click anywhere on a row, but for its own controls. */
export function opens(address) {
    return (event) => {
        const target = event.target instanceof Element ? event.target : null;
        if (target?.closest("a, button, input, select, summary, label"))
            return;
        if (getSelection()?.toString())
            return; // somebody marks text to copy it
        go(address);
    };
}
/** Follow links of this page without loading it anew. */
export function followLinks() {
    document.addEventListener("click", (event) => {
        const link = event.target instanceof Element ? event.target.closest("a[href]") : null;
        if (!(link instanceof HTMLAnchorElement) || link.origin !== location.origin)
            return;
        if (link.target || link.hash || event.button)
            return;
        if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey)
            return;
        event.preventDefault();
        const isOtherPage = link.pathname !== location.pathname;
        go(link.pathname + link.search);
        if (isOtherPage) {
            scrollTo(0, 0);
            document.getElementById("main")?.focus({ preventScroll: true });
        }
    });
}
