import pytest
import torch

from bass_core.exactness import randomness, verification

B, K, V = 4000, 3, 4
RULES = [verification.token, verification.block]


def batch(p, q, seed=0):
    """Return arguments of a rule: B rows with the same p [K + 1, V] and q [K, V], and drafts from q."""
    generator = torch.Generator().manual_seed(seed)
    drafted = torch.stack([torch.multinomial(q[k].expand(B, V), 1, generator=generator)[:, 0] for k in range(K)], 1)
    streams = torch.tensor([randomness.stream(seed, row) for row in range(B)])
    keys = randomness.StepKeys(streams, torch.ones(B, dtype=torch.int64), K)
    return drafted, torch.full((B,), K), q.expand(B, K, V), p.expand(B, K + 1, V), keys


@pytest.fixture(scope="module")
def laws():
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.rand(n, V, generator=generator).double().softmax(-1) ** 2 for n in (K + 1, K))
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def test_acceptance_rates(laws):
    """The first token's rate is one minus the total variation. Block verification accepts at least as much."""
    arguments = batch(*laws)
    token, block = verification.token(*arguments), verification.block(*arguments)
    assert block.accepted.double().mean() >= token.accepted.double().mean()
    expected = torch.minimum(laws[0][0], laws[1][0]).sum()
    assert abs((token.accepted > 0).double().mean() - expected) < 4 * (expected * (1 - expected) / B) ** 0.5


@pytest.mark.parametrize("rule", RULES)
def test_equal_distributions_accept_everything(rule, laws):
    p, _ = laws
    assert (rule(*batch(p, p[:K])).accepted == K).all()


@pytest.mark.parametrize("rule", RULES)
def test_values_beyond_a_rows_length_never_matter(rule, laws):
    drafted, _, q, p, keys = batch(*laws)
    lengths = torch.arange(B) % (K + 1)
    outcome = rule(drafted, lengths, q, p, keys)
    assert (outcome.accepted <= lengths).all()
    beyond = torch.arange(K + 1) > lengths[:, None]
    drafted, q = drafted.masked_fill(beyond[:, 1:], 0), q.masked_fill(beyond[:, 1:, None], torch.nan)
    garbage = rule(drafted, lengths, q, p.masked_fill(beyond[..., None], torch.nan), keys)
    assert torch.equal(outcome.accepted, garbage.accepted)
    assert torch.equal(outcome.next_token, garbage.next_token)


@pytest.mark.parametrize("rule", RULES)
def test_impossible_tokens_are_never_committed(rule):
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).expand(K + 1, V).double()
    q = torch.tensor([[0.1, 0.1, 0.4, 0.4]]).expand(K, V).double()
    drafted, *_ = arguments = batch(p, q)
    outcome = rule(*arguments)
    assert (outcome.next_token < 2).all()
    kept = torch.arange(K) < outcome.accepted[:, None]
    assert (drafted[kept] < 2).all()


def test_matching_takes_the_targets_own_choice():
    drafted = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 0, 7], [5, 6, 7]])
    choices = torch.tensor([[5, 6, 7, 8], [1, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    outcome = verification.matching(drafted, torch.tensor([3, 3, 3, 1]), choices)
    assert outcome.accepted.tolist() == [3, 0, 1, 1]
    assert outcome.next_token.tolist() == [8, 1, 6, 6]
