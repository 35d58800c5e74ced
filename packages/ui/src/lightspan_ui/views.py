"""Define the answers of the API (`/api/v1`), one struct per answer.

Every answer is built field by field, so that no call token, key or environment variable of a stored
record can reach a browser. `web/api.d.ts` is made from these structs. A number that is unknown is
None, never NaN. Texts are cut at `MAX_TEXT` characters; `SpanDetail` has the rest.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

MAX_TEXT: Final = 200_000
"""Maximum characters of a text in an answer, beyond which it is cut."""
MAX_ROWS: Final = 200
"""Maximum rows of a page."""
MAX_POINTS: Final = 1_000
"""Maximum points of a curve, beyond which it is averaged over neighbouring steps."""

RunState = Literal["running", "silent", "finished", "stopped", "damaged"]
"""`silent`: the trainer is not known to have ended, but has written nothing for minutes."""
Fate = Literal["trained", "frozen", "rejected", "evaluation", "recorded"]
"""What became of a call. `evaluation`: made in an evaluation, by an agent that learns. `recorded`:
made in production or in a search for prompts, which train no policy gradient."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or a part of one."""


class Estimate(View, frozen=True, kw_only=True):
    """A mean with its 95 % confidence interval."""

    mean: float | None
    low: float | None = None
    """None if there are too few values for an interval; `high` likewise."""
    high: float | None = None
    n: int = 0
    """Number of values, or of clusters of correlated values."""


class EvaluationPoint(View, frozen=True, kw_only=True):
    """An evaluation of a run: the estimate of its mean reward at a step."""

    step: int
    split: Literal["held-out", "selection"]
    reward: Estimate
    failed: int = 0
    unscored: int = 0
    silent: int = 0
    """Number of rollouts that asked the policy nothing."""


class AlertView(View, frozen=True, kw_only=True):
    """A warning about a run, with the setting to change in its text."""

    name: str
    step: int
    text: str
    page: str = ""
    """Page of the documentation that explains it."""


class RunSummary(View, frozen=True, kw_only=True):
    """A run in the list of runs."""

    name: str
    state: RunState
    error: str = ""
    """Why the run's folder cannot be read; the other fields are then empty."""
    algorithm: str = ""
    model: str = ""
    app: str = ""
    metric: str = "reward"
    optimize: str = ""
    started: float | None = None
    """Time at which the run began, in seconds since the epoch; None if unknown."""
    changed: float | None = None
    """Time of the last change of the metrics, in seconds since the epoch; None without metrics."""
    steps: int = 0
    planned: int | None = None
    rewards: list[float | None] = []
    """Mean training reward by step, averaged to at most 100 values."""
    evaluations: list[EvaluationPoint] = []
    gain: Estimate | None = None
    """Change from the first to the last held-out evaluation, paired by task; None if there are
    fewer than two."""
    alerts: list[AlertView] = []
    eta_s: float | None = None
    """Seconds until the run ends at its present pace; None unless it is running."""
    seconds: float = 0.0
    """Seconds that the training steps took."""
    cost: float | None = None
    has_prompts: bool = False
    """Whether the run learned or searched prompts."""
    has_rollouts: bool = True
    """Whether the run recorded rollouts; fine-tuning on messages records none."""


class StoreSummary(View, frozen=True, kw_only=True):
    """A store that was named on the command line."""

    name: str
    url: str
    """URL of the store without its password."""
    error: str = ""
    """Why the store cannot be read."""
    rollouts: dict[str, int] = {}
    """Status → number of rollouts."""


class Places(View, frozen=True, kw_only=True):
    """Everything that the interface shows."""

    runs: list[RunSummary]
    stores: list[StoreSummary]
    write: bool
    """Whether rollouts may be rated."""
    version: str
    """Version of lightspan."""


