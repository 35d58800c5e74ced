// Made from views.py by make_types.py. Do not edit.

/** A mean with its 95 % confidence interval. */
export interface Estimate {
  mean: number | null;
  /** null if there are too few values for an interval; `high` likewise. */
  low: number | null;
  high: number | null;
  /** Number of values, or of clusters of correlated values. */
  n: number;
}

/** An evaluation of a run: the estimate of its mean reward at a step. */
export interface EvaluationPoint {
  step: number;
  split: "held-out" | "selection";
  reward: Estimate;
  failed: number;
  unscored: number;
  /** Number of rollouts that asked the policy nothing. */
  silent: number;
}

/** A warning about a run, with the setting to change in its text. */
export interface AlertView {
  name: string;
  step: number;
  text: string;
  /** Page of the documentation that explains it. */
  page: string;
}

/** A run in the list of runs. */
export interface RunSummary {
  name: string;
  state: "damaged" | "finished" | "running" | "silent" | "stopped";
  /** Why the run's folder cannot be read; the other fields are then empty. */
  error: string;
  algorithm: string;
  model: string;
  app: string;
  metric: string;
  optimize: string;
  /** Time at which the run began, in seconds since the epoch; null if unknown. */
  started: number | null;
  /** Time of the last change of the metrics, in seconds since the epoch; null without metrics. */
  changed: number | null;
  steps: number;
  planned: number | null;
  /** Mean training reward by step, averaged to at most 100 values. */
  rewards: (number | null)[];
  evaluations: EvaluationPoint[];
  /** Change from the first to the last held-out evaluation, paired by task; null if there are fewer than two. */
  gain: Estimate | null;
  alerts: AlertView[];
  /** Seconds until the run ends at its present pace; null unless it is running. */
  eta_s: number | null;
  /** Seconds that the training steps took. */
  seconds: number;
  cost: number | null;
  /** Whether the run learned or searched prompts. */
  has_prompts: boolean;
  /** Whether the run recorded rollouts; fine-tuning on messages records none. */
  has_rollouts: boolean;
}

/** A store that was named on the command line. */
export interface StoreSummary {
  name: string;
  /** URL of the store without its password. */
  url: string;
  /** Why the store cannot be read. */
  error: string;
  /** Status → number of rollouts. */
  rollouts: Record<string, number>;
}

/** Everything that the interface shows. */
export interface Places {
  runs: RunSummary[];
  stores: StoreSummary[];
  /** Whether rollouts may be rated. */
  write: boolean;
  /** Version of lightspan. */
  version: string;
}

/** What became of an agent's model calls. */
export interface AgentCoverage {
  path: string;
  /** Whether the agent's calls train a policy, or its prompt is searched. */
  learns: boolean;
  calls: number;
  trained: number;
  frozen: number;
  /** Number of calls in evaluations, which train nothing. */
  evaluation: number;
  /** Number of calls in a search for prompts, which trains no weights. */
  recorded: number;
  /** Reason → number of calls that were recorded and not trained, without evaluations. */
  rejected: Record<string, number>;
  /** Mean reward of the rollouts in which the agent acted; null if none of them is scored. */
  reward: number | null;
}

/** A run with its settings and the coverage of its calls. */
export interface RunDetail {
  summary: RunSummary;
  /** Dotted name → value of `config.json`. */
  settings: Record<string, string>;
  agents: AgentCoverage[];
  /** Number of rollouts whose calls are counted in `agents`. */
  coverage_of: number;
  /** Number of rollouts in the store. */
  rollouts: number;
  /** Which steps' rollouts are no longer stored; empty if all are. */
  pruned: string;
  /** Sampling parameter of the app → number of calls in which it was replaced. */
  overrides: Record<string, number>;
  /** Name of a judge or function → its mean reward. */
  scorers: Record<string, Estimate>;
  /** Names of the numbers in the training lines of `metrics.jsonl`. */
  metric_names: string[];
  /** The line that describes the result; empty while the run is incomplete. */
  result: string;
  /** Step whose weights were kept as the best by the selection split; null if the last were. */
  kept: number | null;
  /** Why the store of the run cannot be read. */
  error: string;
}

/** A point of a curve. */
export interface Point {
  x: number;
  y: number;
  low: number | null;
  high: number | null;
}

