"""Which tiers take part: the laws of `cascade.planner.chains`, by themselves and at work in virtual time."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from cascade.messages import Failed, Message
from cascade.params import MOST_BRANCHES, SamplingParams
from cascade.planner.chains import ALONE, Chain, Planner, Seen
from cascade.planner.cost import Profile
from cascade.planner.tuning import (
    EXPLORATION_SHARE,
    LOSS_MEMORY_S,
    MAX_READING_SHARE,
    MIN_PASSES,
    PREFILL_TOKENS,
    SCOUTS,
    SETTLING_PASSES,
)
from cascade.scorer import Scored
from cascade.session.session import Session, Work
from cascade.simulation.scenario import Death, Faults, Outcome, Request, Scenario, SimTier
from cascade.simulation.simulate import simulate
from cascade.simulation.toy_tier import ToyTier
from cascade.tier.drafting import FIRST_BACKOFF_S, Drafting, Progress
from cascade.tier.slot import Slot
from tests.cases import examples, rare
from tests.tier.test_tier import loop_of, opening
from tests.toys import pass_cost

ALLOWED: Chain = ("medium", "tiny")
CHAINS: tuple[Chain, ...] = (ALONE, ("tiny",), ("medium",), ALLOWED)
OVERSHOOT = 4  # passes alone that the last exploration may cost beyond its budget: tiers below go on when it ends
OVERSHOOT_S = 0.03  # the same where passes are short
PASS_S = 0.01


def paces(tiny: float, medium: float, both: float) -> dict[Chain, float]:
    """Rates of the chains, of which that of the full tier alone is 1."""
    return dict(zip(CHAINS, (1.0, tiny, medium, both), strict=True))


rates = st.builds(paces, *[st.floats(0.1, 3.0)] * 3)


def play(
    planner: Planner,
    speed: dict[Chain, float],
    passes: int,
    sessions: int = 1,
    pass_s: float = PASS_S,
    *,
    allowed: Chain = ALLOWED,
    sampled: bool = False,
) -> list[Chain]:
    """The chain of each of so many passes, of a token for each session in ``pass_s / speed`` seconds."""
    used = []
    for _ in range(passes):
        used.append(planner.chain(allowed, sessions, sampled=sampled))
        seen = Seen(sessions, sessions, sessions * pass_s / speed[used[-1]], pass_s)
        planner.record(allowed, used[-1], sessions, seen, sampled=sampled)
    return used


def seconds_of(used: list[Chain], speed: dict[Chain, float], pass_s: float = PASS_S) -> float:
    return sum(pass_s / speed[chain] for chain in used)


@settings(max_examples=examples(0.2))
@given(speed=rates, sessions=st.sampled_from([1, 3, 16]), shared=st.sampled_from([(), ALLOWED]))
def test_settles_on_the_fastest_chain(speed: dict[Chain, float], sessions: int, shared: Collection[str]) -> None:
    """Guards the choice itself: whatever is first, work is in the end done nearly as fast as by the fastest chain."""
    used = play(Planner(shared), speed, 8000, sessions)
    later = used[4000:]
    assert seconds_of(later, speed) < seconds_of(later, dict.fromkeys(CHAINS, max(speed.values()))) / 0.9


@given(
    speed=rates,
    sessions=st.sampled_from([1, 16]),
    pass_s=st.floats(0.001, 0.1),
    passes=st.integers(1, 2000),
    shared=st.sampled_from([(), ALLOWED]),
    text=st.sampled_from([1.0, 1.3]),
)
def test_exploring_has_a_budget(
    speed: dict[Chain, float], sessions: int, pass_s: float, passes: int, shared: Collection[str], text: float
) -> None:
    """Guards "never slower" at any time, not only in the long run: 2 %, and what the first few passes cost."""
    speed = {**speed, ALONE: text}
    used = play(Planner(shared), speed, passes, sessions, pass_s)
    slowest_s = pass_s / min(speed.values())
    overshoot_s = (0 if shared else MIN_PASSES) * slowest_s + 2 * slowest_s
    assert seconds_of(used, speed, pass_s) <= (1 + 1.5 * EXPLORATION_SHARE) * pass_s * len(used) + overshoot_s


def test_tiers_with_processors_of_their_own_draft_at_once() -> None:
    """Guards short answers: the first tokens of a cascade with a device for each tier were written by the full model alone."""
    speed = paces(1.5, 2.0, 3.0)
    assert play(Planner(), speed, 200).count(ALLOWED) > 190
    assert play(Planner(["tiny"]), speed, 20) == [("medium",)] * 20
    assert play(Planner(ALLOWED), speed, 20) == [ALONE] * 20


def test_the_first_passes_of_a_crowd_do_not_decide() -> None:
    """Guards crowds: their first twelve rows are three passes, which come before their drafters have read the prompts."""
    planner = Planner()
    cold, warm = (dict.fromkeys(CHAINS, rate) for rate in (0.95, 1.2))
    used = play(planner, cold, 3, 16) + play(planner, warm, 97, 16)
    assert set(used) == {ALLOWED}


def test_a_chain_that_is_cold_for_long_is_judged_in_the_end() -> None:
    """Guards drafters that read for a while on a shared processor: cut short each time at one price, they were never known."""
    planner, speed = Planner(ALLOWED), paces(0.5, 0.5, 2.0)
    cold = used = 0
    for _ in range(20_000):
        chain = planner.chain(ALLOWED, 1)
        used += chain == ALLOWED
        cold = cold + 1 if chain == ALLOWED else 0
        reads = 0 < cold <= 10
        rate = 0.2 if reads else speed[chain]
        planner.record(ALLOWED, chain, 1, Seen(1, 1, PASS_S / rate, PASS_S, settled=not reads))
    assert used > 4000


def test_what_drafting_has_spared_pays_for_a_first_try() -> None:
    """Guards short answers on one machine: a draft model that pays was not tried in the first 600 passes."""
    speed: dict[Chain, float] = {ALONE: 1.3, ("tiny",): 1.6}
    assert play(Planner(["tiny"]), speed, 150, allowed=("tiny",))[-50:] == [("tiny",)] * 50


def test_what_drafting_has_spared_pays_for_no_try_with_many_sessions() -> None:
    """Guards busy servers on one machine: what text drafters spared was spent on trying draft models at every load."""
    assert ("tiny",) not in play(Planner(["tiny"]), {ALONE: 1.3, ("tiny",): 0.5}, 150, sessions=32, allowed=("tiny",))


def test_no_kind_of_request_pays_for_another() -> None:
    """Guards sampled requests: what text drafters spared greedy ones was spent on tries with them."""
    planner, speed = Planner(["tiny"]), {ALONE: 1.3, ("tiny",): 0.5}
    play(planner, speed, 600, allowed=("tiny",))
    assert ("tiny",) not in play(planner, speed | {ALONE: 1.0}, 150, allowed=("tiny",), sampled=True)


def test_what_exploring_leaves_behind_is_paid_too() -> None:
    """Guards shared processors: tiers below still work when an exploration is over, and slow what is used then."""
    planner, speed = Planner(ALLOWED), paces(0.3, 0.6, 0.6)
    seconds = passes = 0.0
    left = 0
    for _ in range(5000):
        chain = planner.chain(ALLOWED, 1)
        left = SETTLING_PASSES if chain else left - 1
        slow = 1 / 3 if not chain and left >= 0 else speed[chain]
        planner.record(ALLOWED, chain, 1, Seen(1, 1, PASS_S / slow, PASS_S, settled=bool(chain) or left < 0))
        seconds, passes = seconds + PASS_S / slow, passes + 1
    assert seconds < 1.03 * PASS_S * passes


def test_follows_a_change() -> None:
    """Guards against a plan for ever: a chain that becomes the best one is found."""
    planner = Planner(ALLOWED)
    play(planner, paces(0.5, 1.5, 2.5), 4000)
    used = play(planner, paces(3.0, 0.7, 0.5), 2000)
    assert used[-100:].count(("tiny",)) >= 80


def test_kinds_and_loads_are_told_apart() -> None:
    """Guards sampled requests from what greedy ones gained, and those at night from the plan of the day."""
    planner = Planner()
    assert planner.undrafted(ALLOWED, 1) == "short"
    gains, loses = paces(0.5, 1.5, 2.5), paces(0.5, 0.5, 0.3)
    for _ in range(15):
        play(planner, gains, 20)
        play(planner, loses, 20, sampled=True)
        play(planner, loses, 20, sessions=64)
    assert planner.chain(ALLOWED, 1) == ALLOWED
    assert planner.chain(ALLOWED, 1, sampled=True) == ALONE
    assert planner.chain(ALLOWED, 64) == ALONE
    assert planner.undrafted(ALLOWED, 64) == "load"
    assert planner.undrafted(ALLOWED, 1, sampled=True) == "low_acceptance"


def test_a_new_load_begins_with_what_is_best_at_the_nearest() -> None:
    """Guards servers that fill up: what one session had found out was found out again with two, with three and with six."""
    speed = paces(3.0, 1.5, 0.5)
    planner = Planner()
    play(planner, speed, 3000)
    assert play(planner, speed, 100, sessions=6).count(("tiny",)) > 90
    shared = Planner(ALLOWED)
    play(shared, speed, 3000)
    used = play(shared, speed, 100, sessions=6)
    assert used[: MIN_PASSES // 4] == [ALONE] * (MIN_PASSES // 4)
    assert set(used) <= {ALONE, ("tiny",)}


@pytest.mark.parametrize("shared", [(), ALLOWED])
def test_what_lost_at_a_low_load_is_not_tried_at_a_higher_one(shared: Collection[str]) -> None:
    """Guards busy servers: what one request had shown to lose was tried again with eight and with 32, at the cost of all."""
    planner, loses, gains = Planner(shared), paces(0.5, 0.6, 0.4), paces(0.5, 1.5, 0.4)
    play(planner, loses, 3000)
    assert set(play(planner, loses, 3000, sessions=8)) == {ALONE}
    play(planner, gains, 3000)
    assert ("medium",) in play(planner, loses, 3000, sessions=8)


def test_what_lost_long_ago_is_tried_again() -> None:
    """Guards drafters that learn: what had once lost with one request was never tried again by a server that stayed busy."""
    planner = Planner(("tiny",))
    play(planner, {ALONE: 1.0, ("tiny",): 0.5}, 3000, allowed=("tiny",))
    seconds = LOSS_MEMORY_S / 3000
    assert ("tiny",) not in play(planner, {ALONE: 1.0, ("tiny",): 2.0}, 2900, 8, seconds, allowed=("tiny",))
    assert play(planner, {ALONE: 1.0, ("tiny",): 2.0}, 1000, 8, seconds, allowed=("tiny",))[-100:].count(("tiny",)) > 80


def test_what_was_too_dear_to_judge_is_tried_at_a_higher_load() -> None:
    """Guards drafters that read for long at first: a try that ended before their first guess counted as a loss."""
    planner, allowed = Planner(("tiny",)), ("tiny",)
    for _ in range(3000):
        chain = planner.chain(allowed, 1)
        planner.record(allowed, chain, 1, Seen(1, 1, PASS_S * (5 if chain else 1), PASS_S, settled=not chain))
    assert allowed in play(planner, {ALONE: 1.0, allowed: 2.0}, 3000, 8, allowed=allowed)


def test_hours_without_exploration_are_not_made_up_for() -> None:
    """Guards quiet hours after busy ones without exploration: one try followed another, and answers took 14 % longer."""
    planner, loses = Planner(ALLOWED), paces(0.85, 0.8, 0.7)
    play(planner, loses, 3000)
    assert set(play(planner, loses, 20_000, sessions=8)) == {ALONE}
    assert seconds_of(play(planner, loses, 2000), loses) < (1 + 3 * EXPLORATION_SHARE) * 2000 * PASS_S


def test_loads_that_were_met_learn_where_a_tier_runs() -> None:
    """Guards tiers that turn out to run elsewhere: a load that had been met went on without them, and its scouts as well."""
    planner, speed = Planner(ALLOWED), paces(0.5, 2.0, 0.5)
    assert play(planner, speed, 20, 16) == [ALONE] * 20
    planner.locate("medium", near=False)
    assert planner.chain(ALLOWED, 16) == ("medium",)
    assert play(planner, speed | {("medium",): 0.5}, 100, 16)[-50:] == [ALONE] * 50
    assert planner.chain(ALLOWED, 16, scouts=True) == ("medium",)
    planner.locate("medium", near=True)
    assert planner.chain(ALLOWED, 16, scouts=True) == ALONE
    planner.locate("medium", near=False)
    assert planner.chain(ALLOWED, 16) == ALONE, "what was tried is not begun with again"


def test_sessions_that_have_yet_to_follow_do_not_count_for_the_new_chain() -> None:
    """Guards the judgement: what comes of sessions that still use another chain says nothing about the one in use."""
    planner = Planner()
    for _ in range(10 * MIN_PASSES):
        planner.record(ALLOWED, ("tiny",), 1, Seen(1, 1, 100 * PASS_S, PASS_S))
    assert planner.chain(ALLOWED, 1) == ALLOWED
    assert planner.undrafted(ALLOWED, 1) == "short", "nothing is known"


def test_worth_compares_the_best_with_the_best_without() -> None:
    """Guards the panel: a tier is not praised for another one's gain, nor judged where nothing is known without it."""
    planner = Planner(ALLOWED)
    play(planner, {ALONE: 10.0, ("tiny",): 5.0, ("medium",): 15.0, ALLOWED: 20.0}, 8000)
    play(planner, {ALONE: 10.0, ("medium",): 30.0}, 2000, allowed=("medium",))
    play(planner, {ALONE: 10.0}, MIN_PASSES, sessions=2, sampled=True)
    worths = planner.worths()
    assert {one.drafter: one.factor for one in worths} == {"medium": pytest.approx(2.0), "tiny": pytest.approx(4 / 3)}
    assert {(one.sampled, one.num_sessions) for one in worths} == {(False, 1)}


