// The time of a step on a recorded device: bass_core/policies/costs.py in JavaScript.

/** Return a function from a step to seconds. record: a file of `CostModel.save`, such as costs_h200.json. */
export function recordedClock(record) {
  const { target_passes: target, draft_phases: draft, overheads } = record;
  const passes = table(target.seconds, target.batch, target.query_length, target.kv_length);
  const drafts = table(draft.seconds, draft.batch, draft.draft_length, draft.kv_length);
  const overhead = table(overheads.seconds, overheads.batch, overheads.draft_length);
  const padded = ["pad", "eager"].includes(record.models.target.attention); // to the longest row; else the mean counts

  /** lengths: cached tokens of each row before the target pass. k: longest draft. drafter: drafting takes passes. */
  return ({ lengths, k, drafter }) => {
    const rows = lengths.length, kv = padded ? Math.max(...lengths) : lengths.reduce((a, b) => a + b) / rows;
    return passes(rows, k + 1, kv) + (k && drafter ? drafts(rows, k, kv) : 0) + overhead(rows, k);
  };
}

/** Interpolate linearly in every dimension. Constant below the grid, linear beyond it, but never below its edge. */
function table(seconds, ...axes) {
  const value = (values, [cell, ...others], edge) => {
    if (!cell) return values;
    const weight = edge ? Math.min(cell.weight, 1) : cell.weight;
    const [low, high] = [cell.low, cell.low + 1].map((at) => value(values[at], others, edge));
    return low + weight * (high - low);
  };
  return (...point) => {
    const cells = point.map((x, dimension) => {
      const axis = axes[dimension], at = Math.max(x, axis[0]);
      const low = Math.min(axis.filter((each) => each <= at).length, axis.length - 1) - 1;
      return { low, weight: (at - axis[low]) / (axis[low + 1] - axis[low]) };
    });
    const beyond = cells.some(({ weight }) => weight > 1);
    return beyond ? Math.max(value(seconds, cells), value(seconds, cells, true)) : value(seconds, cells);
  };
}
