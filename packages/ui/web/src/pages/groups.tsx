// Groups: the rollouts of one task, which are compared with each other.

import { Fragment, h } from "../vendor/preact.js";
import type { Answer, Facets, GroupDetail, GroupPage as Groups, GroupRow } from "../api.js";
import { Strip } from "../charts.js";
import { useApi } from "../client.js";
import { Badge, Choice, Dimensions, Heading, Pager, Problems, Scroller, Waiting, rangeOf } from "../components.js";
import type { Place } from "../filters.js";
import { Filters, apiPath, apiQuery, useWholeSearch } from "../filters.js";
import { fixed, num, pretty, shortId, signed, visible } from "../format.js";
import { useKeys, useRowKeys } from "../keys.js";
import { go, opens, path, useAddress } from "../router.js";
import { RunTabs } from "./run.js";

const SORTS: readonly (readonly [string, string])[] = [
  ["spread", "widest spread first"],
  ["flat", "no spread first"],
  ["worst", "worst mean first"],
  ["best", "best mean first"],
];

function groupAddress(place: Place, group: GroupRow): string {
  return path([...place, "groups", group.group], { step: group.step });
}

export function GroupsPage(props: { place: Place }) {
  const [kind, name] = props.place;
  const address = useAddress();
  const page = useApi<Groups>(apiPath(props.place, "groups") + apiQuery(address, true), props.place.join("/"));
  const facets = useApi<Facets>(apiPath(props.place, "facets") + apiQuery(address, false), props.place.join("/"));
  const goesOn = useWholeSearch(page, facets, true);
  return (
    <section>
      <Heading title="Groups" trail={[[kind, "/"], [name, path([kind, name])]]} />
      {kind === "runs" && <RunTabs name={name} />}
      <p class="muted">
        The rollouts of one task{kind === "runs" && ". A group whose rewards are all equal teaches nothing: its spread is 0"}.
      </p>
      <Filters facets={facets.data} isProduction={kind === "stores"} />
      <Choice name="sort" label="order" empty="newest first" values={SORTS} />
      <Problems of={page} />
      <p class="muted small" role="status">
        {goesOn && "still searching older attempts…"}
      </p>
      {page.data ? <GroupTable place={props.place} page={page.data} /> : !page.error && <Waiting of={page} what="groups" />}
    </section>
  );
}

function GroupTable(props: { place: Place; page: Groups }) {
  const { groups, total, cursor, is_partial } = props.page;
  const at = useRowKeys(groups.length, (n) => {
    const group = groups[n];
    if (group) go(groupAddress(props.place, group));
  });
  const range = rangeOf(groups.flatMap((group) => group.members.map((member) => member.reward)));
  if (!groups.length) return <p class="panel empty">No group matches{is_partial && " so far"}.</p>;
  return (
    <Fragment>
      <Scroller label="groups">
        <table>
          <thead>
            <tr>
              <th scope="col">task</th>
              <th scope="col">step</th>
              <th scope="col">rewards</th>
              <th scope="col" class="number">
                mean
              </th>
              <th scope="col" class="number">
                spread
              </th>
              <th scope="col" class="number">
                rollouts
              </th>
            </tr>
          </thead>
          <tbody>
            {groups.map((group, n) => (
              <tr
                key={`${group.group} ${group.step} ${group.mode}`}
                class={n === at ? "linked on" : "linked"}
                onClick={opens(groupAddress(props.place, group))}
              >
                <td>
                  <a class="clip two-lines" href={groupAddress(props.place, group)}>
                    {visible(group.task || group.group)}
                  </a>
                </td>
                <td>
                  {group.mode} {group.step}
                </td>
                <td>
                  <Strip
                    values={group.members.flatMap((member) =>
                      member.reward === null ? [] : [{ value: member.reward, title: `${num(member.reward)} ${member.status}` }],
                    )}
                    mean={group.mean}
                    {...range}
                  />
                </td>
                <td class="number">{fixed(group.mean)}</td>
                <td class="number">{group.spread === 0 ? "0: teaches nothing" : fixed(group.spread)}</td>
                <td class="number">{group.size}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroller>
      <Pager total={total} shown={groups.length} cursor={cursor} noun="group" isPartial={is_partial} />
    </Fragment>
  );
}

export function GroupPage(props: { place: Place; id: string }) {
  const [kind, name] = props.place;
  const step = useAddress().searchParams.get("step");
  const query = step === null ? "" : `?step=${encodeURIComponent(step)}`;
  const asked = useApi<GroupDetail>(apiPath(props.place, "groups", props.id) + query, props.place.join("/"));
  const groups = path([kind, name, "groups"]);
  useKeys({ Escape: () => go(groups) });
  const { data } = asked;
  return (
    <section>
      <Heading title="One task's rollouts" trail={[[kind, "/"], [name, path([kind, name])], ["groups", groups]]} />
      {data ? (
        <Fragment>
          <Problems of={asked} />
          <div class="panel">
            <div class="row between">
              <b>{kind === "runs" ? `${data.mode} step ${data.step}` : ""}</b>
              <span>
                mean {fixed(data.mean)}, spread {data.spread === 0 ? "0: teaches nothing" : fixed(data.spread)}
              </span>
            </div>
            <details open={data.task.length < 300}>
              <summary>task</summary>
              <pre>{visible(pretty(data.task))}</pre>
            </details>
          </div>
          <SideBySide place={props.place} detail={data} />
        </Fragment>
      ) : (
        <Waiting of={asked} what="the group" />
      )}
    </section>
  );
}

/** Show the rollouts as columns, best first, and each agent's answers as a row. */
function SideBySide(props: { place: Place; detail: GroupDetail }) {
  const { detail, place } = props;
  return (
    <div class="scroller" role="region" aria-label="rollouts side by side" tabIndex={0}>
      <table class="columns">
        <thead>
          <tr>
            <th scope="col">agent</th>
            {detail.rollouts.map(({ row }) => (
              <th scope="col" key={row.rollout_id}>
                <a href={path([...place, "rollouts", row.rollout_id])}>
                  <code>{shortId(row.rollout_id)}</code>
                </a>
                <div class="big">{row.reward === null ? "unscored" : fixed(row.reward)}</div>
                <Dimensions of={row.dimensions} />
                {row.status !== "succeeded" && <Badge name={row.status} title={row.message} />}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {detail.agents.map((agent) => (
            <tr key={agent}>
              <th scope="row">{visible(agent)}</th>
              {detail.rollouts.map(({ row, answers }) => (
                <td key={row.rollout_id}>
                  {answers
                    .filter((answer) => answer.agent === agent)
                    .map((answer) => (
                      <AnswerBox key={`${answer.call_id} ${answer.choice}`} answer={answer} address={path([...place, "rollouts", row.rollout_id, "calls", answer.call_id])} />
                    ))}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function AnswerBox(props: { answer: Answer; address: string }) {
  const { answer } = props;
  return (
    <div class="answer">
      <a class="row between small" href={props.address}>
        <span>
          {answer.fate === "recorded" ? "the call" : <Badge name={answer.fate} title={answer.reason} />}
        </span>
        {answer.advantage !== null && (
          <span class={answer.advantage > 0 ? "plus" : answer.advantage < 0 ? "minus" : ""}>
            advantage {signed(answer.advantage)}
          </span>
        )}
      </a>
      <pre>{visible(pretty(answer.text))}</pre>
    </div>
  );
}
