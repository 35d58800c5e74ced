// A search for prompts: what was tried, what it scored by task, what was refused, was it luck.

import { Fragment, h } from "../vendor/preact.js";
import { useState } from "../vendor/hooks.js";
import type { CandidateView, PromptView, Prompts, ProposalView, RunDetail, SearchView } from "../api.js";
import { useApi } from "../client.js";
import { Badge, Difference, Heading, Problems, Scroller, Tile, Waiting } from "../components.js";
import { fixed, num, plural, visible } from "../format.js";
import { go, path, useAddress, withQuery } from "../router.js";
import { RunTabs } from "./run.js";

export function PromptsPage(props: { name: string }) {
  const address = `/runs/${encodeURIComponent(props.name)}`;
  const asked = useApi<Prompts>(`${address}/prompts`, `runs/${props.name}`);
  const detail = useApi<RunDetail>(address);
  const { data } = asked;
  return (
    <section>
      <Heading title="Prompts" trail={[["runs", "/"], [props.name, path(["runs", props.name])]]} />
      <RunTabs name={props.name} summary={detail.data?.summary} />
      {data ? (
        <Fragment>
          <Problems of={asked} />
          {data.prompts.map((prompt) => (
            <LearnedPrompt key={prompt.name} prompt={prompt} />
          ))}
          {data.searches.map((search) => (
            <Search key={search.name} search={search} />
          ))}
          {data.prompts.length + data.searches.length === 0 && (
            <p class="panel empty">No prompt was learned or proposed yet.</p>
          )}
        </Fragment>
      ) : (
        <Waiting of={asked} what="prompts" />
      )}
    </section>
  );
}

function LearnedPrompt(props: { prompt: PromptView }) {
  const { name, before, after, is_changed } = props.prompt;
  return (
    <section class="panel">
      <h2>
        {visible(name)} <span class="muted small">{is_changed ? "changed" : "stays as it was"}</span>
      </h2>
      {is_changed ? <Difference before={before} after={after} /> : <pre>{visible(before)}</pre>}
    </section>
  );
}

function Search(props: { search: SearchView }) {
  const { search } = props;
  const address = useAddress();
  const number = Number(address.searchParams.get("candidate") ?? NaN);
  const chosen = search.candidates.find((candidate) => candidate.number === number);
  const choose = (candidate: number) => go(withQuery(address, { candidate }), true);
  return (
    <section>
      <h2>
        Search {visible(search.name)} {search.is_running && <Badge name="running" />}
      </h2>
      {search.verdict && <p class="result">{visible(search.verdict)}</p>}
      <div class="grid four">
        <Tile name="candidates" value={search.candidates.length} note={plural(search.proposals.length, "proposal")} />
        <Tile name="rollouts" value={num(search.rollouts)} note={visible(search.ended)} />
        <Tile name="reflections" value={num(search.reflections)} note={`${num(search.tokens)} tokens`} />
        <Tile name="cost" value={search.cost === null ? "not counted" : num(search.cost, 4)} note={search.chance === null ? "" : `chance of such a lead: ${num(search.chance, 3)}`} />
      </div>
      <Candidates search={search} chosen={chosen} choose={choose} />
      {chosen && <CandidateText search={search} candidate={chosen} />}
      <Scores search={search} chosen={chosen} choose={choose} />
      <Proposals proposals={search.proposals} search={search} />
      {search.texts && <p class="small muted">{visible(search.texts)}</p>}
    </section>
  );
}

/** Return the candidates below their first parents, with their depths. */
export function treeOf(candidates: readonly CandidateView[]): { candidate: CandidateView; depth: number }[] {
  const children = new Map<number | undefined, CandidateView[]>();
  const numbers = new Set(candidates.map((candidate) => candidate.number));
  for (const candidate of candidates) {
    const parent = candidate.parents.find((each) => numbers.has(each) && each < candidate.number);
    children.set(parent, [...(children.get(parent) ?? []), candidate]);
  }
  const below = (parent: number | undefined, depth: number): { candidate: CandidateView; depth: number }[] =>
    (children.get(parent) ?? []).flatMap((candidate) => [{ candidate, depth }, ...below(candidate.number, depth + 1)]);
  return below(undefined, 0);
}

function Candidates(props: { search: SearchView; chosen: CandidateView | undefined; choose: (n: number) => void }) {
  return (
    <Fragment>
      <h3>Candidates, below the one that they were made from</h3>
      <div class="panel tree plain" role="group" aria-label="candidates">
        {treeOf(props.search.candidates).map(({ candidate, depth }) => (
          <button type="button"
            key={candidate.number}
            aria-pressed={candidate === props.chosen}
            onClick={() => props.choose(candidate.number)}
          >
            <span class="name" style={{ paddingLeft: `${depth * 18}px` }}>
              <b>{candidate.number === 0 ? "0, the app's own prompts" : `candidate ${candidate.number}`}</b>
              {candidate.is_chosen && <span class="badge good">chosen</span>}
              {candidate.is_best && !candidate.is_chosen && <span class="badge info">highest</span>}
              {!candidate.is_whole && <span class="badge">a part of the tasks</span>}
              <span class="small muted">
                {visible(candidate.changed.join(", "))}
                {candidate.parents.length > 1 && `, merged of ${candidate.parents.join(" and ")}`}
              </span>
            </span>
            <span class="line" aria-hidden="true">
              <i style={{ left: "0", width: `${100 * Math.max(0, Math.min(1, candidate.mean ?? 0))}%` }} />
            </span>
            <span class="number">{fixed(candidate.mean, 3)}</span>
          </button>
        ))}
      </div>
      <p class="small muted">
        The highest mean of several candidates is biased upwards; the held-out reward of the run is the result.
      </p>
    </Fragment>
  );
}

