// Runs beside each other: is one better, is the difference real, and what was set differently.

import { h } from "../vendor/preact.js";
import type { Comparison, Metrics, RunSummary } from "../api.js";
import { Chart } from "../charts.js";
import type { Series } from "../charts.js";
import { useApi } from "../client.js";
import { Gain, Heading, Problems, Scroller, Waiting } from "../components.js";
import { visible } from "../format.js";
import { path, useAddress } from "../router.js";
import { evaluationPoints } from "../series.js";

const CURVES: readonly (readonly [string, string])[] = [
  ["reward", "Training reward"],
  ["learner/entropy", "Entropy, nats per token"],
  ["learner/approx_kl", "KL divergence of an update, nats per token"],
  ["seconds", "Seconds per step"],
];
const MAX_RUNS = 8;

export function ComparePage() {
  const names = useAddress().searchParams.getAll("run").slice(0, MAX_RUNS);
  const query = names.map((name) => `run=${encodeURIComponent(name)}`).join("&");
  const comparison = useApi<Comparison>(names.length ? `/compare?${query}` : null, "*");
  const { data } = comparison;
  return (
    <section>
      <Heading title="Compare runs" trail={[["runs", "/"]]} />
      {names.length < 2 && <p class="panel empty">Tick two or more runs in the list of runs.</p>}
      {!data && names.length > 0 && <Waiting of={comparison} what="runs" />}
      {data && (
        <div>
          <Problems of={comparison} />
          <Pairs comparison={data} />
          <div class="grid two">
            <div class="panel">
              <Chart label="Held-out reward" series={evaluationSeries(data.runs)} />
            </div>
            {CURVES.map(([name, label]) => (
              <Curve key={name} name={name} label={label} runs={data.runs.map((run) => run.name)} />
            ))}
          </div>
          <Settings comparison={data} />
        </div>
      )}
    </section>
  );
}

function evaluationSeries(runs: readonly RunSummary[]): Series[] {
  return runs.map((run, color) => ({ name: run.name, color, hasDots: true, points: evaluationPoints(run, "held-out") }));
}

function Curve(props: { name: string; label: string; runs: readonly string[] }) {
  const series: Series[] = [];
  props.runs.forEach((run, color) => {
    const points = useCurve(run, props.name); // the number of runs is constant while the page lives
    if (points.length) series.push({ name: run, color, points });
  });
  if (!series.length) return null;
  return (
    <div class="panel">
      <Chart label={props.label} series={series} />
    </div>
  );
}

function useCurve(run: string, name: string) {
  const address = `/runs/${encodeURIComponent(run)}/metrics?names=${encodeURIComponent(name)}&points=300`;
  return useApi<Metrics>(address, `runs/${run}`).data?.series[name] ?? [];
}

function Pairs(props: { comparison: Comparison }) {
  const { pairs } = props.comparison;
  return (
    <div>
      {pairs.map((pair) => (
        <div class="panel" key={`${pair.first} ${pair.second}`}>
          <div class="row">
            <span>
              last held-out reward of <a href={path(["runs", pair.second])}>{visible(pair.second)}</a> minus that of{" "}
              <a href={path(["runs", pair.first])}>{visible(pair.first)}</a>:
            </span>
            <Gain of={pair.difference} />
          </div>
          <div>{visible(pair.sentence)}</div>
        </div>
      ))}
    </div>
  );
}

function Settings(props: { comparison: Comparison }) {
  const { runs, settings } = props.comparison;
  return (
    <section>
      <h2>Settings that differ</h2>
      {settings.length === 0 ? (
        <p class="muted">none</p>
      ) : (
        <Scroller label="settings that differ">
          <table>
            <thead>
              <tr>
                <th scope="col">setting</th>
                {runs.map((run) => (
                  <th scope="col" key={run.name}>
                    {visible(run.name)}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {settings.map((setting) => (
                <tr key={setting.name}>
                  <th scope="row">{visible(setting.name)}</th>
                  {runs.map((run) => (
                    <td class="code" key={run.name}>
                      {visible(setting.values[run.name] ?? "–")}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </Scroller>
      )}
    </section>
  );
}