/** Curves of a run by step. */
export interface Metrics {
  /** Number of lines of `metrics.jsonl` that were read; pass it as `after` for newer ones. */
  lines: number;
  series: Record<string, Point[]>;
}

/** A setting that is not equal in all compared runs. */
export interface SettingDifference {
  name: string;
  /** Run → value; a run without the setting is left out. */
  values: Record<string, string>;
}

/** Difference of two runs' last held-out evaluations, paired by task. */
export interface PairDifference {
  first: string;
  second: string;
  /** Reward of `second` minus reward of `first`; null if they share no scored task. */
  difference: Estimate | null;
  /** The result in words, such as whether the difference is more than chance. */
  sentence: string;
}

/** Runs next to each other. */
export interface Comparison {
  runs: RunSummary[];
  settings: SettingDifference[];
  pairs: PairDifference[];
}

/** A rollout in a table. */
export interface RolloutRow {
  rollout_id: string;
  run_id: string;
  mode: string;
  /** Step that trained the rollout, or else the step that began it. */
  step: number;
  /** Id of the group of rollouts with which it is compared; empty if there is none. */
  group: string;
  task_id: string;
  status: string;
  /** Time in seconds since the epoch. */
  created: number;
  /** Id of the latest attempt; empty if no runner started one. */
  attempt_id: string;
  outcome: string;
  message: string;
  reward: number | null;
  dimensions: Record<string, number>;
  started: number | null;
  seconds: number | null;
  /** Number of errors in recording the attempt; a damaged attempt is not trained. */
  damaged: number;
  /** Id of the rollout that it repeats up to a call; empty if it is no fork. */
  fork_of: string;
  /** Id of the first call that it samples anew; empty if it is no fork, or repeats all calls. */
  fork_call: string;
  /** Whether someone gave feedback after the attempt; only known if `is_read`. */
  rated: boolean;
  /** Whether the fields below were read from the attempt's spans. */
  is_read: boolean;
  /** The beginning of the task. */
  task: string;
  /** The beginning of the first user message. */
  question: string;
  /** The beginning of the last answer of a model, with the tools that it calls. */
  answer: string;
  /** Path of an agent → number of its model calls. */
  agents: Record<string, number>;
  /** Tokens sampled by the models; null if no call has a count. */
  tokens: number | null;
  cost: number | null;
  user: string;
  session: string;
  tags: string[];
}

/** A page of a table of rollouts. */
export interface RolloutPage {
  rows: RolloutRow[];
  /** Number of rollouts that match the filters. */
  total: number;
  /** Pass it as `cursor` for the next page; empty on the last. */
  cursor: string;
  /** Change cursor of the store at which the page was made. */
  version: number;
  /** Number of attempts whose spans were read; filters by agent, user, session, tag, tokens and cost find only these. */
  read: number;
  /** Number of attempts whose spans can be read. `read` is lower while reading is under way. */
  readable: number;
  /** Whether a search for text has not reached the oldest attempt: its deadline was over, or the page was full. */
  is_partial: boolean;
}

/** A value of a filter with the number of rollouts that have it. */
export interface Count {
  name: string;
  n: number;
}

/** A bin of the histogram of rewards. */
export interface Bin {
  low: number;
  high: number;
  n: number;
}

/** Counts of the rollouts that match the filters, by each filter's values. The counts of a filter leave this filter out, so that another value can be chosen. `total`, `scored` and `mean` are of the rollouts that match all filters; the mean leaves out forks, which repeat other rollouts up to a call. */
export interface Facets {
  total: number;
  scored: number;
  mean: number | null;
  status: Count[];
  mode: Count[];
  outcome: Count[];
  /** Counts by run id, which is the service's name in production. */
  service: Count[];
  agent: Count[];
  user: Count[];
  session: Count[];
  tag: Count[];
  rated: Count[];
  rewards: Bin[];
  /** Whether a search for text has not reached the oldest attempt: there may be more of each. */
  is_partial: boolean;
}

/** A rollout of a group. */
export interface Member {
  rollout_id: string;
  reward: number | null;
  status: string;
}

/** A group of rollouts of one task, in a table. */
export interface GroupRow {
  group: string;
  task: string;
  task_id: string;
  mode: string;
  step: number;
  size: number;
  mean: number | null;
  /** Highest minus lowest reward; 0 teaches nothing. null if fewer than two are scored. */
  spread: number | null;
  /** Best first, unscored ones last; at most 200. */
  members: Member[];
}