function CandidateText(props: { search: SearchView; candidate: CandidateView }) {
  const { candidate, search } = props;
  const [isFirst, setFirst] = useState(false);
  const base = search.candidates.find((each) => each.number === (isFirst ? 0 : (candidate.parents[0] ?? 0)));
  return (
    <section class="panel">
      <div class="row between">
        <h3>Candidate {candidate.number}</h3>
        <span class="row" role="group" aria-label="compared with">
          <button type="button" class="small" aria-pressed={!isFirst} onClick={() => setFirst(false)}>
            against its parent
          </button>
          <button type="button" class="small" aria-pressed={isFirst} onClick={() => setFirst(true)}>
            against the first
          </button>
        </span>
      </div>
      {Object.entries(candidate.texts).map(([name, text]) => (
        <Fragment key={name}>
          <h4>{visible(name)}</h4>
          {base && base !== candidate ? (
            <Difference before={base.texts[name] ?? ""} after={text} />
          ) : (
            <pre>{visible(text)}</pre>
          )}
        </Fragment>
      ))}
    </section>
  );
}

function shade(value: number | null, low: number, high: number): string {
  if (value === null) return "none";
  return `h${Math.round((9 * (value - low)) / (high - low || 1))}`;
}

function Scores(props: { search: SearchView; chosen: CandidateView | undefined; choose: (n: number) => void }) {
  const { candidates, tasks } = props.search;
  const ids = Object.keys(tasks).filter((id) => candidates.some((candidate) => id in candidate.scores));
  if (!ids.length || !candidates.length) return null;
  const values = candidates.flatMap((candidate) => Object.values(candidate.scores)).filter((value) => value !== null);
  const [low, high] = [Math.min(0, ...values), Math.max(1, ...values)];
  return (
    <Fragment>
      <h3>Reward by candidate and task of the selection split</h3>
      <Scroller label="rewards by candidate and task">
        <table class="heat">
          <thead>
            <tr>
              <th scope="col">candidate</th>
              {ids.map((id, n) => (
                <th scope="col" key={id} title={tasks[id]}>
                  {n + 1}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {candidates.map((candidate) => (
              <tr key={candidate.number} class={candidate === props.chosen ? "on" : ""}>
                <th scope="row">
                  <button type="button" class="link" onClick={() => props.choose(candidate.number)}>
                    {candidate.number}
                  </button>
                </th>
                {ids.map((id) => {
                  const value = candidate.scores[id] ?? null;
                  const again = candidate.again[id];
                  const title = `${tasks[id] ?? id}: ${id in candidate.scores ? num(value) : "not run"}${again === undefined ? "" : `, again ${num(again)}`}`;
                  return (
                    <td key={id} class={shade(value, low, high)} title={title}>
                      {id in candidate.scores ? num(value, 1) : ""}
                    </td>
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </Scroller>
      <details>
        <summary>the tasks</summary>
        <ol class="small">
          {ids.map((id) => (
            <li key={id}>{visible(tasks[id] ?? id)}</li>
          ))}
        </ol>
      </details>
    </Fragment>
  );
}

function Proposals(props: { proposals: readonly ProposalView[]; search: SearchView }) {
  const [open, setOpen] = useState(-1);
  if (!props.proposals.length) return null;
  return (
    <Fragment>
      <h3>Proposals, refused ones too</h3>
      <Scroller label="proposals">
        <table>
          <thead>
            <tr>
              <th scope="col">proposal</th>
              <th scope="col">prompt</th>
              <th scope="col">made from</th>
              <th scope="col">reward on the same tasks</th>
              <th scope="col">what became of it</th>
            </tr>
          </thead>
          <tbody>
            {props.proposals.map((proposal, n) => (
              <Fragment key={n}>
                <tr class={n === open ? "on" : ""}>
                  <td>
                    <button type="button" class="link" aria-expanded={n === open} onClick={() => setOpen(n === open ? -1 : n)}>
                      {n + 1}
                    </button>
                  </td>
                  <td>{visible(proposal.prompt || "merge")}</td>
                  <td>{proposal.parents.join(" and ")}</td>
                  <td class="number">
                    {proposal.before === null ? "–" : `${fixed(proposal.before)} → ${fixed(proposal.after)} on ${plural(proposal.tasks, "task")}`}
                  </td>
                  <td>{proposal.candidate === null ? `dropped, ${visible(proposal.why)}` : `candidate ${proposal.candidate}`}</td>
                </tr>
                {n === open && (
                  <tr>
                    <td colSpan={5}>
                      <ProposalText proposal={proposal} search={props.search} />
                    </td>
                  </tr>
                )}
              </Fragment>
            ))}
          </tbody>
        </table>
      </Scroller>
    </Fragment>
  );
}

function ProposalText(props: { proposal: ProposalView; search: SearchView }) {
  const { proposal, search } = props;
  const parent = search.candidates.find((candidate) => candidate.number === proposal.parents[0]);
  const before = parent?.texts[proposal.prompt];
  if (!proposal.text) return <p class="muted">the answer had no text</p>;
  return before === undefined ? <pre>{visible(proposal.text)}</pre> : <Difference before={before} after={proposal.text} />;
}