class AgentCoverage(View, frozen=True, kw_only=True):
    """What became of an agent's model calls."""

    path: str
    learns: bool
    """Whether the agent's calls train a policy, or its prompt is searched."""
    calls: int
    trained: int = 0
    frozen: int = 0
    evaluation: int = 0
    """Number of calls in evaluations, which train nothing."""
    recorded: int = 0
    """Number of calls in a search for prompts, which trains no weights."""
    rejected: dict[str, int] = {}
    """Reason → number of calls that were recorded and not trained, without evaluations."""
    reward: float | None = None
    """Mean reward of the rollouts in which the agent acted; None if none of them is scored."""


class RunDetail(View, frozen=True, kw_only=True):
    """A run with its settings and the coverage of its calls."""

    summary: RunSummary
    settings: dict[str, str]
    """Dotted name → value of `config.json`."""
    agents: list[AgentCoverage]
    coverage_of: int
    """Number of rollouts whose calls are counted in `agents`."""
    rollouts: int
    """Number of rollouts in the store."""
    pruned: str = ""
    """Which steps' rollouts are no longer stored; empty if all are."""
    overrides: dict[str, int] = {}
    """Sampling parameter of the app → number of calls in which it was replaced."""
    scorers: dict[str, Estimate] = {}
    """Name of a judge or function → its mean reward."""
    metric_names: list[str] = []
    """Names of the numbers in the training lines of `metrics.jsonl`."""
    result: str = ""
    """The line that describes the result; empty while the run is incomplete."""
    kept: int | None = None
    """Step whose weights were kept as the best by the selection split; None if the last were."""
    error: str = ""
    """Why the store of the run cannot be read."""


class Point(View, frozen=True, kw_only=True):
    """A point of a curve."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


class Metrics(View, frozen=True, kw_only=True):
    """Curves of a run by step."""

    lines: int
    """Number of lines of `metrics.jsonl` that were read; pass it as `after` for newer ones."""
    series: dict[str, list[Point]]


class SettingDifference(View, frozen=True, kw_only=True):
    """A setting that is not equal in all compared runs."""

    name: str
    values: dict[str, str]
    """Run → value; a run without the setting is left out."""


class PairDifference(View, frozen=True, kw_only=True):
    """Difference of two runs' last held-out evaluations, paired by task."""

    first: str
    second: str
    difference: Estimate | None
    """Reward of `second` minus reward of `first`; None if they share no scored task."""
    sentence: str
    """The result in words, such as whether the difference is more than chance."""


class Comparison(View, frozen=True, kw_only=True):
    """Runs next to each other."""

    runs: list[RunSummary]
    settings: list[SettingDifference]
    pairs: list[PairDifference]


class RolloutRow(View, frozen=True, kw_only=True):
    """A rollout in a table."""

    rollout_id: str
    run_id: str
    mode: str
    step: int
    """Step that trained the rollout, or else the step that began it."""
    group: str
    """Id of the group of rollouts with which it is compared; empty if there is none."""
    task_id: str
    status: str
    created: float
    """Time in seconds since the epoch."""
    attempt_id: str = ""
    """Id of the latest attempt; empty if no runner started one."""
    outcome: str = ""
    message: str = ""
    reward: float | None = None
    dimensions: dict[str, float] = {}
    started: float | None = None
    seconds: float | None = None
    damaged: int = 0
    """Number of errors in recording the attempt; a damaged attempt is not trained."""
    fork_of: str = ""
    """Id of the rollout that it repeats up to a call; empty if it is no fork."""
    fork_call: str = ""
    """Id of the first call that it samples anew; empty if it is no fork, or repeats all calls."""
    rated: bool = False
    """Whether someone gave feedback after the attempt; only known if `is_read`."""
    is_read: bool = False
    """Whether the fields below were read from the attempt's spans."""
    task: str = ""
    """The beginning of the task."""
    question: str = ""
    """The beginning of the first user message."""
    answer: str = ""
    """The beginning of the last answer of a model, with the tools that it calls."""
    agents: dict[str, int] = {}
    """Path of an agent → number of its model calls."""
    tokens: int | None = None
    """Tokens sampled by the models; None if no call has a count."""
    cost: float | None = None
    user: str = ""
    session: str = ""
    tags: list[str] = []


