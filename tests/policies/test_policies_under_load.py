import numpy as np
import pytest

import bass_core as bass
from bass_lab.load import Poisson, Workload, over_rates, simulate
from bass_lab.measure.modelled_costs import measured_cpu, modelled_h100
from bass_lab.study.recorded_acceptance import AcceptanceTrace, shipped

CPU = measured_cpu()
H100 = modelled_h100()
PLACES = {"cpu": (CPU, 16), "h100": (H100, 64)}
SHARES = (0.06, 1.2)  # shares of the request rate that full batch slots serve without drafts
TOKENS = range(16, 129)
ASKED = Workload.draw(Poisson(1.0), 150, max_new_tokens=TOKENS, seed=1)


def under_load(trace, where, policies):
    cost, places = PLACES[where]
    served = places / cost.step(places, 0, 160) / np.mean(TOKENS)  # per second
    ways = {"none": 0, "default": bass.Goodput(cost)} | policies

    def run(rate, policy):
        return simulate(ASKED.at_rate(rate), trace, cost, draft_length=policy, max_batch_size=places)

    found = over_rates(run, ways, [share * served for share in SHARES])
    return found.pivot(index="rate", columns="policy")


@pytest.mark.ci
@pytest.mark.parametrize(("where", "texts"), [("cpu", "mini"), ("h100", "library")])
def test_default_policy_is_near_the_best_length(where, texts):
    lengths = {f"k={k}": k for k in (2, 5, 8)}
    found = under_load(shipped(texts).past_eos(), where, lengths)
    assert (found.over_none.default > 1.2).all()
    assert (found.tokens_per_s.default >= 0.98 * found.tokens_per_s.max(axis=1)).all()
    best = found.end_ms[["none", *lengths]].min(axis=1)
    assert (best / found.end_ms.default > 0.95).all()


@pytest.mark.parametrize(
    ("where", "alpha"),
    [pytest.param("cpu", 0.0, marks=pytest.mark.ci), pytest.param("h100", 0.3, marks=pytest.mark.slow)],
)
def test_bad_drafts_are_no_loss(where, alpha):
    trace = AcceptanceTrace.synthetic(alpha=alpha, length=128, sequences=64, prompt_length=100)
    found = under_load(trace, where, {"k=5": 5})
    assert (found.over_none.default >= 0.98).all()
    assert (found.tokens_per_s.default >= 0.98 * found.tokens_per_s.none).all()
    assert alpha > 0.1 or (found.over_none["k=5"] < 0.9).all()  # drafts could have slowed decoding down


def test_rows_count_alike_once_others_have_joined():
    """In a batch, rows that end last count most. In a session, no row's end ends the run."""

    def weights(steps):
        remaining, each = np.array([100, 10]), np.arange(2)
        view = bass.RowsView(each, np.array(steps), 200 - remaining, each * 0 + 1, remaining)
        policy.start(view)
        return policy.weigh(view, np.ones((2, 17))).tolist()

    policy = bass.Goodput(CPU)
    assert weights([0, 0])[1] < 0.01
    assert weights([3, 0]) == [1, 1]
    assert weights([0, 0])[1] < 0.01