@dataclass(frozen=True)
class Setting:
    """Three tiers, bottom to top."""

    full_s: float
    shares: tuple[float, float]  # of a full pass, that one of tiny, medium costs
    agreement: tuple[float, float]
    sessions: int
    devices: tuple[str, str, str]
    hop_s: float
    faults: Faults = field(default_factory=Faults)
    apart_s: float = 0.0  # between the arrivals of sessions
    branches: int = 0

    @property
    def pass_s(self) -> float:
        """Of the full tier, with a token of each session."""
        return self.full_s * (0.99 + 0.01 * self.sessions)

    def outcome(self, seconds: float, chosen: tuple[int, ...] = (0, 1, 2), *, adaptive: bool = False) -> Outcome:
        """As many tokens as the full tier alone, without batch mates, writes in so many ``seconds``."""
        costs = [pass_cost(self.full_s * share, self.full_s * share * 0.01) for share in (*self.shares, 1.0)]
        tiers = tuple(
            SimTier(
                ("tiny", "medium", "full")[i], ToyTier(64, self.agreement[i:]), costs[i], self.hop_s, device=self.devices[i]
            )
            for i in chosen
        )
        num_tokens = round(seconds / self.full_s)
        asked = [SamplingParams(max_tokens=num_tokens, temperature=0, seed=i) for i in range(self.sessions)]
        queue = tuple(Request(params=params, arrive_s=i * self.apart_s) for i, params in enumerate(asked))
        faults = self.faults if adaptive else Faults()
        return simulate(Scenario(tiers, queue, adaptive=adaptive, faults=faults, branches=self.branches))