class RolloutPage(View, frozen=True, kw_only=True):
    """A page of a table of rollouts."""

    rows: list[RolloutRow]
    total: int
    """Number of rollouts that match the filters."""
    cursor: str = ""
    """Pass it as `cursor` for the next page; empty on the last."""
    version: int = 0
    """Change cursor of the store at which the page was made."""
    read: int = 0
    """Number of attempts whose spans were read; filters by agent, user, session, tag, tokens and
    cost find only these."""
    readable: int = 0
    """Number of attempts whose spans can be read. `read` is lower while reading is under way."""
    is_partial: bool = False
    """Whether a search for text has not reached the oldest attempt: its deadline was over, or the
    page was full."""


class Count(View, frozen=True, kw_only=True):
    """A value of a filter with the number of rollouts that have it."""

    name: str
    n: int


class Bin(View, frozen=True, kw_only=True):
    """A bin of the histogram of rewards."""

    low: float
    high: float
    n: int


class Facets(View, frozen=True, kw_only=True):
    """Counts of the rollouts that match the filters, by each filter's values.

    The counts of a filter leave this filter out, so that another value can be chosen. `total`,
    `scored` and `mean` are of the rollouts that match all filters; the mean leaves out forks, which
    repeat other rollouts up to a call.
    """

    total: int
    scored: int
    mean: float | None
    status: list[Count]
    mode: list[Count]
    outcome: list[Count]
    service: list[Count]
    """Counts by run id, which is the service's name in production."""
    agent: list[Count]
    user: list[Count]
    session: list[Count]
    tag: list[Count]
    rated: list[Count]
    rewards: list[Bin]
    is_partial: bool = False
    """Whether a search for text has not reached the oldest attempt: there may be more of each."""


class Member(View, frozen=True, kw_only=True):
    """A rollout of a group."""

    rollout_id: str
    reward: float | None
    status: str


class GroupRow(View, frozen=True, kw_only=True):
    """A group of rollouts of one task, in a table."""

    group: str
    task: str
    task_id: str
    mode: str
    step: int
    size: int
    mean: float | None
    spread: float | None
    """Highest minus lowest reward; 0 teaches nothing. None if fewer than two are scored."""
    members: list[Member]
    """Best first, unscored ones last; at most 200."""


class GroupPage(View, frozen=True, kw_only=True):
    """A page of groups."""

    groups: list[GroupRow]
    total: int
    cursor: str = ""
    is_partial: bool = False
    """Whether a search for text has not reached the oldest attempt."""


class Answer(View, frozen=True, kw_only=True):
    """An answer of an agent in a rollout, for comparison with the other rollouts of the group."""

    call_id: str
    choice: int
    agent: str
    text: str
    fate: Fate
    reason: str = ""
    advantage: float | None = None


class GroupRollout(View, frozen=True, kw_only=True):
    """A rollout of a group with its answers."""

    row: RolloutRow
    answers: list[Answer]


class GroupDetail(View, frozen=True, kw_only=True):
    """One task's rollouts side by side, best first."""

    group: str
    task: str
    mode: str
    step: int
    mean: float | None
    spread: float | None
    agents: list[str]
    """Paths of agents in the order of their first call."""
    rollouts: list[GroupRollout]


class MessageImage(View, frozen=True, kw_only=True):
    """An image of a message. `/{place}/images/{digest}` has its bytes, if the store has them."""

    digest: str
    media_type: str
    size: int
    """Number of bytes."""


