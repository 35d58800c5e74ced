// A rollout: its spans as a tree with a waterfall, its conversation, and what became of each call.

import { Fragment, h } from "../vendor/preact.js";
import { useState } from "../vendor/hooks.js";
import type { CallRow, RolloutDetail, RolloutRow, SpanDetail, SpanRow } from "../api.js";
import { useApi } from "../client.js";
import { Badge, Dimensions, Heading, MessageBox, Problems, Scroller, Waiting } from "../components.js";
import type { Place } from "../filters.js";
import { apiPath, apiQuery, filtersOf } from "../filters.js";
import { clock, duration, fixed, num, plural, pretty, shortId, signed, visible } from "../format.js";
import { useKeys } from "../keys.js";
import { go, path, useAddress, withQuery } from "../router.js";
import { RatingForm, Ratings } from "../rating.js";

export function RolloutPage(props: { place: Place; id: string; canWrite: boolean }) {
  const { place, id } = props;
  const [kind, name] = place;
  const address = useAddress();
  const filters = filtersOf(address);
  const asked = useApi<RolloutDetail>(apiPath(place, "rollouts", id) + apiQuery(address, true), place.join("/"));
  const { data } = asked;
  const rollouts = path(kind === "runs" ? [kind, name, "rollouts"] : [kind, name], filters);
  const addressOf = (other: string) => path([kind, name, "rollouts", other], filters);
  const open = (other: string | undefined) => other && go(addressOf(other));
  const hasSpan = address.searchParams.has("span");
  useKeys({
    j: () => open(data?.older),
    k: () => open(data?.newer),
    Escape: () => (hasSpan ? go(withQuery(address, { span: null }), true) : go(rollouts)),
  });
  return (
    <section>
      <Heading
        title={`Rollout ${shortId(id)}`}
        trail={[[kind, "/"], [name, path([kind, name])], ["rollouts", rollouts]]}
      >
        {data?.newer && <a href={addressOf(data.newer)}>previous (k)</a>}
        {data?.older && <a href={addressOf(data.older)}>next (j)</a>}
        <span class="muted small">Esc: back to the list</span>
      </Heading>
      {data ? (
        <Fragment>
          <Problems of={asked} />
          <Summary place={place} detail={data} />
          {props.canWrite && data.row.attempt_id && (
            <RatingForm place={place} id={data.row.attempt_id} ratings={data.ratings} done={asked.reload} />
          )}
          <Trace place={place} detail={data} />
        </Fragment>
      ) : (
        <Waiting of={asked} what="the rollout" />
      )}
    </section>
  );
}

function Summary(props: { place: Place; detail: RolloutDetail }) {
  const { detail, place } = props;
  const { row } = detail;
  return (
    <div class="panel">
      <div class="row between">
        <span class="row">
          <span class="big">{row.reward === null ? "unscored" : fixed(row.reward, 3)}</span>
          <Badge name={row.status} />
          {row.outcome && row.outcome !== "ok" && <span class="muted">{visible(row.outcome)}</span>}
          {detail.rank !== null && (
            <a href={path([...place, "groups", row.group || row.task_id], { step: row.step })}>
              rank {detail.rank} of {detail.group_size} in its group
            </a>
          )}
          {row.fork_of && <ForkLink place={place} row={row} />}
          <Dimensions of={row.dimensions} />
        </span>
        <span class="muted small">
          {place[0] === "runs" && `${row.mode} step ${row.step} · `}
          {clock(row.started)} · {duration(row.seconds)}
          {row.tokens !== null && ` · ${num(row.tokens)} tokens`}
          {row.cost !== null && ` · cost ${num(row.cost)}`}
        </span>
      </div>
      {detail.source && <p class="small muted">source of the reward: {visible(detail.source)}</p>}
      {row.message && (
        <pre class="box bad" role="note">
          {visible(row.message)}
        </pre>
      )}
      {detail.capture_errors.map((text) => (
        <div class="box bad" key={text}>
          not trained, the recording is damaged: {visible(text)}
        </div>
      ))}
      {detail.notes.map((text) => (
        <p class="small muted" key={text}>
          {visible(text)}
        </p>
      ))}
      <details open={detail.task.length < 400}>
        <summary>task</summary>
        <pre>{visible(pretty(detail.task))}</pre>
      </details>
      <Facts detail={detail} />
    </div>
  );
}

/** Link a fork to the rollout that it repeats. */
function ForkLink(props: { place: Place; row: RolloutRow }) {
  const { fork_of, fork_call } = props.row;
  const call = fork_call ? ["calls", fork_call] : [];
  return (
    <a href={path([...props.place, "rollouts", fork_of, ...call])} title={fork_of}>
      {fork_call ? "fork of" : "repeats"} {shortId(fork_of)}
    </a>
  );
}

