// The list of runs.

import { Fragment, h } from "../vendor/preact.js";
import { useState } from "../vendor/hooks.js";
import type { Places, RunSummary, StoreSummary } from "../api.js";
import { Sparkline } from "../charts.js";
import type { Asked } from "../client.js";
import { Badge, Gain, Heading, Problems, Scroller, Waiting } from "../components.js";
import { ago, clock, duration, fixed, num, plural, visible } from "../format.js";
import { useRowKeys } from "../keys.js";
import { go, opens, path } from "../router.js";

export function RunsPage(props: { places: Asked<Places> }) {
  const { data } = props.places;
  return (
    <section>
      <Heading title="Runs" />
      {data ? (
        <Fragment>
          <Problems of={props.places} />
          {data.runs.length > 0 && <RunTable runs={data.runs} />}
          {data.stores.length > 0 && <StoreTable stores={data.stores} />}
          {data.runs.length + data.stores.length === 0 && <Nothing />}
        </Fragment>
      ) : (
        <Waiting of={props.places} what="runs" />
      )}
    </section>
  );
}

function Nothing() {
  return (
    <p class="panel empty">
      There is no run here yet. A training writes its run to the folder that <code>Trainer(folder=…)</code>{" "}
      names, by default below <code>runs/</code>; it appears here by itself.
    </p>
  );
}

function RunTable(props: { runs: readonly RunSummary[] }) {
  const [chosen, setChosen] = useState<readonly string[]>([]);
  const row = useRowKeys(props.runs.length, (n) => go(path(["runs", props.runs[n]?.name ?? ""])));
  const toggle = (name: string) =>
    setChosen(chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name]);
  const address = new URL("/compare", location.origin);
  for (const name of chosen) address.searchParams.append("run", name);
  return (
    <Fragment>
      <div class="row between">
        <span class="muted">{plural(props.runs.length, "run")}</span>
        {chosen.length > 1 ? (
          <a class="button" href={address.pathname + address.search}>
            compare {chosen.length} runs
          </a>
        ) : (
          <span class="muted small">tick two or more runs to compare them</span>
        )}
      </div>
      <Scroller label="runs">
        <table>
          <thead>
            <tr>
              <th scope="col">
                <span class="hidden">compare</span>
              </th>
              <th scope="col">run</th>
              <th scope="col">state</th>
              <th scope="col" class="wide-only">training reward</th>
              <th scope="col">held out</th>
              <th scope="col">gain, 95 % interval</th>
              <th scope="col">warnings</th>
              <th scope="col" class="wide-only">changed</th>
            </tr>
          </thead>
          <tbody>
            {props.runs.map((run, n) => (
              <tr key={run.name} class={n === row ? "linked on" : "linked"} onClick={opens(path(["runs", run.name]))}>
                <td>
                  <input
                    type="checkbox"
                    aria-label={`compare ${run.name}`}
                    checked={chosen.includes(run.name)}
                    onChange={() => toggle(run.name)}
                  />
                </td>
                <RunCells run={run} />
              </tr>
            ))}
          </tbody>
        </table>
      </Scroller>
    </Fragment>
  );
}

function RunCells(props: { run: RunSummary }) {
  const { run } = props;
  const evaluations = run.evaluations.filter((each) => each.split === "held-out");
  const [first, last] = [evaluations[0], evaluations.at(-1)];
  return (
    <Fragment>
      <td>
        <a href={path(["runs", run.name])}>
          <b>{visible(run.name)}</b>
        </a>
        <div class="small muted">{visible([run.algorithm, run.model].filter(Boolean).join(" · "))}</div>
        {run.error && <div class="small minus">{visible(run.error)}</div>}
      </td>
      <td>
        <Badge name={run.state} />
        <div class="small muted">
          {run.steps}
          {run.planned ? ` of ${run.planned} steps` : " steps"}
          {run.eta_s !== null && `, ${duration(run.eta_s)} to go`}
        </div>
      </td>
      <td class="wide-only">
        <Sparkline values={run.rewards} label="training reward" />
      </td>
      <td class="number">
        {first ? fixed(first.reward.mean) : "–"}
        {last && last !== first && ` → ${fixed(last.reward.mean)}`}
      </td>
      <td>
        <Gain of={run.gain} />
      </td>
      <td>
        {run.alerts.length > 0 && (
          <span class="badge warn" title={run.alerts.map((alert) => alert.text).join("\n")}>
            {run.alerts.length}
          </span>
        )}
      </td>
      <td class="small muted wide-only" title={clock(run.changed)}>
        {ago(run.changed)}
        {run.cost !== null && <div>cost {num(run.cost)}</div>}
      </td>
    </Fragment>
  );
}

function StoreTable(props: { stores: readonly StoreSummary[] }) {
  return (
    <Fragment>
      <h2>Stores</h2>
      <Scroller label="stores">
        <table>
          <thead>
            <tr>
              <th scope="col">store</th>
              <th scope="col">rollouts by status</th>
            </tr>
          </thead>
          <tbody>
            {props.stores.map((store) => (
              <tr key={store.name}>
                <td>
                  <a href={path(["stores", store.name])}>
                    <b>{visible(store.name)}</b>
                  </a>
                  <div class="small muted">{visible(store.url)}</div>
                </td>
                <td>
                  {store.error ? (
                    <span class="minus">{visible(store.error)}</span>
                  ) : (
                    Object.entries(store.rollouts)
                      .map(([status, n]) => `${n.toLocaleString("en")} ${status}`)
                      .join(", ") || "none"
                  )}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroller>
    </Fragment>
  );
}
