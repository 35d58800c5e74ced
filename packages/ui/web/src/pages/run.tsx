// A run: what went wrong, what was learned, what became of the calls.

import { Fragment, h } from "../vendor/preact.js";
import { useState } from "../vendor/hooks.js";
import type { AgentCoverage, EvaluationPoint, Metrics, Places, RunDetail, RunSummary } from "../api.js";
import { Chart } from "../charts.js";
import type { Series } from "../charts.js";
import { useApi } from "../client.js";
import { Alerts, Badge, Gain, Heading, Problems, Scroller, Tile, Waiting, gainInWords } from "../components.js";
import { ago, clock, duration, fixed, num, percent, plural, visible } from "../format.js";
import { go, path, useAddress, withQuery } from "../router.js";
import { evaluationPoints } from "../series.js";

/** Show the tabs of a run. */
export function RunTabs(props: { name: string; summary?: RunSummary | undefined }) {
  const { pathname } = useAddress();
  const places = useApi<Places>(props.summary ? null : "/places");
  const summary = props.summary ?? places.data?.runs.find((run) => run.name === props.name);
  const tabs: [string, string[]][] = [["overview", ["runs", props.name]]];
  if (summary?.has_rollouts ?? true) {
    tabs.push(["rollouts", ["runs", props.name, "rollouts"]], ["groups", ["runs", props.name, "groups"]]);
  }
  if (summary?.has_prompts) tabs.push(["prompts", ["runs", props.name, "prompts"]]);
  tabs.push(["settings", ["runs", props.name, "settings"]]);
  return (
    <nav class="tabs" aria-label="Pages of the run">
      {tabs.map(([label, segments]) => (
        <a key={label} href={path(segments, label === "groups" ? { mode: "train" } : {})} aria-current={pathname === path(segments) ? "page" : undefined}>
          {label}
        </a>
      ))}
    </nav>
  );
}

export function RunPage(props: { name: string }) {
  const place = `runs/${props.name}`;
  const asked = useApi<RunDetail>(`/runs/${encodeURIComponent(props.name)}`, place);
  const { data } = asked;
  return (
    <section>
      <Heading title={props.name} trail={[["runs", "/"]]}>
        {data && <Badge name={data.summary.state} />}
      </Heading>
      <RunTabs name={props.name} summary={data?.summary} />
      {data ? (
        <Fragment>
          <Problems of={asked} error={data.error || data.summary.error} />
          <p class="muted">
            {visible([data.summary.algorithm, data.summary.model, data.summary.app].filter(Boolean).join(" · "))}
            {data.summary.optimize && visible(`, ${data.summary.has_prompts ? "searches prompts of" : "trains"} ${data.summary.optimize}`)}
          </p>
          <Alerts alerts={data.summary.alerts} />
          <Tiles detail={data} />
          <Curves name={props.name} detail={data} />
          <Coverage detail={data} name={props.name} />
          <OtherMetrics name={props.name} names={data.metric_names} />
        </Fragment>
      ) : (
        <Waiting of={asked} what="the run" />
      )}
    </section>
  );
}

function Tiles(props: { detail: RunDetail }) {
  const { summary, result, kept } = props.detail;
  const evaluations = summary.evaluations.filter((each) => each.split === "held-out");
  const [first, last] = [evaluations[0], evaluations.at(-1)];
  const lastReward = summary.rewards.filter((value) => value !== null).at(-1);
  return (
    <Fragment>
      <div class="grid four">
        <Tile
          name="progress"
          value={`${summary.steps}${summary.planned ? ` of ${summary.planned}` : ""} steps`}
          note={summary.eta_s === null ? `last change ${ago(summary.changed)}` : `about ${duration(summary.eta_s)} to go`}
        />
        <Tile
          name={`held-out ${summary.metric}`}
          value={
            first && last && first !== last
              ? `${fixed(first.reward.mean)} → ${fixed(last.reward.mean)}`
              : fixed(first?.reward.mean)
          }
          note={last && evaluationNote(last)}
        />
        <Tile
          name="gain, 95 % interval"
          value={<Gain of={summary.gain} />}
          note={summary.gain ? `${gainInWords(summary.gain)}; n=${summary.gain.n}` : "needs two evaluations"}
        />
        <Tile
          name={`training ${summary.metric}, latest`}
          value={fixed(lastReward)}
          note={`${duration(summary.seconds)} of training${summary.cost === null ? "" : `, cost ${num(summary.cost)}`}`}
        />
      </div>
      {result && <p class="result">{visible(result)}</p>}
      {kept !== null && (
        <p class="muted">
          The weights of step {kept} are kept, the best by the selection split. Its score there is biased upwards,
          as the highest of several; the held-out reward is the result.
        </p>
      )}
    </Fragment>
  );
}

