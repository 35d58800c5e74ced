// Write numbers, times and ids for people.

type Maybe<T> = T | null | undefined;

const DASH = "–";

function isMissing(value: Maybe<number>): value is null | undefined {
  return value === null || value === undefined || Number.isNaN(value);
}

/** Write a number with at most `digits` decimals; a small one as a power of ten, never as 0. */
export function num(value: Maybe<number>, digits = 3): string {
  if (isMissing(value)) return DASH;
  if (Math.abs(value) >= 1000) return withMinus(Math.round(value).toLocaleString("en"));
  if (value !== 0 && Math.abs(value) < 0.5 * 10 ** -digits) return withMinus(value.toExponential(1));
  return withMinus(String(Number(rounded(value, digits))));
}

/** Write a number with exactly `digits` decimals, so that a column of them lines up. */
export function fixed(value: Maybe<number>, digits = 2): string {
  if (isMissing(value)) return DASH;
  const isSmall = value !== 0 && Math.abs(value) < 0.5 * 10 ** -digits;
  return withMinus(isSmall ? value.toExponential(0) : rounded(value, digits));
}

function withMinus(text: string): string {
  return text.replace("-", "−");
}

/** Round as Python does, so that a page shows the number of `lightspan inspect`: a tie to even. */
function rounded(value: number, digits: number): string {
  const scaled = value * 10 ** digits;
  // only a multiple of a power of 2 lies exactly between two decimals
  const isTie = Math.abs(scaled % 1) === 0.5 && Number.isInteger(value * 2 ** (digits + 1));
  const even = 2 * Math.round(scaled / 2);
  return isTie ? (even / 10 ** digits).toFixed(digits) : value.toFixed(digits);
}

/** Write a number with its sign. */
export function signed(value: Maybe<number>, digits = 2): string {
  if (isMissing(value)) return DASH;
  const sign = value > 0 ? "+" : value < 0 ? "−" : "";
  return sign + fixed(Math.abs(value), digits);
}

export function percent(value: Maybe<number>): string {
  return isMissing(value) ? DASH : `${num(100 * value, 1)} %`;
}

export function plural(n: number, noun: string): string {
  return `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
}

/** Write a duration given in seconds. */
export function duration(seconds: Maybe<number>): string {
  if (isMissing(seconds)) return DASH;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 90) return `${num(seconds, 1)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${num(seconds / 3600, 1)} h`;
  return `${Math.round(seconds / 86_400)} days`;
}

/** Write how long ago a time was, given in seconds since the epoch. */
export function ago(time: Maybe<number>): string {
  if (isMissing(time)) return DASH;
  const seconds = Date.now() / 1000 - time;
  return seconds < 60 ? "just now" : `${duration(seconds)} ago`;
}

/** Write a time, given in seconds since the epoch, in the zone of the browser. */
export function clock(time: Maybe<number>): string {
  if (isMissing(time)) return DASH;
  const at = new Date(time * 1000);
  const pad = (n: number) => String(n).padStart(2, "0");
  const day = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
  return `${day} ${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
}

/** Return the end of a long id, by which people tell ids apart. */
export function shortId(id: string): string {
  return id.length <= 14 ? id : `…${id.slice(-8)}`;
}

/** Replace characters that change the order or the look of a text without being seen. */
export function visible(text: string): string {
  return text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

/** Write JSON with indents; other text stays as it is. */
export function pretty(text: string): string {
  try {
    const value: unknown = JSON.parse(text);
    return typeof value === "object" && value !== null ? JSON.stringify(value, null, 2) : text;
  } catch {
    return text;
  }
}