/** A page of groups. */
export interface GroupPage {
  groups: GroupRow[];
  total: number;
  cursor: string;
  /** Whether a search for text has not reached the oldest attempt. */
  is_partial: boolean;
}

/** An answer of an agent in a rollout, for comparison with the other rollouts of the group. */
export interface Answer {
  call_id: string;
  choice: number;
  agent: string;
  text: string;
  fate: "evaluation" | "frozen" | "recorded" | "rejected" | "trained";
  reason: string;
  advantage: number | null;
}

/** A rollout of a group with its answers. */
export interface GroupRollout {
  row: RolloutRow;
  answers: Answer[];
}

/** One task's rollouts side by side, best first. */
export interface GroupDetail {
  group: string;
  task: string;
  mode: string;
  step: number;
  mean: number | null;
  spread: number | null;
  /** Paths of agents in the order of their first call. */
  agents: string[];
  rollouts: GroupRollout[];
}

/** An image of a message. `/{place}/images/{digest}` has its bytes, if the store has them. */
export interface MessageImage {
  digest: string;
  media_type: string;
  /** Number of bytes. */
  size: number;
}

/** A message of a conversation. */
export interface Message {
  role: string;
  text: string;
  thoughts: string;
  /** Calls of tools: name and arguments, as one text each. */
  tools: string[];
  /** The images that the text has as `[image]`, in order. */
  images: MessageImage[];
  is_cut: boolean;
}

/** A span of a rollout, in the order of its tree. */
export interface SpanRow {
  span_id: string;
  parent: string;
  depth: number;
  kind: string;
  name: string;
  status: string;
  /** Seconds after the first span started. */
  start: number;
  end: number;
  agent: string;
  /** Id of the model call, for spans of calls. */
  call_id: string;
  /** The error of a span that failed. */
  message: string;
  /** Value of a reward. */
  reward: number | null;
  input: Message[];
  output: Message[];
  /** Arguments of a tool. */
  arguments: string;
  /** Result of a tool, or the body of a message that the app emitted. */
  result: string;
  /** Whether it was recorded after the attempt ended. */
  is_late: boolean;
}

/** A span with its attributes, uncut. */
export interface SpanDetail {
  row: SpanRow;
  attributes: Record<string, string>;
}

/** A model call of a rollout with what became of it. */
export interface CallRow {
  call_id: string;
  choice: number;
  span_id: string;
  agent: string;
  fate: "evaluation" | "frozen" | "recorded" | "rejected" | "trained";
  /** Why the call was not trained; empty if it was. */
  reason: string;
  /** How the advantage was computed, in one line; empty if nothing was recorded. */
  why: string;
  advantage: number | null;
  policy: string;
  versions: number[];
  prompt_tokens: number | null;
  tokens: number | null;
  temperature: number | null;
  /** Id of the rollout that has the texts and tokens of a replayed call, under the same call id; empty for other calls. */
  replayed_from: string;
  /** Whether it is the first call that a fork sampled anew. */
  is_fork: boolean;
}

/** Feedback on an attempt or call that arrived after the attempt. */
export interface Rating {
  reward: number | null;
  comment: string;
  call_id: string;
  /** Time in seconds since the epoch. */
  at: number;
}

/** A link to the same trace in another program. */
export interface Link {
  name: string;
  url: string;
}

/** An attempt of a rollout. */
export interface AttemptRow {
  attempt_id: string;
  number: number;
  status: string;
  message: string;
}

/** A rollout with the spans of its latest attempt. */
export interface RolloutDetail {
  row: RolloutRow;
  /** The task as JSON. */
  task: string;
  /** Where the reward came from, such as the app's return value or a judge. */
  source: string;
  capture_errors: string[];
  notes: string[];
  attempts: AttemptRow[];
  /** Place among the scored rollouts of its group, from 1; null if unscored or alone. */
  rank: number | null;
  group_size: number;
  spans: SpanRow[];
  calls: CallRow[];
  ratings: Rating[];
  trace_id: string;
  links: Link[];
  /** Id of the rollout before this one in the list that the filters and `sort` of the request give, by default all rollouts with the newest first; empty if this is the first. */
  newer: string;
  /** Id of the rollout after this one in that list; empty if this is the last. */
  older: string;
}