function evaluationNote(evaluation: EvaluationPoint): string {
  const parts = [`n=${evaluation.reward.n}`];
  if (evaluation.failed) parts.push(`${evaluation.failed} failed`);
  if (evaluation.unscored) parts.push(`${evaluation.unscored} unscored`);
  if (evaluation.silent) parts.push(`${evaluation.silent} without a call of the policy`);
  return parts.join(", ");
}

const FAILURES = "Rollouts that failed";

/** Charts below that of the reward: a label, and which metrics it shows under which name. */
const CURVES: readonly (readonly [string, RegExp])[] = [
  ["Mean reward of the rollouts in which an agent acted", /^agent\/(.+)\/reward$/],
  ["Entropy, nats per token", /^learner\/(?:(.+)\/)?entropy$/],
  ["KL divergence of an update, nats per token", /^learner\/(?:(.+)\/)?approx_kl$/],
  [FAILURES, /^(failed)$/],
  ["Seconds per step", /^(seconds)$/],
];

function useMetrics(name: string, names: readonly string[], kind = "train") {
  const query = `names=${names.map(encodeURIComponent).join(",")}&kind=${kind}&points=600`;
  return useApi<Metrics>(names.length ? `/runs/${encodeURIComponent(name)}/metrics?${query}` : null, `runs/${name}`);
}

function Curves(props: { name: string; detail: RunDetail }) {
  const { summary, metric_names } = props.detail;
  const charts = CURVES.map(([label, pattern]) => ({
    label,
    metrics: metric_names.flatMap((metric) => {
      const match = pattern.exec(metric);
      return match ? [[metric, match[1] ?? label] as const] : [];
    }),
  }));
  const asked = useMetrics(props.name, ["reward", ...charts.flatMap(({ metrics }) => metrics.map(([metric]) => metric))]);
  const series = asked.data?.series ?? {};
  const trained = new Set((series["reward"] ?? []).map((point) => Math.round(point.x)));
  const open = summary.has_rollouts
    ? (x: number) => {
        const step = Math.round(x);
        const isEvaluated = summary.evaluations.some((each) => each.step === step);
        const mode = trained.has(step) || !isEvaluated ? "train" : "val";
        go(path(["runs", props.name, "rollouts"], { step, mode }));
      }
    : undefined;
  return (
    <div class="grid two">
      <div class="panel wide">
        <Chart
          label={`Mean ${summary.metric}`}
          height={240}
          series={[
            { name: "training, ± 1.96 standard errors", color: 0, points: series["reward"] ?? [] },
            ...evaluationSeries(summary),
          ]}
          onPick={open}
        />
      </div>
      {charts.map(({ label, metrics }) => {
        const curves = metrics.map(([metric, name], color) => ({ name, color, points: series[metric] ?? [] }));
        const isTold = curves.some((curve) => curve.points.length > 1) && (label !== FAILURES || curves.some((curve) => curve.points.some((point) => point.y)));
        return isTold ? (
          <div class="panel" key={label}>
            <Chart label={label} series={curves} onPick={open} />
          </div>
        ) : null;
      })}
    </div>
  );
}

function evaluationSeries(summary: RunSummary): Series[] {
  return (["held-out", "selection"] as const)
    .map((split, n) => ({ name: split, color: n + 1, hasDots: true, points: evaluationPoints(summary, split) }))
    .filter(({ points }) => points.length);
}

function Coverage(props: { detail: RunDetail; name: string }) {
  const { agents, coverage_of, rollouts, pruned, overrides, scorers } = props.detail;
  if (!agents.length && !pruned) return null;
  return (
    <section>
      <h2>What became of the model calls</h2>
      <p class="muted">
        {coverage_of < rollouts
          ? `counted in ${coverage_of.toLocaleString("en")} of ${plural(rollouts, "rollout")}`
          : `in ${plural(rollouts, "rollout")}`}
        {pruned && `; ${visible(pruned)}`}
      </p>
      <Scroller label="calls by agent">
        <table>
          <thead>
            <tr>
              <th scope="col">agent</th>
              <th scope="col" class="number">
                calls
              </th>
              <th scope="col">share</th>
              <th scope="col" class="number">
                trained
              </th>
              <th scope="col" class="number">
                frozen
              </th>
              <th scope="col" class="number">
                in evaluations
              </th>
              <th scope="col" class="number" title="mean reward of the rollouts in which the agent acted">
                reward
              </th>
              <th scope="col">rejected, why</th>
            </tr>
          </thead>
          <tbody>
            {agents.map((agent) => (
              <AgentRow key={agent.path} agent={agent} run={props.name} />
            ))}
          </tbody>
        </table>
      </Scroller>
      <p class="small muted">
        Reward: the mean over the rollouts in which the agent acted. An agent that acts only when another has failed
        sees harder rollouts than the others.
      </p>
      {Object.keys(overrides).length > 0 && (
        <p class="small muted">
          Sampling that the app asked for and training replaced, in calls:{" "}
          {Object.entries(overrides)
            .map(([name, n]) => `${visible(name)} ${n}`)
            .join(", ")}
        </p>
      )}
      {Object.entries(scorers).map(([name, mean]) => (
        <p class="small muted" key={name}>
          reward {visible(name)}: mean {fixed(mean.mean, 3)} of {mean.n}
        </p>
      ))}
    </section>
  );
}