SHARED = ("one", "one", "one")
troubles = [Faults(), Faults(deaths=(Death("tiny", 0.0),)), Faults(deaths=(Death("medium", 0.3, 2.0),)), Faults(loss=1.0)]
any_setting = st.builds(
    Setting,
    full_s=st.sampled_from([0.002, 0.005, 0.01, 0.03, 0.1]),
    shares=st.tuples(st.sampled_from([0.02, 0.2, 0.9]), st.sampled_from([0.07, 0.25, 1.0])),
    agreement=st.tuples(st.floats(0, 0.97), st.floats(0, 0.97)),
    sessions=st.sampled_from([1, 4]),
    devices=st.sampled_from([("", "", ""), ("one", "one", ""), SHARED]),
    hop_s=st.sampled_from([0.0001, 0.005]),
    faults=st.sampled_from(troubles),
    apart_s=st.sampled_from([0.0, 0.05]),
)


def never_slower(setting: Setting, seconds: float) -> Outcome:
    """No token comes later than exploration may cost beside the full tier alone; drafters with their own processors begin."""
    alone, adaptive = setting.outcome(seconds, (2,)), setting.outcome(seconds, adaptive=True)
    late_s = max(ours - (1 + EXPLORATION_SHARE) * theirs for ours, theirs in zip(adaptive.token_s, alone.token_s, strict=True))
    assert late_s <= (0 if setting.devices == SHARED else max(OVERSHOOT_S, OVERSHOOT * setting.pass_s))
    return adaptive


