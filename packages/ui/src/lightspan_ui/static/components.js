// Parts that several pages share.
import { Fragment, h } from "./vendor/preact.js";
import { useEffect, useState } from "./vendor/hooks.js";
import { ROOT } from "./client.js";
import { fixed, num, plural, pretty, signed, visible } from "./format.js";
import { OF_ONE_PAGE, go, path, useAddress, withQuery } from "./router.js";
/** Set the title of the window and show the heading of a page with its way back. */
export function Heading(props) {
    useEffect(() => {
        document.title = `${visible(props.title).slice(0, 80)} · lightspan`;
    }, [props.title]);
    return (h("header", { class: "heading" },
        props.trail && (h("nav", { class: "trail", "aria-label": "Breadcrumb" }, props.trail.map(([name, address]) => (h(Fragment, { key: address },
            h("a", { href: address }, visible(name)),
            h("span", { "aria-hidden": "true" }, " / ")))))),
        h("div", { class: "row between" },
            h("h1", null, visible(props.title)),
            h("div", { class: "row" }, props.children))));
}
const TONES = {
    succeeded: "good",
    finished: "good",
    trained: "good",
    failed: "bad",
    lost: "bad",
    timeout: "bad",
    damaged: "bad",
    rejected: "warn",
    cancelled: "warn",
    stopped: "warn",
    silent: "warn",
    departed: "warn",
    running: "info",
};
/** Show a state as a coloured word. */
export function Badge(props) {
    return (h("span", { class: `badge ${TONES[props.name] ?? ""}`, title: props.title },
        props.name === "running" && h("i", { class: "pulse", "aria-hidden": "true" }),
        props.name));
}
/** Show what is awaited, or why it did not come. */
export function Waiting(props) {
    return props.of.error ? (h("div", { class: "box bad", role: "alert" }, visible(props.of.error))) : (h("p", { class: "muted", "aria-busy": "true" },
        "Loading ",
        props.what,
        "\u2026"));
}
/** Show an error beside an answer that is still shown. */
export function Problems(props) {
    const text = props.of.error || props.error;
    return text ? (h("div", { class: "box bad", role: "alert" }, visible(text))) : null;
}
/** Show a reward as a number with a bar from the lowest to the highest reward of its table. */
export function Reward(props) {
    if (props.value === null)
        return h("span", { class: "muted" }, "unscored");
    const low = props.low ?? 0;
    const span = (props.high ?? 1) - low || 1;
    const share = Math.max(0, Math.min(1, (props.value - low) / span));
    return (h("span", { class: "score" },
        h("span", { class: "number" }, fixed(props.value)),
        h("span", { class: "bar", "aria-hidden": "true" },
            h("i", { style: { width: `${100 * share}%` } }))));
}
/** Return the lowest and the highest reward, 0 and 1 included. */
export function rangeOf(values) {
    const known = values.filter((value) => value !== null);
    return { low: Math.min(0, ...known), high: Math.max(1, ...known) };
}
/** Show a change with its interval; it is coloured only if the interval does not contain 0. */
export function Gain(props) {
    const gain = props.of;
    if (!gain || gain.mean === null)
        return h("span", { class: "muted" }, "\u2013");
    const { low, high } = gain;
    const tone = low !== null && low > 0 ? "plus" : high !== null && high < 0 ? "minus" : "";
    return (h("span", { class: tone },
        h("b", null, signed(gain.mean)),
        " ",
        h("span", { class: "small" }, low === null || high === null ? "no interval" : `${fixed(low)} to ${fixed(high)}`)));
}
/** Say in words what an interval of a change tells. */
export function gainInWords(gain) {
    if (gain.mean === null || gain.low === null || gain.high === null) {
        return "too few tasks to tell a change from chance";
    }
    if (gain.low > 0)
        return "better by more than chance (95 %)";
    if (gain.high < 0)
        return "worse by more than chance (95 %)";
    return "no change that can be told from chance (95 %)";
}
export function Alerts(props) {
    return (h(Fragment, null, props.alerts.map((alert) => (h("div", { class: "box warn", role: "note", key: `${alert.name} ${alert.step}` },
        h("b", null,
            "Step ",
            alert.step,
            "."),
        " ",
        visible(alert.text))))));
}
export function Tile(props) {
    return (h("div", { class: "tile" },
        h("div", { class: "muted small" }, props.name),
        h("div", { class: "value" }, props.value),
        h("div", { class: "muted small" }, props.note)));
}
/** Show a table that scrolls by itself, so that a wide one never widens the page. */
export function Scroller(props) {
    return (h("div", { class: "scroller", role: "region", "aria-label": props.label, tabIndex: 0 }, props.children));
}
/** Show a select whose value is a parameter of the address. */
export function Choice(props) {
    const address = useAddress();
    const value = address.searchParams.get(props.name) ?? "";
    const isListed = !value || props.values.some(([name]) => name === value);
    return (h("label", { class: "field" },
        h("span", null, props.label),
        h("select", { value: value, onChange: (event) => go(withQuery(address, { [props.name]: event.currentTarget.value, ...OF_ONE_PAGE })) },
            props.empty !== undefined && h("option", { value: "" }, props.empty),
            !isListed && h("option", { value: value }, visible(value)),
            props.values.map(([name, text]) => (h("option", { value: name, key: name }, visible(text)))))));
}
/** Show a text field whose value is a parameter of the address once Enter is pressed. */
export function TextField(props) {
    const address = useAddress();
    const value = address.searchParams.get(props.name) ?? "";
    const [text, setText] = useState(value);
    useEffect(() => setText(value), [value]);
    const apply = () => {
        if (text !== value)
            go(withQuery(address, { [props.name]: text, ...OF_ONE_PAGE }));
    };
    const shared = {
        value: text,
        placeholder: props.placeholder ?? "",
        onInput: (event) => setText(event.currentTarget.value),
        onBlur: apply,
        onKeyDown: (event) => {
            if (event.key === "Enter")
                apply();
        },
    };
    return (h("label", { class: "field" },
        h("span", null, props.label),
        props.type === "search" ? (h("input", { type: "search", ...shared })) : props.type === "number" ? (h("input", { type: "number", step: "any", ...shared })) : (h("input", { type: "text", ...shared }))));
}
/** Show where a page of a table is, and lead to the first and the next. */
export function Pager(props) {
    const address = useAddress();
    const isFirst = !address.searchParams.has("cursor");
    return (h("div", { class: "row between pager" },
        h("span", { role: "status" },
            props.isPartial ? `at least ${plural(props.total, props.noun)}` : plural(props.total, props.noun),
            props.shown < props.total && `, ${props.shown} on this page`),
        h("span", { class: "row" },
            !isFirst && h("a", { href: withQuery(address, OF_ONE_PAGE) }, "first page"),
            props.cursor && (h("a", { class: "button", href: withQuery(address, { cursor: props.cursor }), rel: "next" }, "next page")))));
}
/** Show a message of a conversation. Text of models is text: nothing in it becomes an element. */
export function MessageBox(props) {
    const { role, text, thoughts, tools, images, is_cut } = props.message;
    return (h("article", { class: `message ${role.replace(/\W/g, "")}` },
        h("header", { class: "row between" },
            h("span", null, visible(role)),
            h("span", null, props.note)),
        thoughts && (h("details", null,
            h("summary", null, "thoughts"),
            h("pre", { class: "thoughts" }, visible(thoughts)))),
        text && h("pre", null, visible(pretty(text))),
        images.length > 0 && (h("p", { class: "images" }, images.map((image, index) => (h(Picture, { image: image, place: props.place, key: index }))))),
        tools.map((call, index) => (h("pre", { class: "code", key: index }, visible(call)))),
        !text && !thoughts && tools.length === 0 && h("pre", { class: "muted" }, "(empty)"),
        is_cut && h("p", { class: "muted small" }, "cut: the span's page has the rest")));
}
/** Show an image as a thumbnail, or say that the store has only its digest. */
function Picture(props) {
    const [isMissing, setMissing] = useState(false);
    const { digest, media_type, size } = props.image;
    const name = `${media_type || "image"}, ${size} bytes, ${digest.slice(0, 12)}`;
    if (isMissing)
        return h("span", { class: "muted small" },
            "[",
            name,
            ": bytes not recorded]");
    const address = ROOT + path([...props.place, "images", digest]);
    return (h("a", { href: address, target: "_blank", rel: "noreferrer", title: name },
        h("img", { src: address, alt: name, loading: "lazy", onError: () => setMissing(true) })));
}
/** Show lines that were added to, removed from or kept of a text. */
export function Difference(props) {
    if (props.before === props.after)
        return h("pre", { class: "muted" }, "unchanged");
    return (h("pre", { class: "difference" }, lineDifference(props.before.split("\n"), props.after.split("\n")).map(([sign, line], n) => (h("span", { class: sign === "+" ? "added" : sign === "-" ? "removed" : "", key: n },
        sign,
        " ",
        visible(line),
        "\n")))));
}
/** Compare lines by their longest common subsequence; beyond a million pairs, replace all. */
export function lineDifference(before, after) {
    const [n, m] = [before.length, after.length];
    if (n * m > 1_000_000) {
        return [
            ...before.map((line) => ["-", line]),
            ...after.map((line) => ["+", line]),
        ];
    }
    const common = Array.from({ length: n + 1 }, () => new Array(m + 1).fill(0));
    const at = (i, j) => common[i]?.[j] ?? 0;
    for (let i = n - 1; i >= 0; i--) {
        for (let j = m - 1; j >= 0; j--) {
            const row = common[i];
            row[j] = before[i] === after[j] ? at(i + 1, j + 1) + 1 : Math.max(at(i + 1, j), at(i, j + 1));
        }
    }
    const lines = [];
    let [i, j] = [0, 0];
    while (i < n || j < m) {
        if (i < n && j < m && before[i] === after[j]) {
            lines.push([" ", before[i] ?? ""]);
            i++;
            j++;
        }
        else if (i < n && (j === m || at(i + 1, j) >= at(i, j + 1))) {
            lines.push(["-", before[i++] ?? ""]);
        }
        else {
            lines.push(["+", after[j++] ?? ""]);
        }
    }
    return lines;
}
/** Show a text with a button that copies it. */
export function Copyable(props) {
    const [copy, setCopy] = useState("");
    return (h("div", { class: "copyable" },
        h("pre", { class: "code" }, props.text),
        h("button", { type: "button", class: "small", "aria-label": `copy ${props.label}`, onClick: () => void navigator.clipboard.writeText(props.text).then(() => setCopy(props.text)) }, copy === props.text ? "copied" : "copy")));
}
/** Show parts of a reward, such as its named dimensions. */
export function Dimensions(props) {
    const parts = Object.entries(props.of);
    if (!parts.length)
        return null;
    return (h("span", { class: "small muted" }, parts.map(([name, value]) => `${visible(name)} ${num(value)}`).join(", ")));
}