function Facts(props: { detail: RolloutDetail }) {
  const { row, attempts, ratings, links, trace_id } = props.detail;
  return (
    <dl class="facts">
      <dt>ids</dt>
      <dd>
        <code>{row.rollout_id}</code> {row.attempt_id && <code>{row.attempt_id}</code>}
      </dd>
      {(row.user || row.session || row.tags.length > 0) && (
        <Fragment>
          <dt>user</dt>
          <dd>{visible(row.user || "–")}</dd>
          <dt>session</dt>
          <dd>{visible(row.session || "–")}</dd>
          <dt>tags</dt>
          <dd>{visible(row.tags.join(", ") || "–")}</dd>
        </Fragment>
      )}
      {attempts.length > 1 && (
        <Fragment>
          <dt>attempts</dt>
          <dd>
            {attempts.map((attempt) => `${attempt.number} ${attempt.status}${attempt.message ? `: ${visible(attempt.message)}` : ""}`).join("; ")}
          </dd>
        </Fragment>
      )}
      {ratings.length > 0 && (
        <Fragment>
          <dt>ratings</dt>
          <dd>
            <Ratings ratings={ratings} />
          </dd>
        </Fragment>
      )}
      {trace_id && (
        <Fragment>
          <dt>trace</dt>
          <dd>
            <code>{trace_id}</code>{" "}
            {links.map((link) => (
              <a key={link.url} href={link.url} target="_blank" rel="noreferrer noopener">
                open in {link.name}
              </a>
            ))}
          </dd>
        </Fragment>
      )}
    </dl>
  );
}

/** Show the tree of spans beside the chosen span, or beside the whole conversation. */
export function Trace(props: { place: Place; detail: RolloutDetail }) {
  const { detail, place } = props;
  const address = useAddress();
  const chosen = detail.spans.find((span) => span.span_id === address.searchParams.get("span"));
  const agents = [...new Set(detail.spans.filter((span) => span.call_id).map((span) => span.agent))];
  const agent = address.searchParams.get("of") ?? "";
  const choose = (span: SpanRow | undefined) => go(withQuery(address, { span: span?.span_id ?? null }), true);
  return (
    <div class="grid trace">
      <Tree spans={detail.spans} calls={detail.calls} chosen={chosen} choose={choose} />
      <div>
        {chosen ? (
          <Fragment>
            <button type="button" class="small quiet" onClick={() => choose(undefined)}>
              whole conversation
            </button>
            <SpanBox place={place} detail={detail} span={chosen} isAlone />
          </Fragment>
        ) : (
          <Fragment>
            {agents.length > 1 && (
              <div class="row" role="group" aria-label="conversation of">
                {["", ...agents].map((name) => (
                  <button type="button"
                    key={name}
                    class="small"
                    aria-pressed={agent === name}
                    onClick={() => go(withQuery(address, { of: name }), true)}
                  >
                    {name ? visible(name) : "all"}
                  </button>
                ))}
              </div>
            )}
            {detail.spans
              .filter((span) => isShown(span) && (!agent || span.agent === agent))
              .map((span) => (
                <SpanBox key={span.span_id} place={place} detail={detail} span={span} />
              ))}
          </Fragment>
        )}
      </div>
    </div>
  );
}

function isShown(span: SpanRow): boolean {
  return Boolean(span.call_id || span.output.length || span.arguments || span.result || span.reward !== null || span.message);
}

function Tree(props: {
  spans: readonly SpanRow[];
  calls: readonly CallRow[];
  chosen: SpanRow | undefined;
  choose: (span: SpanRow | undefined) => void;
}) {
  const { spans, chosen } = props;
  const end = Math.max(1e-9, ...spans.filter((span) => !span.is_late).map((span) => span.end));
  const move = (event: KeyboardEvent) => {
    const by = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (!by) return;
    const index = chosen ? spans.indexOf(chosen) + by : 0;
    const next = spans[Math.max(0, Math.min(spans.length - 1, index))];
    props.choose(next);
    event.preventDefault();
    const buttons = (event.currentTarget as Element).querySelectorAll("button");
    buttons[Math.max(0, Math.min(spans.length - 1, index))]?.focus();
  };
  return (
    <nav class="panel tree" aria-label="spans" onKeyDown={move}>
      {spans.length === 0 && <p class="muted">no span was recorded</p>}
      {spans.map((span) => (
        <button type="button"
          key={span.span_id}
          aria-pressed={span === chosen}
          onClick={() => props.choose(span === chosen ? undefined : span)}
        >
          <span class="name" style={{ paddingLeft: `${Math.min(span.depth, 12) * 14}px` }}>
            <i class={`kind ${span.kind.toLowerCase()}`}>{span.kind.toLowerCase()}</i>
            <b>{visible(span.name)}</b>
            <Fates calls={props.calls.filter((call) => call.span_id === span.span_id)} />
          </span>
          <span class="line" aria-hidden="true">
            <i
              class={span.status === "error" ? "bad" : ""}
              style={{
                left: `${Math.min(99, (100 * Math.max(0, span.start)) / end)}%`,
                width: `${Math.min(100, (100 * Math.max(0, span.end - span.start)) / end)}%`,
              }}
            />
          </span>
          <span class="small muted number">
            {span.reward !== null ? num(span.reward) : duration(span.end - span.start)}
          </span>
        </button>
      ))}
    </nav>
  );
}

