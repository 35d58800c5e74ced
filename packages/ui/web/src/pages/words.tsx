// What the words of the pages mean.

import { h } from "../vendor/preact.js";
import { Heading } from "../components.js";

const WORDS: readonly (readonly [string, string])[] = [
  ["task", "one input of a data set"],
  ["rollout", "one run of the app on a task; it is tried again, as another attempt, if a machine fails"],
  ["reward", "the number that the app's metric gives a rollout; unscored is not zero: it has no number"],
  ["group", "the rollouts of one task in one step, which are compared with each other"],
  ["spread", "highest minus lowest reward of a group; a group with spread 0 teaches nothing"],
  ["step", "one update of the model, from the rollouts of some tasks"],
  ["training, val, held-out, selection", "training rollouts teach. Held-out tasks (mode val) are never trained on: their reward is the result. The selection split compares steps or prompts; its highest score is biased upwards"],
  ["gain", "change of the held-out reward from before to after, paired by task"],
  ["95 % interval", "range that contains the true mean in 95 of 100 such experiments; a change whose interval contains 0 cannot be told from chance. In n tasks of c clusters, tasks of a cluster are alike, so that c counts"],
  ["agent", "a named part of the app that asks a model: a graph node, a crew role, a team member"],
  ["call", "one request to a model and its answer"],
  ["trained, frozen, rejected", "a call taught the model; or belongs to an agent that does not learn; or was left out of training, with the reason beside it. Calls of evaluations are never trained"],
  ["credit", "the part of a rollout's reward that a call gets; terminal: every call gets the whole reward"],
  ["advantage", "how much better the credit was than that of the group, divided by the group's standard deviation; above 0 the answer becomes more probable, below 0 less"],
  ["baseline, scale", "what is subtracted from the credit (the group's mean), and what the difference is divided by"],
  ["weight", "how much each token of a call counts in the update"],
  ["policy, version", "a model that learns, and the number of its update; a token may be of an older version"],
  ["probability of a token", "how probable the model found the token when it chose it"],
  ["entropy", "how undecided the model is, in nats per token; near 0 it gives almost the same answer every time"],
  ["KL divergence of an update", "how far an update moved the model, in nats per token"],
  ["candidate, proposal, reflection", "in a search for prompts: prompts that were scored; a text that a model proposed; the question to that model"],
  ["minibatch", "the few tasks on which a proposal is tried before it is scored on all"],
  ["chance", "probability that one of the candidates is as far ahead by luck alone"],
];

export function WordsPage() {
  return (
    <section>
      <Heading title="What the words mean" trail={[["runs", "/"]]} />
      <dl class="facts panel">
        {WORDS.flatMap(([word, meaning]) => [<dt key={word}>{word}</dt>, <dd key={`${word}:`}>{meaning}</dd>])}
      </dl>
    </section>
  );
}
