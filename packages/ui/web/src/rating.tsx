// Rate an attempt: a number and a comment, which lightspan stores as feedback.

import { h } from "./vendor/preact.js";
import { useState } from "./vendor/hooks.js";
import type { Rated, Rating } from "./api.js";
import { post } from "./client.js";
import type { Place } from "./filters.js";
import { apiPath } from "./filters.js";
import { clock, fixed, shortId, visible } from "./format.js";
import { useKeys } from "./keys.js";

const RATINGS: readonly (readonly [string, number, string])[] = [
  ["bad", 0, "1"],
  ["fair", 0.5, "2"],
  ["good", 1, "3"],
];

/** Show the ratings, the last first, which counts; each with its own comment. */
export function Ratings(props: { ratings: readonly Rating[] }) {
  return (
    <div>
      {[...props.ratings].reverse().map((rating, n) => (
        <div key={`${rating.at} ${rating.call_id}`} class={n ? "small muted" : ""}>
          {fixed(rating.reward)} {rating.call_id && <span>on call {shortId(rating.call_id)} </span>}
          {rating.comment && `“${visible(rating.comment)}” `}
          <span class="small muted">
            {clock(rating.at)}
            {n > 0 && ", replaced"}
          </span>
        </div>
      ))}
    </div>
  );
}

export function RatingForm(props: { place: Place; id: string; ratings: readonly Rating[]; done: () => void }) {
  const [comment, setComment] = useState("");
  const [text, setText] = useState("");
  const [isBusy, setBusy] = useState(false);
  const last = props.ratings.filter((rating) => !rating.call_id).at(-1);
  const rate = async (reward: number) => {
    setBusy(true);
    try {
      const rated = await post<Rated>(apiPath(props.place, "feedback"), { id: props.id, reward, comment });
      setText(`rated ${fixed(rated.reward)}`);
      setComment("");
      props.done();
    } catch (error) {
      setText(`not rated: ${(error as Error).message}`);
    } finally {
      setBusy(false);
    }
  };
  useKeys(Object.fromEntries(RATINGS.map(([, reward, key]) => [key, () => void rate(reward)])));
  return (
    <form
      class="row panel"
      aria-label="rate this attempt"
      onSubmit={(event) => {
        event.preventDefault();
        if (!comment) return;
        if (last && last.reward !== null) void rate(last.reward); // Enter stores a comment with the last rating
        else setText("choose bad, fair or good: the comment is stored with it");
      }}
    >
      <span>How good was it?</span>
      {RATINGS.map(([name, reward, key]) => (
        <button
          key={name}
          type="button"
          disabled={isBusy}
          aria-pressed={last?.reward === reward}
          title={`key ${key}`}
          onClick={() => void rate(reward)}
        >
          {name} ({key})
        </button>
      ))}
      <input
        class="grow"
        aria-label="comment"
        placeholder="why (stored with the rating)"
        maxLength={2000}
        value={comment}
        onInput={(event) => setComment(event.currentTarget.value)}
      />
      <button type="submit" class="small" disabled={isBusy || !comment}>
        save the comment
      </button>
      <span role="status">{text || (last ? `last rating ${fixed(last.reward)}` : "not rated")}</span>
    </form>
  );
}
