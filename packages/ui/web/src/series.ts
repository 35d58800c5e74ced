// Curves of runs, from the answers of the API.

import type { EvaluationPoint, Point, RunSummary } from "./api.js";

/** Return the evaluations of a split as points with intervals. */
export function evaluationPoints(run: RunSummary, split: EvaluationPoint["split"]): Point[] {
  return run.evaluations.flatMap(({ step, split: of, reward }) =>
    of === split && reward.mean !== null ? [{ x: step, y: reward.mean, low: reward.low, high: reward.high }] : [],
  );
}
