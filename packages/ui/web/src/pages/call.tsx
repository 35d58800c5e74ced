// A model call: why this advantage, which token was improbable, what it was compared with.

import { Fragment, h } from "../vendor/preact.js";
import type { CallDetail, ChoiceDetail, Reasons, TokenView } from "../api.js";
import { Strip } from "../charts.js";
import { useApi } from "../client.js";
import { Badge, Heading, MessageBox, Problems, Scroller, Waiting } from "../components.js";
import type { Place } from "../filters.js";
import { apiPath } from "../filters.js";
import { fixed, num, percent, plural, pretty, shortId, signed, visible } from "../format.js";
import { useKeys } from "../keys.js";
import { go, path, useAddress, withQuery } from "../router.js";

export function CallPage(props: { place: Place; rollout: string; call: string }) {
  const { place, rollout, call } = props;
  const [kind, name] = place;
  const asked = useApi<CallDetail>(apiPath(place, "rollouts", rollout, "calls", call), place.join("/"));
  const back = path([kind, name, "rollouts", rollout]);
  useKeys({ Escape: () => go(back) });
  const { data } = asked;
  return (
    <section>
      <Heading
        title={data ? `Call of ${data.agent}` : "Call"}
        trail={[
          [kind, "/"],
          [name, path([kind, name])],
          [`rollout ${shortId(rollout)}`, back],
        ]}
      />
      {data ? (
        <Fragment>
          <Problems of={asked} />
          {data.choices.map((choice) => (
            <Choice key={choice.call.choice} place={place} choice={choice} isOnly={data.choices.length === 1} />
          ))}
          <h2>What was asked</h2>
          {data.overrides && <p class="small muted">sampling replaced (asked, used): {visible(data.overrides)}</p>}
          {data.prompt_applied && <p class="small muted">{visible(data.prompt_applied)}</p>}
          {data.input.map((message, n) => (
            <MessageBox key={n} message={message} place={place} />
          ))}
          {data.choices[0]?.prompt_text && (
            <details class="panel">
              <summary>the prompt as the engine read it</summary>
              <pre class="code">{visible(data.choices[0].prompt_text)}</pre>
            </details>
          )}
        </Fragment>
      ) : (
        <Waiting of={asked} what="the call" />
      )}
    </section>
  );
}

function Choice(props: { place: Place; choice: ChoiceDetail; isOnly: boolean }) {
  const { choice } = props;
  const { call } = choice;
  return (
    <section class="panel">
      <div class="row between">
        <span class="row">
          {!props.isOnly && <b>choice {call.choice}</b>}
          <Badge name={call.replayed_from ? "replayed" : call.fate} />
          {call.is_fork && <span class="muted">the rollout forks here</span>}
          {call.advantage !== null && (
            <b class={call.advantage > 0 ? "big plus" : call.advantage < 0 ? "big minus" : "big"}>
              advantage {signed(call.advantage, 3)}
            </b>
          )}
        </span>
        <span class="small muted">
          {[
            call.policy && call.policy !== "policy" && `policy ${call.policy}`,
            call.versions.length > 0 && `version ${call.versions.join(", ")}`,
            call.tokens !== null && plural(call.tokens, "token"),
            call.temperature !== null && `temperature ${num(call.temperature)}`,
          ]
            .filter(Boolean)
            .join(" · ")}
        </span>
      </div>
      {call.fate === "recorded" && (
        <p class="muted">
          {props.place[0] === "stores" ? "Recorded in production." : "Not trained: the run searches prompts."}
        </p>
      )}
      {call.fate === "evaluation" && <p class="muted">Not trained: it belongs to an evaluation.</p>}
      {call.replayed_from && (
        <p>
          Answered as in the rollout that this one repeats:{" "}
          <a href={path([...props.place, "rollouts", call.replayed_from, "calls", call.call_id])}>
            the call of rollout {shortId(call.replayed_from)}
          </a>{" "}
          has its texts and tokens.
        </p>
      )}
      {!call.replayed_from && (call.fate === "frozen" || call.fate === "rejected") && (
        <p>
          Not trained{call.reason && `: ${visible(call.reason)}`}.{" "}
          {call.fate === "frozen" && "The run trains other agents."}
        </p>
      )}
      {choice.reasons && <Why place={props.place} choice={choice} reasons={choice.reasons} />}
      <h3>Answer</h3>
      {choice.tokens.length > 0 ? (
        <Tokens choice={choice} />
      ) : (
        choice.output.map((message, n) => <MessageBox key={n} message={message} place={props.place} />)
      )}
      {choice.grammar && (
        <details>
          <summary>the answer was constrained</summary>
          <pre class="code">{visible(pretty(choice.grammar))}</pre>
        </details>
      )}
    </section>
  );
}

