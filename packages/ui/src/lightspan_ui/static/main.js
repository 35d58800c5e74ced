// Choose the page of an address, and show it beside the list of runs and stores.
import { h, render } from "./vendor/preact.js";
import { useState } from "./vendor/hooks.js";
import { followChanges, useApi } from "./client.js";
import { Heading } from "./components.js";
import { visible } from "./format.js";
import { CallPage } from "./pages/call.js";
import { ComparePage } from "./pages/compare.js";
import { GroupPage, GroupsPage } from "./pages/groups.js";
import { PromptsPage } from "./pages/prompts.js";
import { RolloutPage } from "./pages/rollout.js";
import { RolloutsPage } from "./pages/rollouts.js";
import { RunPage, SettingsPage } from "./pages/run.js";
import { RunsPage } from "./pages/runs.js";
import { StorePage } from "./pages/store.js";
import { WordsPage } from "./pages/words.js";
import { followLinks, path, useAddress } from "./router.js";
function decoded(pathname) {
    try {
        return pathname.split("/").slice(1).map(decodeURIComponent);
    }
    catch {
        return ["?"]; // a malformed escape names no page
    }
}
function Page(props) {
    const [kind = "", name = "", part = "", id = "", what = "", call = ""] = decoded(props.pathname);
    if (!kind)
        return h(RunsPage, { places: props.places });
    if (kind === "compare")
        return h(ComparePage, null);
    if (kind === "words")
        return h(WordsPage, null);
    if ((kind === "runs" || kind === "stores") && name) {
        const place = [kind, name];
        const canWrite = props.places.data?.write ?? false;
        const key = `${kind}/${name}/${part}/${id}/${call}`;
        if (part === "rollouts" && id && what === "calls" && call) {
            return h(CallPage, { key: key, place: place, rollout: id, call: call });
        }
        if (part === "rollouts" && id) {
            return h(RolloutPage, { key: key, place: place, id: id, canWrite: canWrite });
        }
        if (part === "rollouts")
            return h(RolloutsPage, { key: key, place: place });
        if (part === "groups" && id)
            return h(GroupPage, { key: key, place: place, id: id });
        if (part === "groups")
            return h(GroupsPage, { key: key, place: place });
        if (kind === "stores" && !part)
            return h(StorePage, { key: key, name: name, canWrite: canWrite });
        if (kind === "runs" && !part)
            return h(RunPage, { key: key, name: name });
        if (kind === "runs" && part === "settings")
            return h(SettingsPage, { key: key, name: name });
        if (kind === "runs" && part === "prompts")
            return h(PromptsPage, { key: key, name: name });
    }
    return (h("div", null,
        h(Heading, { title: "There is no such page" }),
        h("p", null,
            h("a", { href: "/" }, "All runs"))));
}
const THEMES = { auto: "light", light: "dark", dark: "auto" };
function chosenTheme() {
    try {
        return localStorage.getItem("theme") ?? "auto";
    }
    catch {
        return "auto"; // storage may be forbidden
    }
}
function applyTheme(theme) {
    if (theme === "auto")
        delete document.documentElement.dataset["theme"];
    else
        document.documentElement.dataset["theme"] = theme;
    try {
        localStorage.setItem("theme", theme);
    }
    catch {
        // the choice then lasts until the page is closed
    }
}
function ThemeButton() {
    const [theme, setTheme] = useState(chosenTheme());
    const next = THEMES[theme] ?? "auto";
    return (h("button", { type: "button", class: "small quiet", "aria-label": `colours: ${theme}; change to ${next}`, onClick: () => {
            applyTheme(next);
            setTheme(next);
        } },
        "\u25D0 ",
        theme));
}
function Sidebar(props) {
    const [isOpen, setOpen] = useState(false);
    const { data, error } = props.places;
    const current = (address) => props.pathname === address || props.pathname.startsWith(`${address}/`) ? "page" : undefined;
    const close = () => setOpen(false);
    return (h("aside", { class: isOpen ? "side open" : "side" },
        h("div", { class: "row between" },
            h("a", { class: "brand", href: "/", onClick: close },
                h("img", { src: "/static/icon.svg", alt: "", width: "22", height: "22" }),
                "lightspan"),
            h("button", { type: "button", class: "menu small", "aria-expanded": isOpen, onClick: () => setOpen(!isOpen) }, "menu")),
        h("nav", { "aria-label": "Runs and stores" },
            h("a", { href: "/", "aria-current": props.pathname === "/" ? "page" : undefined, onClick: close }, "All runs"),
            data && data.runs.length > 0 && h("h2", null, "Runs"),
            data?.runs.slice(0, 60).map((run) => {
                const address = path(["runs", run.name]);
                return (h("a", { key: run.name, href: address, "aria-current": current(address), title: run.name, onClick: close },
                    h("span", { class: "clip" }, visible(run.name)),
                    run.state === "running" && h("i", { class: "pulse", role: "img", "aria-label": "running" })));
            }),
            data && data.stores.length > 0 && h("h2", null, "Stores"),
            data?.stores.map((store) => {
                const address = path(["stores", store.name]);
                return (h("a", { key: store.name, href: address, "aria-current": current(address), title: store.url, onClick: close },
                    h("span", { class: "clip" }, visible(store.name))));
            })),
        h("footer", null,
            h(ThemeButton, null),
            h("span", { class: "muted small", role: "status" }, error ? h("b", { class: "minus" }, error) : data ? (data.write ? "rating is allowed" : "read-only") : ""),
            h("a", { class: "small", href: "/words", onClick: close }, "what the words mean"),
            h("span", { class: "muted small" }, data && `lightspan ${data.version}`))));
}
function Shell() {
    const address = useAddress();
    const places = useApi("/places", "*");
    return (h("div", { class: "shell" },
        h("a", { class: "skip", href: "#main" }, "to the content"),
        h(Sidebar, { places: places, pathname: address.pathname }),
        h("main", { id: "main", tabIndex: -1 },
            h(Page, { pathname: address.pathname, places: places }))));
}
applyTheme(chosenTheme());
followLinks();
followChanges();
const root = document.getElementById("app");
if (root) {
    root.replaceChildren(); // Preact appends to what the document has
    render(h(Shell, null), root);
}
