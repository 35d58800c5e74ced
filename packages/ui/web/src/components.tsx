// Parts that several pages share.

import { Fragment, h } from "./vendor/preact.js";
import type { ComponentChildren } from "./vendor/preact.js";
import { useEffect, useState } from "./vendor/hooks.js";
import type { AlertView, Estimate, Message, MessageImage } from "./api.js";
import { ROOT } from "./client.js";
import type { Asked } from "./client.js";
import { fixed, num, plural, pretty, signed, visible } from "./format.js";
import type { Place } from "./filters.js";
import { OF_ONE_PAGE, go, path, useAddress, withQuery } from "./router.js";

/** Set the title of the window and show the heading of a page with its way back. */
export function Heading(props: {
  title: string;
  trail?: readonly (readonly [string, string])[];
  children?: ComponentChildren;
}) {
  useEffect(() => {
    document.title = `${visible(props.title).slice(0, 80)} · lightspan`;
  }, [props.title]);
  return (
    <header class="heading">
      {props.trail && (
        <nav class="trail" aria-label="Breadcrumb">
          {props.trail.map(([name, address]) => (
            <Fragment key={address}>
              <a href={address}>{visible(name)}</a>
              <span aria-hidden="true"> / </span>
            </Fragment>
          ))}
        </nav>
      )}
      <div class="row between">
        <h1>{visible(props.title)}</h1>
        <div class="row">{props.children}</div>
      </div>
    </header>
  );
}

