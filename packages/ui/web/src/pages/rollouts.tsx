// The rollouts of a run or store, as a table.

import { Fragment, h } from "../vendor/preact.js";
import type { Facets, RolloutPage as Rows, RolloutRow } from "../api.js";
import { useApi } from "../client.js";
import { Badge, Choice, Dimensions, Heading, Pager, Problems, Reward, Scroller, Waiting, rangeOf } from "../components.js";
import type { Place } from "../filters.js";
import { Filters, apiPath, apiQuery, filtersOf, useWholeSearch } from "../filters.js";
import { clock, duration, num, plural, shortId, visible } from "../format.js";
import { useRowKeys } from "../keys.js";
import { go, opens, path, useAddress, withQuery } from "../router.js";
import { RunTabs } from "./run.js";

export const SORTS: readonly (readonly [string, string])[] = [
  ["newest", "newest first"],
  ["oldest", "oldest first"],
  ["best", "best first"],
  ["worst", "worst first"],
  ["longest", "longest first"],
  ["tokens", "most tokens first"],
  ["cost", "dearest first"],
];

export function RolloutsPage(props: { place: Place }) {
  const [kind, name] = props.place;
  const address = useAddress();
  const page = useApi<Rows>(apiPath(props.place, "rollouts") + apiQuery(address, true), props.place.join("/"));
  const facets = useApi<Facets>(apiPath(props.place, "facets") + apiQuery(address, false), props.place.join("/"));
  const goesOn = useWholeSearch(page, facets, address.searchParams.has("sort"));
  return (
    <section>
      <Heading title="Rollouts" trail={[[kind, "/"], [name, path([kind, name])]]} />
      {kind === "runs" && <RunTabs name={name} />}
      <Filters facets={facets.data} isProduction={kind === "stores"} />
      <div class="row between">
        <Choice name="sort" label="order" empty="newest first" values={SORTS.slice(1)} />
        <span class="muted small">keys: j, k, Enter</span>
      </div>
      <Problems of={page} />
      <ReadState page={page.data} isLoading={page.isLoading} goesOn={goesOn} />
      {page.data ? (
        <RolloutTable place={props.place} page={page.data} />
      ) : (
        !page.error && <Waiting of={page} what="rollouts" />
      )}
    </section>
  );
}

/** Say what of the store was not read yet, so that an empty table is not taken for none. */
export function ReadState(props: { page: Rows | null; isLoading: boolean; goesOn: boolean }) {
  const { page } = props;
  return (
    <p class="muted small" role="status">
      {props.isLoading && "looking… "}
      {page?.is_partial &&
        (props.goesOn ? "still searching older attempts… " : "not everything is searched yet: the next page goes on. ")}
      {page && page.read < page.readable && `spans of ${page.read.toLocaleString("en")} of ${plural(page.readable, "attempt")} are read: agents, tokens and users of the others are not known yet`}
    </p>
  );
}

function RolloutTable(props: { place: Place; page: Rows }) {
  const { rows, total, cursor, is_partial } = props.page;
  const address = useAddress();
  const [kind, name] = props.place;
  const addressOf = (row: RolloutRow) => path([kind, name, "rollouts", row.rollout_id], filtersOf(address));
  const open = (row: RolloutRow | undefined) => row && go(addressOf(row));
  const at = useRowKeys(rows.length, (n) => open(rows[n]));
  const range = rangeOf(rows.map((row) => row.reward));
  const isRun = kind === "runs";
  const isUnread = address.searchParams.has("agent") && props.page.read < props.page.readable;
  if (!rows.length) return <p class="panel empty">No rollout matches{is_partial && " so far"}.</p>;
  return (
    <Fragment>
      <Scroller label="rollouts">
        <table>
          <thead>
            <tr>
              <th scope="col">rollout</th>
              <th scope="col">{isRun ? "step" : "service"}</th>
              <th scope="col">reward</th>
              <th scope="col">task, answer</th>
              <th scope="col">calls by agent</th>
              <th scope="col" class="number">
                tokens
              </th>
              <th scope="col" class="number">
                time
              </th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row, n) => (
              <tr key={row.rollout_id} class={n === at ? "linked on" : "linked"} onClick={opens(addressOf(row))}>
                <td>
                  <a href={addressOf(row)} title={row.rollout_id}>
                    <code>{shortId(row.rollout_id)}</code>
                  </a>
                  {row.fork_of && (
                    <a class="small" href={path([kind, name, "rollouts", row.fork_of])} title={row.fork_of}>
                      {" "}
                      {row.fork_call ? "fork of" : "repeats"} {shortId(row.fork_of)}
                    </a>
                  )}
                  <div class="small muted" title={clock(row.created)}>
                    {clock(row.started ?? row.created).slice(5)}
                  </div>
                </td>
                <td>
                  {isRun ? (
                    <a href={withQuery(address, { step: row.step, mode: row.mode, cursor: null })}>
                      {row.mode} {row.step}
                    </a>
                  ) : (
                    visible(row.run_id)
                  )}
                </td>
                <td>
                  <RowReward row={row} {...range} />
                </td>
                <td>
                  <RowTexts row={row} />
                </td>
                <td class="small">
                  {Object.entries(row.agents)
                    .map(([agent, calls]) => `${visible(agent)} ${calls}`)
                    .join(", ")}
                </td>
                <td class="number">{num(row.tokens)}</td>
                <td class="number">{duration(row.seconds)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroller>
      <Pager total={total} shown={rows.length} cursor={cursor} noun="rollout" isPartial={is_partial || isUnread} />
    </Fragment>
  );
}

export function RowReward(props: { row: RolloutRow; low: number; high: number }) {
  const { row, low, high } = props;
  return (
    <Fragment>
      <Reward value={row.reward} low={low} high={high} /> <Dimensions of={row.dimensions} />{" "}
      {row.status !== "succeeded" && <Badge name={row.status} title={row.message} />}
      {row.outcome && row.outcome !== "ok" && <span class="small muted"> {visible(row.outcome)}</span>}
      {row.damaged > 0 && <Badge name="damaged" />}
      {row.rated && <span class="small plus"> rated</span>}
    </Fragment>
  );
}

export function RowTexts(props: { row: RolloutRow }) {
  const { row } = props;
  return (
    <Fragment>
      <div class="clip two-lines">{visible(row.question || row.task)}</div>
      <div class="clip two-lines muted">{visible(row.answer || row.message)}</div>
    </Fragment>
  );
}
