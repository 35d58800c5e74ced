// Choose the page of an address, and show it beside the list of runs and stores.

import { h, render } from "./vendor/preact.js";
import { useState } from "./vendor/hooks.js";
import type { Places } from "./api.js";
import { followChanges, useApi } from "./client.js";
import type { Asked } from "./client.js";
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

function decoded(pathname: string): string[] {
  try {
    return pathname.split("/").slice(1).map(decodeURIComponent);
  } catch {
    return ["?"]; // a malformed escape names no page
  }
}

function Page(props: { pathname: string; places: Asked<Places> }) {
  const [kind = "", name = "", part = "", id = "", what = "", call = ""] = decoded(props.pathname);
  if (!kind) return <RunsPage places={props.places} />;
  if (kind === "compare") return <ComparePage />;
  if (kind === "words") return <WordsPage />;
  if ((kind === "runs" || kind === "stores") && name) {
    const place = [kind, name] as const;
    const canWrite = props.places.data?.write ?? false;
    const key = `${kind}/${name}/${part}/${id}/${call}`;
    if (part === "rollouts" && id && what === "calls" && call) {
      return <CallPage key={key} place={place} rollout={id} call={call} />;
    }
    if (part === "rollouts" && id) {
      return <RolloutPage key={key} place={place} id={id} canWrite={canWrite} />;
    }
    if (part === "rollouts") return <RolloutsPage key={key} place={place} />;
    if (part === "groups" && id) return <GroupPage key={key} place={place} id={id} />;
    if (part === "groups") return <GroupsPage key={key} place={place} />;
    if (kind === "stores" && !part) return <StorePage key={key} name={name} canWrite={canWrite} />;
    if (kind === "runs" && !part) return <RunPage key={key} name={name} />;
    if (kind === "runs" && part === "settings") return <SettingsPage key={key} name={name} />;
    if (kind === "runs" && part === "prompts") return <PromptsPage key={key} name={name} />;
  }
  return (
    <div>
      <Heading title="There is no such page" />
      <p>
        <a href="/">All runs</a>
      </p>
    </div>
  );
}

const THEMES: Record<string, string> = { auto: "light", light: "dark", dark: "auto" };

function chosenTheme(): string {
  try {
    return localStorage.getItem("theme") ?? "auto";
  } catch {
    return "auto"; // storage may be forbidden
  }
}

function applyTheme(theme: string): void {
  if (theme === "auto") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = theme;
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // the choice then lasts until the page is closed
  }
}

function ThemeButton() {
  const [theme, setTheme] = useState(chosenTheme());
  const next = THEMES[theme] ?? "auto";
  return (
    <button type="button"
      class="small quiet"
      aria-label={`colours: ${theme}; change to ${next}`}
      onClick={() => {
        applyTheme(next);
        setTheme(next);
      }}
    >
      ◐ {theme}
    </button>
  );
}

function Sidebar(props: { places: Asked<Places>; pathname: string }) {
  const [isOpen, setOpen] = useState(false);
  const { data, error } = props.places;
  const current = (address: string) =>
    props.pathname === address || props.pathname.startsWith(`${address}/`) ? "page" : undefined;
  const close = () => setOpen(false);
  return (
    <aside class={isOpen ? "side open" : "side"}>
      <div class="row between">
        <a class="brand" href="/" onClick={close}>
          <img src="/static/icon.svg" alt="" width="22" height="22" />
          lightspan
        </a>
        <button type="button" class="menu small" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>
          menu
        </button>
      </div>
      <nav aria-label="Runs and stores">
        <a href="/" aria-current={props.pathname === "/" ? "page" : undefined} onClick={close}>
          All runs
        </a>
        {data && data.runs.length > 0 && <h2>Runs</h2>}
        {data?.runs.slice(0, 60).map((run) => {
          const address = path(["runs", run.name]);
          return (
            <a key={run.name} href={address} aria-current={current(address)} title={run.name} onClick={close}>
              <span class="clip">{visible(run.name)}</span>
              {run.state === "running" && <i class="pulse" role="img" aria-label="running" />}
            </a>
          );
        })}
        {data && data.stores.length > 0 && <h2>Stores</h2>}
        {data?.stores.map((store) => {
          const address = path(["stores", store.name]);
          return (
            <a key={store.name} href={address} aria-current={current(address)} title={store.url} onClick={close}>
              <span class="clip">{visible(store.name)}</span>
            </a>
          );
        })}
      </nav>
      <footer>
        <ThemeButton />
        <span class="muted small" role="status">
          {error ? <b class="minus">{error}</b> : data ? (data.write ? "rating is allowed" : "read-only") : ""}
        </span>
        <a class="small" href="/words" onClick={close}>
          what the words mean
        </a>
        <span class="muted small">{data && `lightspan ${data.version}`}</span>
      </footer>
    </aside>
  );
}

function Shell() {
  const address = useAddress();
  const places = useApi<Places>("/places", "*");
  return (
    <div class="shell">
      <a class="skip" href="#main">
        to the content
      </a>
      <Sidebar places={places} pathname={address.pathname} />
      <main id="main" tabIndex={-1}>
        <Page pathname={address.pathname} places={places} />
      </main>
    </div>
  );
}

applyTheme(chosenTheme());
followLinks();
followChanges();
const root = document.getElementById("app");
if (root) {
  root.replaceChildren(); // Preact appends to what the document has
  render(<Shell />, root);
}