class Message(View, frozen=True, kw_only=True):
    """A message of a conversation."""

    role: str
    text: str
    thoughts: str = ""
    tools: list[str] = []
    """Calls of tools: name and arguments, as one text each."""
    images: list[MessageImage] = []
    """The images that the text has as `[image]`, in order."""
    is_cut: bool = False


class SpanRow(View, frozen=True, kw_only=True):
    """A span of a rollout, in the order of its tree."""

    span_id: str
    parent: str = ""
    depth: int
    kind: str
    name: str
    status: str
    start: float
    """Seconds after the first span started."""
    end: float
    agent: str = ""
    call_id: str = ""
    """Id of the model call, for spans of calls."""
    message: str = ""
    """The error of a span that failed."""
    reward: float | None = None
    """Value of a reward."""
    input: list[Message] = []
    output: list[Message] = []
    arguments: str = ""
    """Arguments of a tool."""
    result: str = ""
    """Result of a tool, or the body of a message that the app emitted."""
    is_late: bool = False
    """Whether it was recorded after the attempt ended."""


class SpanDetail(View, frozen=True, kw_only=True):
    """A span with its attributes, uncut."""

    row: SpanRow
    attributes: dict[str, str]


class CallRow(View, frozen=True, kw_only=True):
    """A model call of a rollout with what became of it."""

    call_id: str
    choice: int
    span_id: str
    agent: str
    fate: Fate
    reason: str = ""
    """Why the call was not trained; empty if it was."""
    why: str = ""
    """How the advantage was computed, in one line; empty if nothing was recorded."""
    advantage: float | None = None
    policy: str = ""
    versions: list[int] = []
    prompt_tokens: int | None = None
    tokens: int | None = None
    temperature: float | None = None
    replayed_from: str = ""
    """Id of the rollout that has the texts and tokens of a replayed call, under the same call id;
    empty for other calls."""
    is_fork: bool = False
    """Whether it is the first call that a fork sampled anew."""


class Rating(View, frozen=True, kw_only=True):
    """Feedback on an attempt or call that arrived after the attempt."""

    reward: float | None
    comment: str = ""
    call_id: str = ""
    at: float = 0.0
    """Time in seconds since the epoch."""


class Link(View, frozen=True, kw_only=True):
    """A link to the same trace in another program."""

    name: str
    url: str


class AttemptRow(View, frozen=True, kw_only=True):
    """An attempt of a rollout."""

    attempt_id: str
    number: int
    status: str
    message: str = ""


class RolloutDetail(View, frozen=True, kw_only=True):
    """A rollout with the spans of its latest attempt."""

    row: RolloutRow
    task: str
    """The task as JSON."""
    source: str = ""
    """Where the reward came from, such as the app's return value or a judge."""
    capture_errors: list[str] = []
    notes: list[str] = []
    attempts: list[AttemptRow] = []
    rank: int | None = None
    """Place among the scored rollouts of its group, from 1; None if unscored or alone."""
    group_size: int = 0
    spans: list[SpanRow]
    calls: list[CallRow]
    ratings: list[Rating] = []
    trace_id: str = ""
    links: list[Link] = []
    newer: str = ""
    """Id of the rollout before this one in the list that the filters and `sort` of the request
    give, by default all rollouts with the newest first; empty if this is the first."""
    older: str = ""
    """Id of the rollout after this one in that list; empty if this is the last."""


class TokenView(View, frozen=True, kw_only=True):
    """A sampled token."""

    id: int
    text: str
    """Text of the token; several tokens may share a character, which the last of them shows. Empty
    without a tokenizer."""
    logprob: float
    version: int


class Mate(View, frozen=True, kw_only=True):
    """A rollout with which a call's rollout was compared."""

    rollout_id: str
    value: float | None
    """Return of the rollout."""
    is_this: bool = False