/** Return whether training decided about a call; calls of production are only recorded. */
function isJudged(call: CallRow): boolean {
  return call.fate !== "recorded" && !call.replayed_from;
}

function fateClass(call: CallRow): string {
  if (call.fate !== "trained" || call.advantage === null) return call.fate;
  return call.advantage > 0 ? "trained" : call.advantage < 0 ? "negative" : "";
}

function Fates(props: { calls: readonly CallRow[] }) {
  return (
    <Fragment>
      {props.calls.some((call) => call.is_fork) && <span class="fate frozen">fork</span>}
      {props.calls.filter((call) => call.replayed_from).map((call) => (
        <span key={call.choice} class="fate frozen" title={call.reason}>
          replayed
        </span>
      ))}
      {props.calls.filter(isJudged).map((call) => (
        <span key={call.choice} class={`fate ${fateClass(call)}`} title={`${call.fate} ${call.reason}`}>
          {call.advantage === null ? (call.fate === "trained" ? "trained" : call.fate) : signed(call.advantage)}
        </span>
      ))}
    </Fragment>
  );
}

function SpanBox(props: { place: Place; detail: RolloutDetail; span: SpanRow; isAlone?: boolean }) {
  const { span, detail, place } = props;
  const calls = detail.calls.filter((call) => call.span_id === span.span_id);
  const last = span.input.at(-1);
  return (
    <article class="panel span">
      <header class="row between">
        <b>
          {visible(span.agent || span.name)} <span class="muted small">{span.kind.toLowerCase()}</span>
        </b>
        {calls.map((call) => (
          <a key={call.choice} class="small" href={path([...place, "rollouts", detail.row.rollout_id, "calls", call.call_id])}>
            {call.replayed_from && <Badge name="replayed" title={call.reason} />}
            {isJudged(call) && <Badge name={call.fate} title={call.reason} />} {isJudged(call) ? "why" : "the call"}
          </a>
        ))}
      </header>
      {calls.filter(isJudged).map((call) => (
        <p class="small muted" key={call.choice}>
          {visible(call.why || call.reason)}
        </p>
      ))}
      {calls[0]?.replayed_from && (
        <p class="small muted">
          answered as in{" "}
          <a href={path([...place, "rollouts", calls[0].replayed_from, "calls", calls[0].call_id])}>
            rollout {shortId(calls[0].replayed_from)}
          </a>
          , which has its texts
        </p>
      )}
      {span.message && <pre class="box bad">{visible(span.message)}</pre>}
      {props.isAlone ? (
        span.input.map((message, n) => <MessageBox key={n} message={message} place={place} />)
      ) : (
        last && (
          <Fragment>
            {span.input.length > 1 && (
              <details>
                <summary class="small muted">{plural(span.input.length - 1, "earlier message")}</summary>
                {span.input.slice(0, -1).map((message, n) => (
                  <MessageBox key={n} message={message} place={place} />
                ))}
              </details>
            )}
            <MessageBox message={last} place={place} />
          </Fragment>
        )
      )}
      {span.arguments && <pre class="code">{visible(pretty(span.arguments))}</pre>}
      {span.result && <pre>{visible(pretty(span.result))}</pre>}
      {span.output.map((message, n) => (
        <MessageBox key={n} message={message} place={place} />
      ))}
      {span.reward !== null && <p>reward {num(span.reward)}</p>}
      {props.isAlone && <Attributes place={place} rollout={detail.row.rollout_id} span={span.span_id} />}
    </article>
  );
}

function Attributes(props: { place: Place; rollout: string; span: string }) {
  const [isOpen, setOpen] = useState(false);
  const asked = useApi<SpanDetail>(
    isOpen ? apiPath(props.place, "rollouts", props.rollout, "spans", props.span) : null,
  );
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>all attributes</summary>
      {asked.data ? (
        <Scroller label="attributes">
          <table>
            <tbody>
              {Object.entries(asked.data.attributes).map(([name, value]) => (
                <tr key={name}>
                  <th scope="row">{visible(name)}</th>
                  <td>
                    <pre>{visible(pretty(value))}</pre>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroller>
      ) : (
        isOpen && <Waiting of={asked} what="attributes" />
      )}
    </details>
  );
}
