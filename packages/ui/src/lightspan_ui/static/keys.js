// Move through a list by keys: j and k, Enter opens, Escape goes back.
import { useEffect, useRef, useState } from "./vendor/hooks.js";
/** Return whether a key belongs to a field in which somebody types. */
export function isTyping(event) {
    const target = event.target;
    if (event.metaKey || event.ctrlKey || event.altKey)
        return true;
    return target instanceof HTMLElement && target.matches("input, select, textarea");
}
/** Call the handler of a pressed key. A handler of another element may stop the event before. */
export function useKeys(handlers) {
    const latest = useRef(handlers);
    latest.current = handlers;
    useEffect(() => {
        const pressed = (event) => {
            const handler = latest.current[event.key];
            if (!handler || event.defaultPrevented || isTyping(event))
                return;
            event.preventDefault();
            handler();
        };
        addEventListener("keydown", pressed);
        return () => removeEventListener("keydown", pressed);
    }, []);
}
/** Return the index of the row that j and k have reached; -1 at first. Enter calls `open`. */
export function useRowKeys(size, open) {
    const [index, setIndex] = useState(-1);
    const move = (by) => {
        const next = Math.max(0, Math.min(size - 1, index + by));
        setIndex(next);
        document.querySelectorAll("tbody tr, .entry")[next]?.scrollIntoView({ block: "nearest" });
    };
    useKeys({
        j: () => move(1),
        k: () => move(-1),
        ...(index >= 0 && index < size ? { Enter: () => open(index) } : {}),
    });
    return index;
}
