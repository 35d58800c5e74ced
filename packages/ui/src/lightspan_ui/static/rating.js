// Rate an attempt: a number and a comment, which lightspan stores as feedback.
import { h } from "./vendor/preact.js";
import { useState } from "./vendor/hooks.js";
import { post } from "./client.js";
import { apiPath } from "./filters.js";
import { clock, fixed, shortId, visible } from "./format.js";
import { useKeys } from "./keys.js";
const RATINGS = [
    ["bad", 0, "1"],
    ["fair", 0.5, "2"],
    ["good", 1, "3"],
];
/** Show the ratings, the last first, which counts; each with its own comment. */
export function Ratings(props) {
    return (h("div", null, [...props.ratings].reverse().map((rating, n) => (h("div", { key: `${rating.at} ${rating.call_id}`, class: n ? "small muted" : "" },
        fixed(rating.reward),
        " ",
        rating.call_id && h("span", null,
            "on call ",
            shortId(rating.call_id),
            " "),
        rating.comment && `“${visible(rating.comment)}” `,
        h("span", { class: "small muted" },
            clock(rating.at),
            n > 0 && ", replaced"))))));
}
export function RatingForm(props) {
    const [comment, setComment] = useState("");
    const [text, setText] = useState("");
    const [isBusy, setBusy] = useState(false);
    const last = props.ratings.filter((rating) => !rating.call_id).at(-1);
    const rate = async (reward) => {
        setBusy(true);
        try {
            const rated = await post(apiPath(props.place, "feedback"), { id: props.id, reward, comment });
            setText(`rated ${fixed(rated.reward)}`);
            setComment("");
            props.done();
        }
        catch (error) {
            setText(`not rated: ${error.message}`);
        }
        finally {
            setBusy(false);
        }
    };
    useKeys(Object.fromEntries(RATINGS.map(([, reward, key]) => [key, () => void rate(reward)])));
    return (h("form", { class: "row panel", "aria-label": "rate this attempt", onSubmit: (event) => {
            event.preventDefault();
            if (!comment)
                return;
            if (last && last.reward !== null)
                void rate(last.reward); // Enter stores a comment with the last rating
            else
                setText("choose bad, fair or good: the comment is stored with it");
        } },
        h("span", null, "How good was it?"),
        RATINGS.map(([name, reward, key]) => (h("button", { key: name, type: "button", disabled: isBusy, "aria-pressed": last?.reward === reward, title: `key ${key}`, onClick: () => void rate(reward) },
            name,
            " (",
            key,
            ")"))),
        h("input", { class: "grow", "aria-label": "comment", placeholder: "why (stored with the rating)", maxLength: 2000, value: comment, onInput: (event) => setComment(event.currentTarget.value) }),
        h("button", { type: "submit", class: "small", disabled: isBusy || !comment }, "save the comment"),
        h("span", { role: "status" }, text || (last ? `last rating ${fixed(last.reward)}` : "not rated"))));
}