@settings(max_examples=2, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(any_setting)
@example(Setting(0.03, (0.2, 0.07), (0.26, 0.78), 16, SHARED, 0.0001))  # 0.11 of alone when the whole chain came first
@example(Setting(0.002, (0.02, 0.25), (0.68, 0.66), 4, SHARED, 0.0001))
@example(Setting(0.01, (0.2, 1.0), (0.06, 0.04), 1, SHARED, 0.001, troubles[3]))
@example(Setting(0.03, (0.9, 0.25), (0.85, 0.9), 16, SHARED, 0.005))
def test_never_slower_in_the_first_passes(setting: Setting) -> None:
    """Guards first answers on busy cores, which came at 0.7 of alone: tiers below were tried before there was time for it."""
    shared = setting.devices == SHARED
    outcome = never_slower(setting, (120 if shared else 60) * setting.full_s)
    assert not shared or not any(outcome.passes[:-1])


@pytest.mark.parametrize(("share", "agreement", "gain"), [(1 / 3, 0.9, 1.5), (0.2, 0.5, 1.1), (0.5, 0.7, 1.0)])
def test_tiers_on_one_device_take_turns(share: float, agreement: float, gain: float) -> None:
    """Guards pairs on the same cores: the tier below wrote while the one above computed, slowed it, and mostly in vain."""
    setting = Setting(0.1, (share, 1.0), (agreement, 1.0), 1, SHARED, 0.0002)
    alone, pair = (setting.outcome(20.0, chosen) for chosen in ((2,), (0, 2)))
    assert pair.texts == alone.texts
    assert alone.elapsed_s / pair.elapsed_s > gain


@pytest.mark.slow
@settings(max_examples=2, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(any_setting.map(lambda setting: replace(setting, sessions=1, devices=SHARED)))
@example(Setting(0.01, (0.2, 0.25), (0.16, 0.04), 1, SHARED, 0.0001))
@example(Setting(0.01, (0.9, 1.0), (0.26, 0.78), 1, SHARED, 0.005))
def test_never_slower_in_the_long_run(setting: Setting) -> None:
    """Guards the second promise where trials come back: each has its price, and waits for it."""
    never_slower(setting, 1300 * setting.full_s)


@pytest.mark.parametrize(
    ("full_s", "tiny", "medium", "agreement"),
    [
        (0.03, 0.07, 0.2, (0.93, 0.95)),
        rare(0.01, 0.07, 0.3, (0.9, 0.8)),
        rare(0.03, 0.02, 0.2, (0.7, 0.9)),
        rare(0.1, 0.07, 0.3, (0.8, 0.8)),
    ],
)
def test_what_pays_is_found(full_s: float, tiny: float, medium: float, agreement: tuple[float, float]) -> None:
    """Guards the first purpose: where each tier has a device, a first request gains, and later ones nearly all there is."""
    setting = Setting(full_s, (tiny, medium), agreement, 1, ("", "", ""), 0.0005, branches=MOST_BRANCHES)
    fixed = [setting.outcome(220 * full_s, chosen).token_s for chosen in [(1, 2), (0, 1, 2)]]
    found = setting.outcome(220 * full_s, adaptive=True).token_s
    assert found[127] < 0.85 * 128 * full_s
    assert found[-1] - found[128] < min(times[-1] - times[128] for times in fixed) / 0.95


def drafting(planner: Planner, num_sessions: int = 1) -> tuple[Drafting[None], list[Slot[None]], list[Message]]:
    """Sessions of the full tier that may use both of the tiers below and have just begun; what these were sent."""
    sent = list[Message]()
    found: Drafting[None] = Drafting(lambda tier, message: sent.append(message), planner)
    asked = opening(1, 0.0, 50, chain=ALLOWED, adaptive=True)
    slots: list[Slot[None]] = [Slot(Session(asked, "full", 2, 32), None, 0.0, 0.0) for _ in range(num_sessions)]
    for slot in slots:
        found.begin(slot, num_sessions, 0.0)
    return found, slots, sent


@pytest.mark.parametrize(("shared", "scouts"), [([], 2), (["tiny"], 2), (ALLOWED, 0)])
def test_some_sessions_go_on_drafting_where_that_is_free(shared: Sequence[str], scouts: int) -> None:
    """Guards tiers that were left: nobody saw that they had become good, but by trying them with all sessions."""
    planner = Planner(shared)
    play(planner, paces(0.5, 0.5, 0.7), 2 * MIN_PASSES, 16)
    _, slots, _ = drafting(planner, 2 * SCOUTS)
    apart = tuple(tier for tier in ALLOWED if tier not in shared)
    assert [slot.attached for slot in slots if slot.attached] == [apart] * scouts
    if not scouts:
        return
    for _ in range(3 * MIN_PASSES):
        planner.record(ALLOWED, apart, 16, Seen(scouts, 2 * scouts, scouts * PASS_S, PASS_S))
        play(planner, dict.fromkeys(CHAINS, 1.0), 1, 16 - scouts)
    assert planner.chain(ALLOWED, 16) == apart


@pytest.mark.parametrize(("num_rows", "num_left"), [(1, 32), (32, 0)])
def test_exploring_costs_all_sessions(num_rows: int, num_left: int) -> None:
    """Guards bursts: a try seemed to cost little while most sessions read, and nothing when all ended at once, and was made."""
    planner = Planner(ALLOWED)
    below, slots, sent = drafting(planner, 32)
    play(planner, dict.fromkeys(CHAINS, 1.0), 300, 32)  # pays for three passes
    rows = [Progress(slot, Work(50, [1], 1), 1, PASS_S) for slot in slots[:num_rows]]
    for _ in range(2 * MIN_PASSES):
        below.passed(slots[:num_left], 32, rows, Profile(((1, PASS_S),)), 0, 0.0)
    assert planner.chain(ALLOWED, 32) == ALONE
    assert not sent


def test_tiers_that_were_left_out_stand_in_for_one_that_died() -> None:
    """Guards degradation: the planner has chosen tiny alone, tiny dies, and medium, which is well, must not stand idle."""
    planner = Planner(ALLOWED)
    play(planner, paces(2.5, 0.5, 0.5), 2000)
    below, [slot], sent = drafting(planner)
    assert slot.attached == ("tiny",)
    assert below.receive(slot, Failed(slot.session.drafter_session, "died", "tiny"), 1.0) == ("tiny", "died")
    assert slot.attached == ALLOWED
    retry_at = below.draft(slot, 1.0)
    assert below.draft(slot, retry_at) is None
    assert slot.attached == ("tiny",)
    assert [type(message).__name__ for message in sent] == ["Open", "Close", "Open", "Close", "Open"]


def test_many_sessions_that_fail_at_once_are_one_failure() -> None:
    """Guards drafters: a replica of many sessions that went made its tier unused for eight seconds."""
    below, slots, _ = drafting(Planner(), 50)
    for now, wait_s in ((10.0, FIRST_BACKOFF_S), (11.0, 2 * FIRST_BACKOFF_S)):
        for slot in slots:
            assert below.draft(slot, now) is None
            assert slot.attached == ALLOWED
        for slot in slots:
            below.receive(slot, Failed(slot.session.drafter_session, "it is gone", "medium"), now)
        assert [slot.attached for slot in slots] == [("tiny",)] * len(slots)
        assert below.draft(slots[0], now) == now + wait_s


def test_who_was_not_told_of_turns_takes_none() -> None:
    """Guards clusters with a near and a far replica of a tier: a session at the far one did not rest, and was waited for."""
    planner = Planner(ALLOWED)
    planner.locate("medium", near=False)
    below, [slot], _ = drafting(planner)
    assert slot.attached == ("medium",)
    planner.locate("medium", near=True)
    assert not below.in_turns(slot)


class Heard(Planner):
    """Knows the last rate and the last price of reading that it was told of."""

    rate = reading_s = 0.0

    def record(self, allowed: Chain, used: Chain, num_sessions: int, seen: Seen, *, sampled: bool = False) -> None:
        self.rate, self.reading_s = seen.tokens / seen.seconds, seen.reading_s


@pytest.mark.parametrize("reading_s", [0.0, 0.02, 9.0])
def test_reading_for_others_says_nothing_of_who_drafts(reading_s: float) -> None:
    """Guards a crowd from how it began: passes that read 64 prompts made slow what was in use then, and only that."""
    planner, profile, now = Heard(ALLOWED), Profile([(1, PASS_S)]), 0.0
    down: list[Message] = []
    options = {"send_up": list.append, "send_down": lambda tier, message: down.append(message)}
    loop = loop_of("full", 2, profile=profile, planner=planner, **options)
    profile.token_s = reading_s / PREFILL_TOKENS
    for prompt_len in (1, PREFILL_TOKENS + 1):
        asked = opening(1, 0.0, 50, tokens=(1,) * prompt_len, prompt_len=prompt_len, adaptive=True)
        loop.receive(asked, [], now)
        batch, _ = loop.schedule(512, now)
        now += PASS_S + reading_s * (len(batch) - 1)
        loop.advance(batch, [Scored([7] * work.num_scored) for _, work in batch], now)
        loop.settle(now)
    left_s = max(PASS_S, (1 - MAX_READING_SHARE) * (PASS_S + reading_s))  # an estimate may be too long, no pass took no time
    assert planner.rate == pytest.approx(1 / left_s)
    held = sum(len(slot.session.text) for slot in loop.slots.values())  # a new drafter has to read all of it
    assert planner.reading_s == pytest.approx(profile.token_s * held)
    assert not down
