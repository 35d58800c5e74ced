// A store: what users saw in production, to read, filter, rate and train on.

import { Fragment, h } from "../vendor/preact.js";
import type { Export, Facets, RolloutDetail, RolloutPage as Rows, RolloutRow } from "../api.js";
import { useApi } from "../client.js";
import { Choice, Copyable, Heading, Pager, Problems, Waiting, rangeOf } from "../components.js";
import type { Place } from "../filters.js";
import { Filters, apiPath, apiQuery, filtersOf, useWholeSearch } from "../filters.js";
import { clock, duration, plural, visible } from "../format.js";
import { useEffect, useRef } from "../vendor/hooks.js";
import { useKeys } from "../keys.js";
import { RatingForm, Ratings } from "../rating.js";
import { OF_ONE_PAGE, go, opens, path, useAddress, withQuery } from "../router.js";
import { ReadState, RowReward, RowTexts, SORTS } from "./rollouts.js";
import { Trace } from "./rollout.js";

export function StorePage(props: { name: string; canWrite: boolean }) {
  const place: Place = ["stores", props.name];
  const address = useAddress();
  const live = place.join("/");
  const page = useApi<Rows>(apiPath(place, "rollouts") + apiQuery(address, true), live);
  const facets = useApi<Facets>(apiPath(place, "facets") + apiQuery(address, false), live);
  const goesOn = useWholeSearch(page, facets, address.searchParams.has("sort"));
  const rows = page.data?.rows ?? [];
  const open = address.searchParams.get("open");
  const at = rows.findIndex((row) => row.rollout_id === open);
  const show = (n: number) => {
    const row = rows[Math.max(0, Math.min(rows.length - 1, n))];
    if (row) go(withQuery(address, { open: row.rollout_id, span: null, of: null }), true);
  };
  const nextUnrated = () => {
    const next = rows.findIndex((row, n) => n > at && !row.rated);
    if (next >= 0) show(next);
    else if (page.data?.cursor) go(withQuery(address, { ...OF_ONE_PAGE, cursor: page.data.cursor }));
  };
  useKeys({
    j: () => show(at + 1),
    k: () => show(at < 0 ? 0 : at - 1),
    n: nextUnrated,
    Escape: () => go(withQuery(address, { open: null, span: null, of: null }), true),
    ...(open ? { Enter: () => go(path([...place, "rollouts", open])) } : {}),
  });
  return (
    <section>
      <Heading title={props.name} trail={[["stores", "/"]]}>
        <a href={path([...place, "groups"])}>by task</a>
      </Heading>
      <Filters facets={facets.data} isProduction />
      <div class="row between">
        <Choice name="sort" label="order" empty="newest first" values={SORTS.slice(1)} />
        <span class="muted small">
          keys: j, k, n next unrated, Enter opens, Esc closes{props.canWrite && ", 1 bad, 2 fair, 3 good"}
        </span>
      </div>
      <Problems of={page} />
      <ReadState page={page.data} isLoading={page.isLoading} goesOn={goesOn} />
      {page.data ? (
        <div class="grid reader">
          <div>
            {rows.length === 0 && <p class="panel empty">No rollout matches{page.data.is_partial && " so far"}.</p>}
            <div role="list" aria-label="rollouts">
              {rows.map((row, n) => (
                <Entry key={row.rollout_id} row={row} rows={rows} isOpen={n === at} address={withQuery(address, { open: row.rollout_id, span: null, of: null })} />
              ))}
            </div>
            <Pager total={page.data.total} shown={rows.length} cursor={page.data.cursor} noun="rollout" isPartial={page.data.is_partial} />
            <ExportBox place={place} />
          </div>
          <div class="pane">
            {open ? (
              <OpenRollout key={open} place={place} id={open} canWrite={props.canWrite} done={page.reload} next={nextUnrated} />
            ) : (
              <p class="panel empty">Choose a rollout to read it{props.canWrite && " and rate it"}.</p>
            )}
          </div>
        </div>
      ) : (
        !page.error && <Waiting of={page} what="rollouts" />
      )}
    </section>
  );
}

function Entry(props: { row: RolloutRow; rows: readonly RolloutRow[]; isOpen: boolean; address: string }) {
  const { row } = props;
  return (
    <div role="listitem" class={props.isOpen ? "entry on" : "entry"} onClick={opens(props.address)}>
      <div class="row between small">
        <a href={props.address} title={row.rollout_id} aria-current={props.isOpen ? "true" : undefined}>
          {clock(row.started ?? row.created)}
        </a>
        <span class="muted">
          {visible(row.run_id)} · {duration(row.seconds)}
        </span>
      </div>
      <RowReward row={row} {...rangeOf(props.rows.map((each) => each.reward))} />
      <RowTexts row={row} />
      {(row.user || row.tags.length > 0) && (
        <div class="small muted">{visible([row.user, ...row.tags].filter(Boolean).join(", "))}</div>
      )}
    </div>
  );
}

function OpenRollout(props: { place: Place; id: string; canWrite: boolean; done: () => void; next: () => void }) {
  const { place, id } = props;
  const top = useRef<HTMLDivElement>(null);
  useEffect(() => {
    // in a narrow window it is below the list
    if (innerWidth <= 1100) top.current?.scrollIntoView();
  }, [id]);
  const asked = useApi<RolloutDetail>(apiPath(place, "rollouts", id), place.join("/"));
  const { data } = asked;
  const address = useAddress();
  if (!data) return <Waiting of={asked} what="the rollout" />;
  return (
    <Fragment>
      <Problems of={asked} />
      <div class="row between" ref={top}>
        <a href={path([...place, "rollouts", id], filtersOf(address))}>open the whole page</a>
        <button type="button" class="small" onClick={props.next}>
          next unrated (n)
        </button>
      </div>
      {props.canWrite ? (
        <RatingForm
          place={place}
          id={data.row.attempt_id || id}
          ratings={data.ratings}
          done={() => {
            asked.reload();
            props.done();
          }}
        />
      ) : (
        <p class="small muted">Read-only: start it with --write to rate.</p>
      )}
      {data.row.message && <pre class="box bad">{visible(data.row.message)}</pre>}
      <Ratings ratings={data.ratings} />
      <Trace place={place} detail={data} />
    </Fragment>
  );
}

/** Offer the program and the command that train on what the filters match. */
function ExportBox(props: { place: Place }) {
  const address = useAddress();
  const asked = useApi<Export>(apiPath(props.place, "export") + apiQuery(address, false), props.place.join("/"));
  if (!asked.data) return null;
  const { attempts, calls, program, command, preferences, note } = asked.data;
  return (
    <details class="panel">
      <summary>
        <b>Train on what is listed</b>{" "}
        <span class="muted small">
          {plural(attempts, "attempt")}, {plural(calls, "call")}
        </span>
      </summary>
      <p class="small muted">This page starts no training: copy one of these.</p>
      {note && (
        <div class="box warn" role="note">
          {visible(note)}
        </div>
      )}
      <Copyable label="the program" text={program} />
      <Copyable label="the command" text={command} />
      {preferences && (
        <Fragment>
          <p class="small muted">Or learn from good and bad ratings alike:</p>
          <Copyable label="the program of Preferences" text={preferences} />
        </Fragment>
      )}
    </details>
  );
}