const TONES: Record<string, string> = {
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
export function Badge(props: { name: string; title?: string | undefined }) {
  return (
    <span class={`badge ${TONES[props.name] ?? ""}`} title={props.title}>
      {props.name === "running" && <i class="pulse" aria-hidden="true" />}
      {props.name}
    </span>
  );
}

/** Show what is awaited, or why it did not come. */
export function Waiting(props: { of: Asked<unknown>; what: string }) {
  return props.of.error ? (
    <div class="box bad" role="alert">
      {visible(props.of.error)}
    </div>
  ) : (
    <p class="muted" aria-busy="true">
      Loading {props.what}…
    </p>
  );
}

/** Show an error beside an answer that is still shown. */
export function Problems(props: { of: Asked<unknown>; error?: string | undefined }) {
  const text = props.of.error || props.error;
  return text ? (
    <div class="box bad" role="alert">
      {visible(text)}
    </div>
  ) : null;
}

/** Show a reward as a number with a bar from the lowest to the highest reward of its table. */
export function Reward(props: { value: number | null; low?: number; high?: number }) {
  if (props.value === null) return <span class="muted">unscored</span>;
  const low = props.low ?? 0;
  const span = (props.high ?? 1) - low || 1;
  const share = Math.max(0, Math.min(1, (props.value - low) / span));
  return (
    <span class="score">
      <span class="number">{fixed(props.value)}</span>
      <span class="bar" aria-hidden="true">
        <i style={{ width: `${100 * share}%` }} />
      </span>
    </span>
  );
}

/** Return the lowest and the highest reward, 0 and 1 included. */
export function rangeOf(values: readonly (number | null)[]): { low: number; high: number } {
  const known = values.filter((value) => value !== null);
  return { low: Math.min(0, ...known), high: Math.max(1, ...known) };
}

/** Show a change with its interval; it is coloured only if the interval does not contain 0. */
export function Gain(props: { of: Estimate | null }) {
  const gain = props.of;
  if (!gain || gain.mean === null) return <span class="muted">–</span>;
  const { low, high } = gain;
  const tone = low !== null && low > 0 ? "plus" : high !== null && high < 0 ? "minus" : "";
  return (
    <span class={tone}>
      <b>{signed(gain.mean)}</b>{" "}
      <span class="small">
        {low === null || high === null ? "no interval" : `${fixed(low)} to ${fixed(high)}`}
      </span>
    </span>
  );
}

/** Say in words what an interval of a change tells. */
export function gainInWords(gain: Estimate): string {
  if (gain.mean === null || gain.low === null || gain.high === null) {
    return "too few tasks to tell a change from chance";
  }
  if (gain.low > 0) return "better by more than chance (95 %)";
  if (gain.high < 0) return "worse by more than chance (95 %)";
  return "no change that can be told from chance (95 %)";
}

export function Alerts(props: { alerts: readonly AlertView[] }) {
  return (
    <Fragment>
      {props.alerts.map((alert) => (
        <div class="box warn" role="note" key={`${alert.name} ${alert.step}`}>
          <b>Step {alert.step}.</b> {visible(alert.text)}
        </div>
      ))}
    </Fragment>
  );
}

export function Tile(props: { name: string; value: ComponentChildren; note?: ComponentChildren }) {
  return (
    <div class="tile">
      <div class="muted small">{props.name}</div>
      <div class="value">{props.value}</div>
      <div class="muted small">{props.note}</div>
    </div>
  );
}

/** Show a table that scrolls by itself, so that a wide one never widens the page. */
export function Scroller(props: { label: string; children: ComponentChildren }) {
  return (
    <div class="scroller" role="region" aria-label={props.label} tabIndex={0}>
      {props.children}
    </div>
  );
}

/** Show a select whose value is a parameter of the address. */
export function Choice(props: {
  name: string;
  label: string;
  values: readonly (readonly [string, string])[];
  empty?: string;
}) {
  const address = useAddress();
  const value = address.searchParams.get(props.name) ?? "";
  const isListed = !value || props.values.some(([name]) => name === value);
  return (
    <label class="field">
      <span>{props.label}</span>
      <select
        value={value}
        onChange={(event) =>
          go(withQuery(address, { [props.name]: event.currentTarget.value, ...OF_ONE_PAGE }))
        }
      >
        {props.empty !== undefined && <option value="">{props.empty}</option>}
        {!isListed && <option value={value}>{visible(value)}</option>}
        {props.values.map(([name, text]) => (
          <option value={name} key={name}>
            {visible(text)}
          </option>
        ))}
      </select>
    </label>
  );
}

/** Show a text field whose value is a parameter of the address once Enter is pressed. */
export function TextField(props: {
  name: string;
  label: string;
  type?: "search" | "number" | "text";
  placeholder?: string;
}) {
  const address = useAddress();
  const value = address.searchParams.get(props.name) ?? "";
  const [text, setText] = useState(value);
  useEffect(() => setText(value), [value]);
  const apply = () => {
    if (text !== value) go(withQuery(address, { [props.name]: text, ...OF_ONE_PAGE }));
  };
  const shared = {
    value: text,
    placeholder: props.placeholder ?? "",
    onInput: (event: { currentTarget: HTMLInputElement }) => setText(event.currentTarget.value),
    onBlur: apply,
    onKeyDown: (event: KeyboardEvent) => {
      if (event.key === "Enter") apply();
    },
  };
  return (
    <label class="field">
      <span>{props.label}</span>
      {props.type === "search" ? (
        <input type="search" {...shared} />
      ) : props.type === "number" ? (
        <input type="number" step="any" {...shared} />
      ) : (
        <input type="text" {...shared} />
      )}
    </label>
  );
}

/** Show where a page of a table is, and lead to the first and the next. */
export function Pager(props: { total: number; shown: number; cursor: string; noun: string; isPartial?: boolean }) {
  const address = useAddress();
  const isFirst = !address.searchParams.has("cursor");
  return (
    <div class="row between pager">
      <span role="status">
        {props.isPartial ? `at least ${plural(props.total, props.noun)}` : plural(props.total, props.noun)}
        {props.shown < props.total && `, ${props.shown} on this page`}
      </span>
      <span class="row">
        {!isFirst && <a href={withQuery(address, OF_ONE_PAGE)}>first page</a>}
        {props.cursor && (
          <a class="button" href={withQuery(address, { cursor: props.cursor })} rel="next">
            next page
          </a>
        )}
      </span>
    </div>
  );
}

/** Show a message of a conversation. Text of models is text: nothing in it becomes an element. */
export function MessageBox(props: { message: Message; place: Place; note?: ComponentChildren }) {
  const { role, text, thoughts, tools, images, is_cut } = props.message;
  return (
    <article class={`message ${role.replace(/\W/g, "")}`}>
      <header class="row between">
        <span>{visible(role)}</span>
        <span>{props.note}</span>
      </header>
      {thoughts && (
        <details>
          <summary>thoughts</summary>
          <pre class="thoughts">{visible(thoughts)}</pre>
        </details>
      )}
      {text && <pre>{visible(pretty(text))}</pre>}
      {images.length > 0 && (
        <p class="images">
          {images.map((image, index) => (
            <Picture image={image} place={props.place} key={index} />
          ))}
        </p>
      )}
      {tools.map((call, index) => (
        <pre class="code" key={index}>
          {visible(call)}
        </pre>
      ))}
      {!text && !thoughts && tools.length === 0 && <pre class="muted">(empty)</pre>}
      {is_cut && <p class="muted small">cut: the span's page has the rest</p>}
    </article>
  );
}

/** Show an image as a thumbnail, or say that the store has only its digest. */
function Picture(props: { image: MessageImage; place: Place }) {
  const [isMissing, setMissing] = useState(false);
  const { digest, media_type, size } = props.image;
  const name = `${media_type || "image"}, ${size} bytes, ${digest.slice(0, 12)}`;
  if (isMissing) return <span class="muted small">[{name}: bytes not recorded]</span>;
  const address = ROOT + path([...props.place, "images", digest]);
  return (
    <a href={address} target="_blank" rel="noreferrer" title={name}>
      <img src={address} alt={name} loading="lazy" onError={() => setMissing(true)} />
    </a>
  );
}

/** Show lines that were added to, removed from or kept of a text. */
export function Difference(props: { before: string; after: string }) {
  if (props.before === props.after) return <pre class="muted">unchanged</pre>;
  return (
    <pre class="difference">
      {lineDifference(props.before.split("\n"), props.after.split("\n")).map(([sign, line], n) => (
        <span class={sign === "+" ? "added" : sign === "-" ? "removed" : ""} key={n}>
          {sign} {visible(line)}
          {"\n"}
        </span>
      ))}
    </pre>
  );
}

/** Compare lines by their longest common subsequence; beyond a million pairs, replace all. */
export function lineDifference(before: string[], after: string[]): [" " | "+" | "-", string][] {
  const [n, m] = [before.length, after.length];
  if (n * m > 1_000_000) {
    return [
      ...before.map((line): ["-", string] => ["-", line]),
      ...after.map((line): ["+", string] => ["+", line]),
    ];
  }
  const common = Array.from({ length: n + 1 }, () => new Array<number>(m + 1).fill(0));
  const at = (i: number, j: number) => common[i]?.[j] ?? 0;
  for (let i = n - 1; i >= 0; i--) {
    for (let j = m - 1; j >= 0; j--) {
      const row = common[i] as number[];
      row[j] = before[i] === after[j] ? at(i + 1, j + 1) + 1 : Math.max(at(i + 1, j), at(i, j + 1));
    }
  }
  const lines: [" " | "+" | "-", string][] = [];
  let [i, j] = [0, 0];
  while (i < n || j < m) {
    if (i < n && j < m && before[i] === after[j]) {
      lines.push([" ", before[i] ?? ""]);
      i++;
      j++;
    } else if (i < n && (j === m || at(i + 1, j) >= at(i, j + 1))) {
      lines.push(["-", before[i++] ?? ""]);
    } else {
      lines.push(["+", after[j++] ?? ""]);
    }
  }
  return lines;
}

/** Show a text with a button that copies it. */
export function Copyable(props: { text: string; label: string }) {
  const [copy, setCopy] = useState("");
  return (
    <div class="copyable">
      <pre class="code">{props.text}</pre>
      <button type="button"
        class="small"
        aria-label={`copy ${props.label}`}
        onClick={() => void navigator.clipboard.writeText(props.text).then(() => setCopy(props.text))}
      >
        {copy === props.text ? "copied" : "copy"}
      </button>
    </div>
  );
}

/** Show parts of a reward, such as its named dimensions. */
export function Dimensions(props: { of: Record<string, number> }) {
  const parts = Object.entries(props.of);
  if (!parts.length) return null;
  return (
    <span class="small muted">
      {parts.map(([name, value]) => `${visible(name)} ${num(value)}`).join(", ")}
    </span>
  );
}