class Reasons(View, frozen=True, kw_only=True):
    """The numbers from which a call's advantage was computed (`lightning.advantages`)."""

    estimator: str
    unit: str
    credit_rule: str
    weighting: str
    value: float
    credit: float
    baseline: float
    scale: float
    size: int
    share: float
    tokens: int
    token_weight: float
    shaping: float | None = None
    penalty: float | None = None
    expected: float | None = None
    zero_reason: str = ""
    turn: int = 0


class ChoiceDetail(View, frozen=True, kw_only=True):
    """A choice of a model call."""

    call: CallRow
    reasons: Reasons | None
    """None if the call was not trained or nothing was recorded."""
    mates: list[Mate]
    output: list[Message]
    tokens: list[TokenView]
    """Sampled tokens; empty if the record has none. At most 4,000."""
    tokens_left_out: int = 0
    prompt_text: str = ""
    """The prompt as the engine read it; empty without a tokenizer or token ids."""
    grammar: str = ""
    """What constrained the answer, such as a JSON schema; empty if nothing did."""


class CallDetail(View, frozen=True, kw_only=True):
    """A model call."""

    rollout: RolloutRow
    call_id: str
    agent: str
    input: list[Message]
    overrides: str = ""
    """Sampling parameters of the app that were replaced; empty if none was."""
    prompt_applied: str = ""
    """What became of the app's own prompt while prompts are learned."""
    choices: list[ChoiceDetail]


class CandidateView(View, frozen=True, kw_only=True):
    """A candidate of a prompt search."""

    number: int
    parents: list[int]
    mean: float | None
    scores: dict[str, float | None]
    """Id of a task → reward."""
    again: dict[str, float | None] = {}
    """Id of a task → reward in a second run."""
    is_chosen: bool
    is_best: bool
    is_whole: bool
    rollouts: int
    changed: list[str]
    """Names of prompts that differ from the parent's."""
    texts: dict[str, str]
    """Name of a prompt → text."""


class ProposalView(View, frozen=True, kw_only=True):
    """A proposed text and what became of it."""

    prompt: str
    parents: list[int]
    text: str
    before: float | None
    after: float | None
    tasks: int
    candidate: int | None
    """Number of the candidate that it became; None if it was dropped."""
    why: str
    """Why it was dropped."""


class SearchView(View, frozen=True, kw_only=True):
    """A search for prompts; `candidates` grows while it runs."""

    name: str
    """Empty for the only search of a run, else such as `step-3`."""
    is_running: bool
    candidates: list[CandidateView]
    proposals: list[ProposalView]
    tasks: dict[str, str]
    """Id of a task of the selection split → its beginning."""
    verdict: str
    """Whether the best is better than chance would give; empty while the search runs."""
    chance: float | None
    ended: str
    rollouts: int
    reflections: int
    tokens: int
    cost: float | None
    texts: str
    """In how many calls a candidate's texts were sent, and why not in others."""


class PromptView(View, frozen=True, kw_only=True):
    """A learned prompt next to its original text."""

    name: str
    before: str
    after: str
    is_changed: bool


class Prompts(View, frozen=True, kw_only=True):
    """What was learned about prompts."""

    searches: list[SearchView]
    prompts: list[PromptView]


class FeedbackRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A rating, as a browser sends it."""

    id: str
    """Id of an attempt or call."""
    reward: float
    comment: str = ""


class Rated(View, frozen=True, kw_only=True):
    """The attempt or call that was rated."""

    attempt_id: str
    call_id: str
    """Empty if the whole attempt was rated."""
    reward: float


class Export(View, frozen=True, kw_only=True):
    """How to train on what matches the filters, as text to copy."""

    attempts: int
    """Number of attempts of which the program takes a call."""
    calls: int
    """Number of calls that the program takes."""
    program: str
    command: str
    preferences: str = ""
    """Program that learns from the ratings, good and bad ones; empty for a run."""
    note: str = ""
    """Which filters are not applied, and how the counts or the command differ from the program;
    empty if nothing does."""


class Problem(View, frozen=True, kw_only=True):
    """An error of the API."""

    error: str