/** Say why the advantage is what it is, in a sentence, and show what it was compared with. */
function Why(props: { place: Place; choice: ChoiceDetail; reasons: Reasons }) {
  const { choice, reasons } = props;
  const values = choice.mates.flatMap((mate) => (mate.value === null ? [] : [mate.value]));
  const low = Math.min(0, ...values);
  const high = Math.max(1, ...values);
  return (
    <Fragment>
      <p>{whyInWords(reasons, choice.call.advantage)}</p>
      {values.length > 1 && (
        <Fragment>
          <Strip
            mean={reasons.baseline}
            low={low}
            high={high}
            values={choice.mates.flatMap((mate) =>
              mate.value === null
                ? []
                : [{ value: mate.value, title: `${num(mate.value)}${mate.is_this ? ", this rollout" : ""}`, isThis: mate.is_this }],
            )}
          />
          <p class="small row">
            {choice.mates.map((mate) => (
              <a
                key={mate.rollout_id}
                class={mate.is_this ? "strong" : ""}
                href={path([...props.place, "rollouts", mate.rollout_id])}
                title={mate.rollout_id}
              >
                {fixed(mate.value)}
                {mate.is_this && " (this)"}
              </a>
            ))}
          </p>
        </Fragment>
      )}
      <details class="small muted">
        <summary>the formula</summary>
        {visible(choice.call.why)}
      </details>
    </Fragment>
  );
}

/** Describe how an advantage was computed. */
export function whyInWords(reasons: Reasons, advantage: number | null): string {
  if (reasons.zero_reason) {
    return `The advantage is 0 (${reasons.zero_reason}), so this call teaches nothing in this step.`;
  }
  const expected = reasons.expected !== null;
  const compared = expected
    ? `The critic expected ${num(reasons.expected)} at this call`
    : `The ${plural(reasons.size, reasons.unit)} with which it is compared had ${num(reasons.baseline)} on average`;
  const parts = [`${compared}; this rollout's return was ${num(reasons.value)} and the call's credit ${num(reasons.credit)}`];
  if (reasons.shaping) parts.push(`of which intermediate rewards gave ${signed(reasons.shaping)}`);
  if (reasons.penalty) parts.push(`its length cost ${num(reasons.penalty)}`);
  const direction =
    advantage === null ? "" : advantage > 0 ? " Training makes this answer more probable." : advantage < 0 ? " Training makes this answer less probable." : "";
  return (
    `${parts.join(", ")}. Divided by ${num(reasons.scale)} that is an advantage of ${signed(advantage, 3)} ` +
    `(${reasons.estimator}).${direction} The call has ${percent(reasons.share)} of its rollout's weight, ` +
    `${plural(reasons.tokens, "token")}.`
  );
}

const COLOURS: readonly (readonly [string, string])[] = [
  ["probability", "probability"],
  ["version", "policy version"],
  ["none", "plain"],
  ["table", "table"],
];

/** Show the sampled tokens, coloured by probability or by the version of the policy. */
function Tokens(props: { choice: ChoiceDetail }) {
  const { tokens, tokens_left_out } = props.choice;
  const address = useAddress();
  const by = address.searchParams.get("color") ?? "probability";
  const versions = [...new Set(tokens.map((token) => token.version))];
  const worst = tokens.reduce((lowest, token) => (token.logprob < lowest.logprob ? token : lowest), tokens[0] as TokenView);
  return (
    <Fragment>
      <div class="row between">
        <span class="row" role="group" aria-label="colour of tokens">
          {COLOURS.map(([name, label]) => (
            <button type="button"
              key={name}
              class="small"
              aria-pressed={by === name}
              onClick={() => go(withQuery(address, { color: name === "probability" ? null : name }), true)}
            >
              {label}
            </button>
          ))}
        </span>
        <span class="small muted">
          least probable: {worst.text ? JSON.stringify(visible(worst.text)) : `token ${worst.id}`}, {percent(Math.exp(worst.logprob))}
        </span>
      </div>
      {by === "table" && <TokenTable tokens={tokens} />}
      <p class="tokens" hidden={by === "table"}>
        {tokens.map((token, n) => (
          <span key={n} class={tokenClass(token, by, versions)} title={tokenTitle(token)}>
            {visible(token.text) || (token.text === "" ? `[${token.id}]` : "")}
          </span>
        ))}
      </p>
      {tokens_left_out > 0 && <p class="small muted">{plural(tokens_left_out, "further token")} left out</p>}
      {by === "probability" && (
        <p class="small muted legend">
          <span class="p0">below 1 %</span> <span class="p1">below 10 %</span> <span class="p2">below 50 %</span>{" "}
          <span>at least 50 %</span>
        </p>
      )}
    </Fragment>
  );
}

function TokenTable(props: { tokens: readonly TokenView[] }) {
  return (
    <Scroller label="tokens">
      <table>
        <thead>
          <tr>
            <th scope="col">text</th>
            <th scope="col" class="number">
              token id
            </th>
            <th scope="col" class="number">
              probability
            </th>
            <th scope="col" class="number">
              policy version
            </th>
          </tr>
        </thead>
        <tbody>
          {props.tokens.map((token, n) => (
            <tr key={n}>
              <td class="code">{JSON.stringify(visible(token.text))}</td>
              <td class="number">{token.id}</td>
              <td class="number">{percent(Math.exp(token.logprob))}</td>
              <td class="number">{token.version}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroller>
  );
}

function tokenClass(token: TokenView, by: string, versions: readonly number[]): string {
  if (by === "version") return `v${versions.indexOf(token.version) % 4}`;
  if (by !== "probability") return "";
  const probability = Math.exp(token.logprob);
  return probability < 0.01 ? "p0" : probability < 0.1 ? "p1" : probability < 0.5 ? "p2" : "";
}

function tokenTitle(token: TokenView): string {
  return `token ${token.id}: probability ${percent(Math.exp(token.logprob))}, log-probability ${num(token.logprob)}, version ${token.version}`;
}