/** A sampled token. */
export interface TokenView {
  id: number;
  /** Text of the token; several tokens may share a character, which the last of them shows. Empty without a tokenizer. */
  text: string;
  logprob: number;
  version: number;
}

/** A rollout with which a call's rollout was compared. */
export interface Mate {
  rollout_id: string;
  /** Return of the rollout. */
  value: number | null;
  is_this: boolean;
}

/** The numbers from which a call's advantage was computed (`lightning.advantages`). */
export interface Reasons {
  estimator: string;
  unit: string;
  credit_rule: string;
  weighting: string;
  value: number;
  credit: number;
  baseline: number;
  scale: number;
  size: number;
  share: number;
  tokens: number;
  token_weight: number;
  shaping: number | null;
  penalty: number | null;
  expected: number | null;
  zero_reason: string;
  turn: number;
}

/** A choice of a model call. */
export interface ChoiceDetail {
  call: CallRow;
  /** null if the call was not trained or nothing was recorded. */
  reasons: Reasons | null;
  mates: Mate[];
  output: Message[];
  /** Sampled tokens; empty if the record has none. At most 4,000. */
  tokens: TokenView[];
  tokens_left_out: number;
  /** The prompt as the engine read it; empty without a tokenizer or token ids. */
  prompt_text: string;
  /** What constrained the answer, such as a JSON schema; empty if nothing did. */
  grammar: string;
}

/** A model call. */
export interface CallDetail {
  rollout: RolloutRow;
  call_id: string;
  agent: string;
  input: Message[];
  /** Sampling parameters of the app that were replaced; empty if none was. */
  overrides: string;
  /** What became of the app's own prompt while prompts are learned. */
  prompt_applied: string;
  choices: ChoiceDetail[];
}

/** A candidate of a prompt search. */
export interface CandidateView {
  number: number;
  parents: number[];
  mean: number | null;
  /** Id of a task → reward. */
  scores: Record<string, number | null>;
  /** Id of a task → reward in a second run. */
  again: Record<string, number | null>;
  is_chosen: boolean;
  is_best: boolean;
  is_whole: boolean;
  rollouts: number;
  /** Names of prompts that differ from the parent's. */
  changed: string[];
  /** Name of a prompt → text. */
  texts: Record<string, string>;
}

/** A proposed text and what became of it. */
export interface ProposalView {
  prompt: string;
  parents: number[];
  text: string;
  before: number | null;
  after: number | null;
  tasks: number;
  /** Number of the candidate that it became; null if it was dropped. */
  candidate: number | null;
  /** Why it was dropped. */
  why: string;
}

/** A search for prompts; `candidates` grows while it runs. */
export interface SearchView {
  /** Empty for the only search of a run, else such as `step-3`. */
  name: string;
  is_running: boolean;
  candidates: CandidateView[];
  proposals: ProposalView[];
  /** Id of a task of the selection split → its beginning. */
  tasks: Record<string, string>;
  /** Whether the best is better than chance would give; empty while the search runs. */
  verdict: string;
  chance: number | null;
  ended: string;
  rollouts: number;
  reflections: number;
  tokens: number;
  cost: number | null;
  /** In how many calls a candidate's texts were sent, and why not in others. */
  texts: string;
}

/** A learned prompt next to its original text. */
export interface PromptView {
  name: string;
  before: string;
  after: string;
  is_changed: boolean;
}

/** What was learned about prompts. */
export interface Prompts {
  searches: SearchView[];
  prompts: PromptView[];
}

/** A rating, as a browser sends it. */
export interface FeedbackRequest {
  /** Id of an attempt or call. */
  id: string;
  reward: number;
  comment?: string;
}

/** The attempt or call that was rated. */
export interface Rated {
  attempt_id: string;
  /** Empty if the whole attempt was rated. */
  call_id: string;
  reward: number;
}

/** How to train on what matches the filters, as text to copy. */
export interface Export {
  /** Number of attempts of which the program takes a call. */
  attempts: number;
  /** Number of calls that the program takes. */
  calls: number;
  program: string;
  command: string;
  /** Program that learns from the ratings, good and bad ones; empty for a run. */
  preferences: string;
  /** Which filters are not applied, and how the counts or the command differ from the program; empty if nothing does. */
  note: string;
}

/** An error of the API. */
export interface Problem {
  error: string;
}
