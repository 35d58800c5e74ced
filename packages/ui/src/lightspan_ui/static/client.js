// Ask the server, and ask again when it says that something changed.
import { useEffect, useRef, useState } from "./vendor/hooks.js";
/** Beginning of the addresses of the API. */
export const ROOT = "/api/v1";
const SETTLE_MS = 250;
const changes = new EventTarget();
let source = null;
/** Listen to the server while the page is visible: a browser allows six connections per host, so
 * that hidden pages must not hold any. */
function listen() {
    if (document.hidden) {
        source?.close();
        source = null;
        return;
    }
    if (source)
        return;
    source = new EventSource(`${ROOT}/events`);
    source.addEventListener("change", (event) => {
        const change = JSON.parse(event.data);
        changes.dispatchEvent(new CustomEvent("change", { detail: change.place }));
    });
    source.onopen = () => changes.dispatchEvent(new CustomEvent("change", { detail: "" }));
}
/** Start to follow changes on the server. */
export function followChanges() {
    document.addEventListener("visibilitychange", listen);
    listen();
}
async function answer(response) {
    if (response.ok)
        return (await response.json());
    let reason = `${response.status} ${response.statusText}`;
    try {
        reason = (await response.json()).error || reason;
    }
    catch {
        // not an answer of the API, such as one of a proxy
    }
    throw new Error(reason);
}
/** Return the answer to a GET request.
 *
 * @param address path and query below `/api/v1`; null asks nothing
 * @param place `runs/NAME` or `stores/NAME`, whose changes ask again; "*" for any; "" for none
 */
export function useApi(address, place = "") {
    const [state, setState] = useState({
        of: null,
        data: null,
        error: "",
    });
    const [round, setRound] = useState(0);
    const isBusy = useRef(false);
    const isStale = useRef(false);
    const reload = () => {
        // a request that is under way goes on: where changes come faster than answers, none would arrive
        if (isBusy.current)
            isStale.current = true;
        else
            setRound((n) => n + 1);
    };
    useEffect(() => {
        if (address === null)
            return undefined;
        const stop = new AbortController();
        isBusy.current = true;
        fetch(ROOT + address, { signal: stop.signal, headers: { Accept: "application/json" } })
            .then((response) => answer(response))
            .then((data) => setState({ of: address, data, error: "" }))
            .catch((error) => {
            if (stop.signal.aborted)
                return;
            const text = error instanceof TypeError ? "no connection to lightspan ui" : String(error.message);
            // an error of another question must not show the answer to the earlier one
            setState((old) => ({ of: address, data: old.of === address ? old.data : null, error: text }));
        })
            .finally(() => {
            if (stop.signal.aborted)
                return;
            isBusy.current = false;
            if (isStale.current)
                setRound((n) => n + 1);
            isStale.current = false;
        });
        return () => {
            stop.abort();
            isBusy.current = false;
        };
    }, [address, round]);
    useChanges(place, reload);
    return { data: state.data, error: state.error, isLoading: state.of !== address, reload };
}
/** Call `act` when a place changed, soon after the last of several changes. */
function useChanges(place, act) {
    const latest = useRef(act);
    latest.current = act;
    useEffect(() => {
        if (!place)
            return undefined;
        let timer;
        const changed = (event) => {
            const name = event.detail;
            if (name && place !== "*" && place !== name)
                return;
            clearTimeout(timer);
            timer = setTimeout(() => latest.current(), SETTLE_MS);
        };
        changes.addEventListener("change", changed);
        return () => {
            clearTimeout(timer);
            changes.removeEventListener("change", changed);
        };
    }, [place]);
}
/** Send JSON to the server and return its answer; throws an `Error` with the reason. */
export async function post(address, body) {
    const response = await fetch(ROOT + address, {
        method: "POST",
        headers: { "Content-Type": "application/json", Accept: "application/json" },
        body: JSON.stringify(body),
    });
    return answer(response);
}
