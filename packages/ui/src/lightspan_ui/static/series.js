// Curves of runs, from the answers of the API.
/** Return the evaluations of a split as points with intervals. */
export function evaluationPoints(run, split) {
    return run.evaluations.flatMap(({ step, split: of, reward }) => of === split && reward.mean !== null ? [{ x: step, y: reward.mean, low: reward.low, high: reward.high }] : []);
}
