// A model call: why this advantage, which token was improbable, what it was compared with.
import { Fragment, h } from "../vendor/preact.js";
import { Strip } from "../charts.js";
import { useApi } from "../client.js";
import { Badge, Heading, MessageBox, Problems, Scroller, Waiting } from "../components.js";
import { apiPath } from "../filters.js";
import { fixed, num, percent, plural, pretty, shortId, signed, visible } from "../format.js";
import { useKeys } from "../keys.js";
import { go, path, useAddress, withQuery } from "../router.js";
export function CallPage(props) {
    const { place, rollout, call } = props;
    const [kind, name] = place;
    const asked = useApi(apiPath(place, "rollouts", rollout, "calls", call), place.join("/"));
    const back = path([kind, name, "rollouts", rollout]);
    useKeys({ Escape: () => go(back) });
    const { data } = asked;
    return (h("section", null,
        h(Heading, { title: data ? `Call of ${data.agent}` : "Call", trail: [
                [kind, "/"],
                [name, path([kind, name])],
                [`rollout ${shortId(rollout)}`, back],
            ] }),
        data ? (h(Fragment, null,
            h(Problems, { of: asked }),
            data.choices.map((choice) => (h(Choice, { key: choice.call.choice, place: place, choice: choice, isOnly: data.choices.length === 1 }))),
            h("h2", null, "What was asked"),
            data.overrides && h("p", { class: "small muted" },
                "sampling replaced (asked, used): ",
                visible(data.overrides)),
            data.prompt_applied && h("p", { class: "small muted" }, visible(data.prompt_applied)),
            data.input.map((message, n) => (h(MessageBox, { key: n, message: message, place: place }))),
            data.choices[0]?.prompt_text && (h("details", { class: "panel" },
                h("summary", null, "the prompt as the engine read it"),
                h("pre", { class: "code" }, visible(data.choices[0].prompt_text)))))) : (h(Waiting, { of: asked, what: "the call" }))));
}
function Choice(props) {
    const { choice } = props;
    const { call } = choice;
    return (h("section", { class: "panel" },
        h("div", { class: "row between" },
            h("span", { class: "row" },
                !props.isOnly && h("b", null,
                    "choice ",
                    call.choice),
                h(Badge, { name: call.replayed_from ? "replayed" : call.fate }),
                call.is_fork && h("span", { class: "muted" }, "the rollout forks here"),
                call.advantage !== null && (h("b", { class: call.advantage > 0 ? "big plus" : call.advantage < 0 ? "big minus" : "big" },
                    "advantage ",
                    signed(call.advantage, 3)))),
            h("span", { class: "small muted" }, [
                call.policy && call.policy !== "policy" && `policy ${call.policy}`,
                call.versions.length > 0 && `version ${call.versions.join(", ")}`,
                call.tokens !== null && plural(call.tokens, "token"),
                call.temperature !== null && `temperature ${num(call.temperature)}`,
            ]
                .filter(Boolean)
                .join(" · "))),
        call.fate === "recorded" && (h("p", { class: "muted" }, props.place[0] === "stores" ? "Recorded in production." : "Not trained: the run searches prompts.")),
        call.fate === "evaluation" && h("p", { class: "muted" }, "Not trained: it belongs to an evaluation."),
        call.replayed_from && (h("p", null,
            "Answered as in the rollout that this one repeats:",
            " ",
            h("a", { href: path([...props.place, "rollouts", call.replayed_from, "calls", call.call_id]) },
                "the call of rollout ",
                shortId(call.replayed_from)),
            " ",
            "has its texts and tokens.")),
        !call.replayed_from && (call.fate === "frozen" || call.fate === "rejected") && (h("p", null,
            "Not trained",
            call.reason && `: ${visible(call.reason)}`,
            ".",
            " ",
            call.fate === "frozen" && "The run trains other agents.")),
        choice.reasons && h(Why, { place: props.place, choice: choice, reasons: choice.reasons }),
        h("h3", null, "Answer"),
        choice.tokens.length > 0 ? (h(Tokens, { choice: choice })) : (choice.output.map((message, n) => h(MessageBox, { key: n, message: message, place: props.place }))),
        choice.grammar && (h("details", null,
            h("summary", null, "the answer was constrained"),
            h("pre", { class: "code" }, visible(pretty(choice.grammar)))))));
}
/** Say why the advantage is what it is, in a sentence, and show what it was compared with. */
function Why(props) {
    const { choice, reasons } = props;
    const values = choice.mates.flatMap((mate) => (mate.value === null ? [] : [mate.value]));
    const low = Math.min(0, ...values);
    const high = Math.max(1, ...values);
    return (h(Fragment, null,
        h("p", null, whyInWords(reasons, choice.call.advantage)),
        values.length > 1 && (h(Fragment, null,
            h(Strip, { mean: reasons.baseline, low: low, high: high, values: choice.mates.flatMap((mate) => mate.value === null
                    ? []
                    : [{ value: mate.value, title: `${num(mate.value)}${mate.is_this ? ", this rollout" : ""}`, isThis: mate.is_this }]) }),
            h("p", { class: "small row" }, choice.mates.map((mate) => (h("a", { key: mate.rollout_id, class: mate.is_this ? "strong" : "", href: path([...props.place, "rollouts", mate.rollout_id]), title: mate.rollout_id },
                fixed(mate.value),
                mate.is_this && " (this)")))))),
        h("details", { class: "small muted" },
            h("summary", null, "the formula"),
            visible(choice.call.why))));
}
/** Describe how an advantage was computed. */
export function whyInWords(reasons, advantage) {
    if (reasons.zero_reason) {
        return `The advantage is 0 (${reasons.zero_reason}), so this call teaches nothing in this step.`;
    }
    const expected = reasons.expected !== null;
    const compared = expected
        ? `The critic expected ${num(reasons.expected)} at this call`
        : `The ${plural(reasons.size, reasons.unit)} with which it is compared had ${num(reasons.baseline)} on average`;
    const parts = [`${compared}; this rollout's return was ${num(reasons.value)} and the call's credit ${num(reasons.credit)}`];
    if (reasons.shaping)
        parts.push(`of which intermediate rewards gave ${signed(reasons.shaping)}`);
    if (reasons.penalty)
        parts.push(`its length cost ${num(reasons.penalty)}`);
    const direction = advantage === null ? "" : advantage > 0 ? " Training makes this answer more probable." : advantage < 0 ? " Training makes this answer less probable." : "";
    return (`${parts.join(", ")}. Divided by ${num(reasons.scale)} that is an advantage of ${signed(advantage, 3)} ` +
        `(${reasons.estimator}).${direction} The call has ${percent(reasons.share)} of its rollout's weight, ` +
        `${plural(reasons.tokens, "token")}.`);
}
const COLOURS = [
    ["probability", "probability"],
    ["version", "policy version"],
    ["none", "plain"],
    ["table", "table"],
];
/** Show the sampled tokens, coloured by probability or by the version of the policy. */
function Tokens(props) {
    const { tokens, tokens_left_out } = props.choice;
    const address = useAddress();
    const by = address.searchParams.get("color") ?? "probability";
    const versions = [...new Set(tokens.map((token) => token.version))];
    const worst = tokens.reduce((lowest, token) => (token.logprob < lowest.logprob ? token : lowest), tokens[0]);
    return (h(Fragment, null,
        h("div", { class: "row between" },
            h("span", { class: "row", role: "group", "aria-label": "colour of tokens" }, COLOURS.map(([name, label]) => (h("button", { type: "button", key: name, class: "small", "aria-pressed": by === name, onClick: () => go(withQuery(address, { color: name === "probability" ? null : name }), true) }, label)))),
            h("span", { class: "small muted" },
                "least probable: ",
                worst.text ? JSON.stringify(visible(worst.text)) : `token ${worst.id}`,
                ", ",
                percent(Math.exp(worst.logprob)))),
        by === "table" && h(TokenTable, { tokens: tokens }),
        h("p", { class: "tokens", hidden: by === "table" }, tokens.map((token, n) => (h("span", { key: n, class: tokenClass(token, by, versions), title: tokenTitle(token) }, visible(token.text) || (token.text === "" ? `[${token.id}]` : ""))))),
        tokens_left_out > 0 && h("p", { class: "small muted" },
            plural(tokens_left_out, "further token"),
            " left out"),
        by === "probability" && (h("p", { class: "small muted legend" },
            h("span", { class: "p0" }, "below 1 %"),
            " ",
            h("span", { class: "p1" }, "below 10 %"),
            " ",
            h("span", { class: "p2" }, "below 50 %"),
            " ",
            h("span", null, "at least 50 %")))));
}
function TokenTable(props) {
    return (h(Scroller, { label: "tokens" },
        h("table", null,
            h("thead", null,
                h("tr", null,
                    h("th", { scope: "col" }, "text"),
                    h("th", { scope: "col", class: "number" }, "token id"),
                    h("th", { scope: "col", class: "number" }, "probability"),
                    h("th", { scope: "col", class: "number" }, "policy version"))),
            h("tbody", null, props.tokens.map((token, n) => (h("tr", { key: n },
                h("td", { class: "code" }, JSON.stringify(visible(token.text))),
                h("td", { class: "number" }, token.id),
                h("td", { class: "number" }, percent(Math.exp(token.logprob))),
                h("td", { class: "number" }, token.version))))))));
}
function tokenClass(token, by, versions) {
    if (by === "version")
        return `v${versions.indexOf(token.version) % 4}`;
    if (by !== "probability")
        return "";
    const probability = Math.exp(token.logprob);
    return probability < 0.01 ? "p0" : probability < 0.1 ? "p1" : probability < 0.5 ? "p2" : "";
}
function tokenTitle(token) {
    return `token ${token.id}: probability ${percent(Math.exp(token.logprob))}, log-probability ${num(token.logprob)}, version ${token.version}`;
}