/** Say whether an agent learns; in a search for prompts all others are only recorded. */
function roleOf(agent: AgentCoverage): string {
  return agent.learns ? "learns" : agent.recorded ? "" : "frozen";
}

function AgentRow(props: { agent: AgentCoverage; run: string }) {
  const { agent } = props;
  const rejected = Object.values(agent.rejected).reduce((sum, n) => sum + n, 0);
  const share = (n: number) => ({ width: `${(100 * n) / (agent.calls || 1)}%` });
  return (
    <tr>
      <td>
        <a href={path(["runs", props.run, "rollouts"], { agent: agent.path })}>{visible(agent.path)}</a>{" "}
        <span class="small muted">{roleOf(agent)}</span>
      </td>
      <td class="number">{agent.calls}</td>
      <td>
        <span
          class="stack"
          role="img"
          aria-label={`${percent(agent.trained / (agent.calls || 1))} trained, ${percent(rejected / (agent.calls || 1))} rejected`}
        >
          <i class="good" style={share(agent.trained)} />
          <i class="warn" style={share(rejected)} />
          <i class="plain" style={share(agent.frozen)} />
        </span>
      </td>
      <td class="number">{agent.trained}</td>
      <td class="number">{agent.frozen}</td>
      <td class="number">{agent.evaluation}</td>
      <td class="number">{fixed(agent.reward)}</td>
      <td class="small">
        {Object.entries(agent.rejected)
          .map(([reason, n]) => `${n} ${visible(reason)}`)
          .join(", ")}
      </td>
    </tr>
  );
}

function OtherMetrics(props: { name: string; names: readonly string[] }) {
  const address = useAddress();
  const chosen = address.searchParams.get("metric") ?? "";
  const asked = useMetrics(props.name, chosen ? [chosen] : []);
  if (!props.names.length) return null;
  return (
    <section>
      <h2>Any metric</h2>
      <label class="field">
        <span>metric</span>
        <select value={chosen} onChange={(event) => go(withQuery(address, { metric: event.currentTarget.value }), true)}>
          <option value="">choose…</option>
          {props.names.map((name) => (
            <option key={name} value={name}>
              {visible(name)}
            </option>
          ))}
        </select>
      </label>
      {chosen && asked.data && (
        <div class="panel">
          <Chart label={chosen} series={[{ name: chosen, color: 0, points: asked.data.series[chosen] ?? [] }]} />
        </div>
      )}
      {chosen && !asked.data && <Waiting of={asked} what={chosen} />}
    </section>
  );
}

export function SettingsPage(props: { name: string }) {
  const asked = useApi<RunDetail>(`/runs/${encodeURIComponent(props.name)}`);
  const [part, setPart] = useState("");
  const rows = Object.entries(asked.data?.settings ?? {}).filter(([name]) => name.includes(part));
  return (
    <section>
      <Heading title="Settings" trail={[["runs", "/"], [props.name, path(["runs", props.name])]]} />
      <RunTabs name={props.name} summary={asked.data?.summary} />
      {asked.data ? (
        <Fragment>
          <p class="muted">
            From the run's <code>config.json</code>; started {clock(asked.data.summary.started)}.
          </p>
          <label class="field">
            <span>find</span>
            <input type="search" value={part} onInput={(event) => setPart(event.currentTarget.value)} />
          </label>
          <Scroller label="settings">
            <table>
              <thead>
                <tr>
                  <th scope="col">setting</th>
                  <th scope="col">value</th>
                </tr>
              </thead>
              <tbody>
                {rows.map(([name, value]) => (
                  <tr key={name}>
                    <th scope="row">{visible(name)}</th>
                    <td class="code">{visible(value)}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </Scroller>
        </Fragment>
      ) : (
        <Waiting of={asked} what="settings" />
      )}
    </section>
  );
}
