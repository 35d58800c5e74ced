// Filters of rollouts, which are parameters of the address.

import { Fragment, h } from "./vendor/preact.js";
import { useEffect } from "./vendor/hooks.js";
import type { Bin, Count, Facets } from "./api.js";
import { Histogram } from "./charts.js";
import type { Asked } from "./client.js";
import { Choice, TextField } from "./components.js";
import { fixed, num, percent } from "./format.js";
import { OF_ONE_PAGE, go, useAddress, withQuery } from "./router.js";

export type Place = readonly ["runs" | "stores", string];

/** Return the path of a place below the root of the API. */
export function apiPath(place: Place, ...rest: readonly string[]): string {
  return `/${[...place, ...rest].map(encodeURIComponent).join("/")}`;
}

const FILTERS = [
  ...["text", "mode", "status", "outcome", "service", "agent", "user", "session", "tag", "rated"],
  ...["task", "group", "step", "step_min", "step_max", "reward_min", "reward_max"],
  ...["since", "until", "tokens_min", "tokens_max", "cost_min", "cost_max", "seconds_min", "seconds_max"],
];
const PAGING = ["sort", "limit", "cursor"];

/** Return the query of the API for the filters (and the page) that an address names. */
export function apiQuery(address: URL, withPage: boolean): string {
  const query = new URLSearchParams();
  for (const name of withPage ? [...FILTERS, ...PAGING] : FILTERS) {
    const value = address.searchParams.get(name);
    if (value) query.set(name, value);
  }
  return query.size ? `?${query}` : "";
}

/** Return the filters and the order of an address, to pass them on to a page that leads back. */
export function filtersOf(address: URL): Record<string, string | null> {
  return Object.fromEntries([...FILTERS, "sort"].map((name) => [name, address.searchParams.get(name)]));
}

/** Return the address without any filter. */
export function withoutFilters(address: URL): string {
  const url = new URL(address);
  for (const name of FILTERS) url.searchParams.delete(name);
  return withQuery(url, OF_ONE_PAGE);
}

/** Ask again while a search for text has neither filled the page nor reached the oldest attempt.
 *
 * @param needsAll whether the page needs all that match, such as to sort them
 * @returns whether the search goes on
 */
export function useWholeSearch(
  page: Asked<{ is_partial: boolean; cursor: string }>,
  facets: Asked<Facets>,
  needsAll: boolean,
): boolean {
  const { data } = page;
  const goesOn = data !== null && data.is_partial && (needsAll || !data.cursor);
  useEffect(() => {
    if (!goesOn) return;
    page.reload();
    facets.reload();
  }, [data]);
  return goesOn;
}

/** Return the values of a filter with their counts, which are lower bounds while a search goes on. */
function counted(facets: Facets | null, name: "mode" | "service" | "status" | "agent" | "rated" | "user" | "session" | "tag"): [string, string][] {
  const more = facets?.is_partial ? "+" : "";
  return (facets?.[name] ?? []).map((count: Count) => [count.name, `${count.name} (${count.n.toLocaleString("en")}${more})`]);
}

/** Show the filters with the numbers of rollouts that each value leaves. */
export function Filters(props: { facets: Facets | null; isProduction: boolean }) {
  const { facets } = props;
  const address = useAddress();
  const isFiltered = FILTERS.some((name) => address.searchParams.has(name));
  return (
    <form class="filters row" role="search" onSubmit={(event) => event.preventDefault()}>
      <TextField name="text" label="text" type="search" placeholder="prompt, answer, tool" />
      {!props.isProduction && (
        <Fragment>
          <Choice name="mode" label="mode" empty="all" values={counted(facets, "mode")} />
          <TextField name="step" label="step" type="number" />
        </Fragment>
      )}
      {props.isProduction && (
        <Choice name="service" label="service" empty="all" values={counted(facets, "service")} />
      )}
      <Choice name="status" label="status" empty="all" values={counted(facets, "status")} />
      <Choice name="agent" label="agent" empty="all" values={counted(facets, "agent")} />
      {props.isProduction && <ProductionFilters facets={facets} />}
      {facets && facets.rewards.length > 0 && <RewardFilter facets={facets} />}
      {isFiltered && <a href={withoutFilters(address)}>clear</a>}
    </form>
  );
}

function ProductionFilters(props: { facets: Facets | null }) {
  const { facets } = props;
  return (
    <Fragment>
      <Choice name="rated" label="rated" empty="all" values={counted(facets, "rated")} />
      {facets && facets.user.length > 0 && <Choice name="user" label="user" empty="all" values={counted(facets, "user")} />}
      {facets && facets.session.length > 0 && (
        <Choice name="session" label="session" empty="all" values={counted(facets, "session")} />
      )}
      {facets && facets.tag.length > 0 && <Choice name="tag" label="tag" empty="all" values={counted(facets, "tag")} />}
      <TextField name="since" label="since" placeholder="2h, 7d, 2026-11-20" />
      <details class="more">
        <summary>more</summary>
        <div class="row">
          <TextField name="until" label="until" placeholder="1h, 2026-11-21" />
          <TextField name="tokens_min" label="tokens from" type="number" />
          <TextField name="cost_min" label="cost from" type="number" />
          <TextField name="seconds_min" label="seconds from" type="number" />
        </div>
      </details>
    </Fragment>
  );
}

function RewardFilter(props: { facets: Facets }) {
  const { facets } = props;
  const address = useAddress();
  const bound = (name: string) => {
    const text = address.searchParams.get(name);
    return text === null ? null : Number(text);
  };
  const [low, high] = [bound("reward_min"), bound("reward_max")];
  const pick = (bin: Bin) => {
    const isPicked = low === bin.low && high === bin.high;
    go(
      withQuery(address, {
        reward_min: isPicked ? null : bin.low,
        reward_max: isPicked ? null : bin.high,
        ...OF_ONE_PAGE,
      }),
    );
  };
  return (
    <div class="field">
      <span>
        rewards{facets.is_partial && " of those found so far"}: mean {fixed(facets.mean)}, {percent(facets.scored / (facets.total || 1))} scored
        {(low !== null || high !== null) && `; ${num(low)} to ${num(high)}`}
      </span>
      <Histogram label="rewards" bins={facets.rewards} low={low} high={high} onPick={pick} />
    </div>
  );
}
