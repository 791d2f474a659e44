"""Which tiers take part: the laws of `cascade.chain.planner.Planner`, alone and at work in virtual time."""

import itertools
from dataclasses import dataclass, replace

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from cascade.chain.drafting import MOST_READING, SETTLING, Drafting
from cascade.chain.kv_admission import KVAdmission
from cascade.chain.loop import Limits, Loop
from cascade.chain.plan import ALONE, GLANCE, HEAD_START_S, PRICE_S, REST, SHARE, TRIAL, Chain, Course, Seen
from cascade.chain.planner import Planner
from cascade.chain.policy import Policy
from cascade.chain.profile import CHUNK, PassCost, Profile
from cascade.chain.runner import Runner
from cascade.chain.session import Session
from cascade.chain.slot import Slot
from cascade.chain.work import Work
from cascade.messages import Failed, Message
from cascade.params import MOST_BRANCHES, SamplingParams
from cascade.simulation.forecast import Bench, TierCost
from cascade.simulation.scenario import NO_FAULTS, Death, Faults, Outcome, Request, Scenario, SimTier
from cascade.simulation.simulate import simulate
from cascade.simulation.toy import ToyModel
from cascade.simulation.trace import Acceptance, Trace, TraceModel
from tests.cases import rare
from tests.chain.test_tier import opening

ALLOWED: Chain = ("medium", "tiny")
LINES = Course(ALLOWED)
CHAINS: tuple[Chain, ...] = ((), ("tiny",), ("medium",), ALLOWED)  # in the order in which they are tried first
FULL_S = 0.045
PASS_S = 0.01
OVERSHOOT = 4  # passes alone that a trial may cost beyond its price: passes end when they end, and tiers below go on
OVERSHOOT_S = 0.03  # the same where passes are short
rates = st.tuples(*[st.floats(0.1, 3.0)] * 3).map(lambda others: dict(zip(CHAINS, (1.0, *others), strict=True)))


def play(planner: Planner, speed: dict[Chain, float], passes: int, sessions: int = 1, pass_s: float = PASS_S) -> list[Chain]:
    """The chain of each of so many passes, of a token for each session in ``pass_s / speed`` seconds."""
    courses = {Course(chain): rate for chain, rate in speed.items()}
    return [course.tiers for course in follow(planner, LINES, courses, passes, sessions, pass_s)]


def follow(
    planner: Planner,
    allowed: Course,
    speed: dict[Course, float],
    passes: int,
    sessions: int = 1,
    pass_s: float = PASS_S,
    *,
    sampled: bool = False,
) -> list[Course]:
    """The course of each of so many passes, of a token for each session in ``pass_s / speed`` seconds."""
    used = []
    for _ in range(passes):
        used.append(planner.course(allowed, sessions, sampled=sampled))
        seen = Seen(sessions, sessions, sessions * pass_s / speed[used[-1]])
        planner.saw(allowed, used[-1], sessions, seen, sampled=sampled)
    return used


def seconds_of(used: list[Chain], speed: dict[Chain, float], pass_s: float = PASS_S) -> float:
    return sum(pass_s / speed[chain] for chain in used)


@given(speed=rates, sessions=st.sampled_from([1, 3, 16]))
def test_settles_on_the_fastest_chain(speed: dict[Chain, float], sessions: int) -> None:
    """Guards the choice itself: whatever the order of the chains, work is soon done about as fast as by the fastest."""
    used = play(Planner(), speed, 20 * REST, sessions)
    assert set(used) == set(CHAINS)
    later = used[10 * REST :]
    assert seconds_of(later, speed) < seconds_of(later, dict.fromkeys(CHAINS, max(speed.values()))) / 0.85


@given(speed=rates, sessions=st.sampled_from([1, 16]), pass_s=st.floats(0.001, 0.1), num_passes=st.integers(1, 600))
def test_trials_are_paid_from_a_purse(speed: dict[Chain, float], sessions: int, pass_s: float, num_passes: int) -> None:
    """Guards "never slower", from the first second on: what trials lose is bounded at any time, not only in the long run."""
    used = play(Planner(), speed, num_passes, sessions, pass_s)
    alone_s, seconds = pass_s * len(used), seconds_of(used, speed, pass_s)
    slowest_s = pass_s / min(speed.values())
    assert used[:GLANCE] == [()] * min(GLANCE, len(used))
    price_s = max(2 * PRICE_S, 2 * pass_s)  # of the last one, which the purse need not hold all of
    assert seconds - alone_s <= HEAD_START_S + 2 * SHARE * seconds + price_s + slowest_s


def test_small_chains_are_tried_first() -> None:
    """Guards the first seconds: the whole chain, which slows a shared processor most, is not where a tier begins."""
    used = play(Planner(), dict.fromkeys(CHAINS, 1.0), 16 * (GLANCE + TRIAL))
    assert tuple(dict.fromkeys(used)) == CHAINS


def test_a_chain_that_pays_is_in_use_at_once() -> None:
    """Guards gains: a trial that goes well is not cut short, and the best of three has been found within a request."""
    used = play(Planner(), dict(zip(CHAINS, (1.0, 1.5, 2.0, 3.0), strict=True)), 128)
    assert used[64:].count(ALLOWED) > 50


def test_a_chain_that_is_cold_for_long_is_judged_in_the_end() -> None:
    """Guards drafters that read for a while on a shared processor: cut short each time at one price, they were never known."""
    planner, speed = Planner(), dict(zip(CHAINS, (1.0, 0.5, 0.5, 2.0), strict=True))
    cold = 0
    for _ in range(200 * REST):
        chain = planner.course(LINES, 1).tiers
        cold = cold + 1 if chain == ALLOWED else 0
        reads = 0 < cold <= 10
        rate = 0.2 if reads else speed[chain]
        planner.saw(LINES, Course(chain), 1, Seen(1, 1, PASS_S / rate, settled=not reads))
    assert cold > REST


def test_what_a_trial_leaves_behind_is_not_held_against_others() -> None:
    """Guards shared processors: tiers below still work when a trial is over, and that slowed what was in use."""
    planner, speed = Planner(), dict(zip(CHAINS, (1.0, 0.3, 0.6, 0.6), strict=True))
    play(planner, speed, GLANCE)
    while planner.course(LINES, 1).tiers:
        play(planner, speed, 1)
    for _ in range(SETTLING):
        planner.saw(LINES, ALONE, 1, Seen(1, 1, 3 * PASS_S, settled=False))
    used = play(planner, speed, 50)
    assert used.count(()) == 50, "the debt is paid first"
    assert play(planner, speed, 30 * REST).count(()) > 28 * REST


def test_follows_a_change() -> None:
    """Guards against a plan for ever: a chain that becomes the best one is found."""
    planner = Planner()
    play(planner, dict(zip(CHAINS, (1.0, 0.5, 1.5, 2.5), strict=True)), 500)
    used = play(planner, dict(zip(CHAINS, (1.0, 3.0, 0.7, 0.5), strict=True)), 12 * REST)
    assert used[-REST:].count(("tiny",)) >= REST - 2 * TRIAL


@pytest.mark.parametrize("sessions", [1, 16])
@pytest.mark.parametrize(("rate", "drafts"), [(0.9, False), (1.1, True)])
def test_drafters_inside_take_part_where_they_pay(rate: float, sessions: int, *, drafts: bool) -> None:
    """Guards a crowd: guesses that nobody has to wait for took more time between passes than they saved, and stayed."""
    inside = Course(drafters=True)
    used = follow(Planner(), inside, {ALONE: 1.0, inside: rate}, 30 * REST, sessions)
    assert used[:GLANCE] == [ALONE] * GLANCE
    assert used[GLANCE] == inside, "they need nothing but the text: they are asked first"
    assert used[10 * REST :].count(inside if drafts else ALONE) > 19 * REST, "who lost is asked less and less"


def test_drafters_inside_are_kept_through_silence() -> None:
    """Guards text that repeats now and then: between two bursts its drafters were given up, and missed half of the next."""
    planner, used, inside = Planner(), list[Course](), Course(drafters=True)
    for _ in range(30):
        used += follow(planner, inside, {ALONE: 1.0, inside: 0.98}, 150)
        used += follow(planner, inside, {ALONE: 1.0, inside: 2.0}, 20)
    assert used[1000:].count(inside) > 0.9 * len(used[1000:])


def test_drafters_inside_are_asked_once_whatever_the_purse_holds() -> None:
    """Guards the first sampled text behind greedy ones, whose trials had emptied the purse: it was written alone to its end."""
    planner, both, inside = Planner(), Course(ALLOWED, drafters=True), Course(drafters=True)
    courses = {ALONE: 1.0, inside: 1.2} | {Course(chain, drafters=True): 0.05 for chain in CHAINS[1:]}
    used = follow(planner, both, courses, 30)
    assert len(set(used)) > 2, "a dear chain was tried"
    used = follow(planner, both, courses, 2 * REST, sampled=True)
    assert used[: GLANCE + 1] == [*[ALONE] * GLANCE, inside]
    assert used[GLANCE:].count(inside) == len(used) - GLANCE


def test_a_chain_is_tried_without_the_drafters_inside() -> None:
    """Guards a tier below whose guesses are better than those of drafters, which only make passes longer."""
    lonely = Course(("tiny",))
    inside, both = Course(drafters=True), Course(("tiny",), drafters=True)
    used = follow(Planner(), both, {ALONE: 1.0, inside: 0.9, both: 1.5, lonely: 2.0}, 20 * REST)
    assert used[-REST:].count(lonely) > REST - TRIAL


def test_a_crowd_is_held_against_what_the_tier_gives_alone_now() -> None:
    """Guards a crowd from an old rate: alone was measured while prompts were read, and a chain that is slower stayed."""
    planner, reading = Planner(), dict(zip(CHAINS, (0.3, 0.6, 0.6, 0.6), strict=True))
    used = play(planner, reading, 4 * REST, sessions=64)
    assert used[-REST:].count(()) < REST // 2, "a chain is in use"
    used = play(planner, reading | {(): 1.0}, 8 * REST, sessions=64)
    assert used[-REST:].count(()) > REST // 2


def test_chains_that_lose_stay_rare_while_others_take_turns() -> None:
    """Guards a crowd whose drafters inside pay now and then: each time all chains were tried anew, at 200 ms a trial."""
    planner, used, inside = Planner(), list[Course](), Course(drafters=True)
    chains = {Course(chain, drafters=True): 0.5 for chain in CHAINS[1:]}
    for turn in range(24):
        rates = {ALONE: 1.0, inside: (0.7, 1.4)[turn % 2]} | chains
        used += follow(planner, Course(ALLOWED, drafters=True), rates, 8 * REST, sessions=64)
    turns = sum(before != after for before, after in itertools.pairwise(course for course in used if not course.tiers))
    assert turns > 12, "they take turns"
    half = used[len(used) // 2 :]
    assert sum(bool(course.tiers) for course in half) < len(half) // 100


def test_greedy_and_sampled_texts_are_told_apart() -> None:
    """Guards sampled requests from what greedy ones gained: each kind has a plan of its own, from alone on."""
    planner, inside = Planner(), Course(drafters=True)
    used = follow(planner, inside, {ALONE: 1.0, inside: 2.0}, 4 * REST)
    assert used[-REST:].count(inside) > REST // 2
    assert planner.course(inside, 1, sampled=True) == ALONE


def test_loads_are_told_apart() -> None:
    """Guards requests at night from the plan of the day: many sessions go alone, and one of them does not."""
    planner = Planner()
    play(planner, dict(zip(CHAINS, (1.0, 0.5, 1.5, 2.5), strict=True)), 300, sessions=1)
    play(planner, dict(zip(CHAINS, (1.0, 0.5, 0.5, 0.3), strict=True)), 300, sessions=64)
    assert planner.course(LINES, 1).tiers == ALLOWED
    assert planner.course(LINES, 64).tiers == ()
    assert planner.spared(LINES, 64) == "load"
    assert planner.spared(LINES, 1) == "low_acceptance"
    assert Planner().spared(LINES, 1) == "short"


@pytest.mark.parametrize(("better", "chosen"), [(2.5, ALLOWED), (0.2, ())])
def test_a_new_load_asks_one_question(better: float, chosen: Chain) -> None:
    """Guards busy servers: with more sessions than ever, one chain is tried, that of the nearest load, and let go."""
    planner = Planner()
    play(planner, dict(zip(CHAINS, (1.0, 0.5, 1.5, 2.5), strict=True)), 200)
    speed = dict(zip(CHAINS, (0.3, 0.1, 0.2, 0.3 * better), strict=True))
    used = play(planner, speed, 60, sessions=16)
    assert used[:GLANCE] == [()] * GLANCE
    assert set(used[:20]) == {(), ALLOWED}
    assert used[-1] == chosen
    lost = seconds_of(used, speed) - PASS_S / 0.3 * len(used)
    assert lost < 8 * PASS_S / 0.3


def test_sessions_that_have_yet_to_follow_do_not_count_for_the_new_chain() -> None:
    """Guards trials: what comes of sessions that still use another chain says nothing about the one on trial."""
    planner = Planner()
    play(planner, dict.fromkeys(CHAINS, 1.0), GLANCE)
    tried = planner.course(LINES, 1).tiers
    assert tried
    for _ in range(10 * TRIAL):
        planner.saw(LINES, ALONE, 1, Seen(1, 1, PASS_S))
    assert planner.course(LINES, 1).tiers == tried
    planner.saw(LINES, Course(tried), 1, Seen(1, 1, 10 * PASS_S))
    assert planner.course(LINES, 1).tiers == ()


@dataclass(frozen=True)
class Setting:
    """Three tiers, bottom to top."""

    full_s: float
    shares: tuple[float, float]  # of a full pass, that one of tiny, medium costs
    agreement: tuple[float, float]
    sessions: int
    devices: tuple[str, str, str]
    hop_s: float
    faults: Faults = NO_FAULTS
    apart_s: float = 0.0  # between the arrivals of sessions

    def outcome(self, seconds: float, chosen: tuple[int, ...] = (0, 1, 2), *, adaptive: bool = False) -> Outcome:
        """As many tokens as the full tier alone, without batch mates, writes in so many ``seconds``."""
        trace = Trace.drawn(Acceptance(self.agreement), 2000, burst=0.3).only(chosen)
        costs = [PassCost(self.full_s * share, self.full_s * share * 0.01) for share in (*self.shares, 1.0)]
        tiers = tuple(
            SimTier(("tiny", "medium", "full")[i], TraceModel(trace, k), costs[i], self.hop_s, device=self.devices[i])
            for k, i in enumerate(chosen)
        )
        num_tokens = round(seconds / self.full_s)
        asked = [SamplingParams(max_tokens=num_tokens, temperature=0, seed=i) for i in range(self.sessions)]
        queue = tuple(Request(params=params, arrive_s=i * self.apart_s) for i, params in enumerate(asked))
        return simulate(Scenario(tiers, queue, adaptive=adaptive, faults=self.faults if adaptive else NO_FAULTS))


SHARED = ("one", "one", "one")
troubles = [NO_FAULTS, Faults(deaths=(Death("tiny", 0.0),)), Faults(deaths=(Death("medium", 0.3, 2.0),)), Faults(loss=1.0)]
any_setting = st.builds(
    Setting,
    full_s=st.sampled_from([0.002, 0.005, 0.01, 0.03, 0.1]),
    shares=st.tuples(st.sampled_from([0.02, 0.2, 0.9]), st.sampled_from([0.07, 0.25, 1.0])),
    agreement=st.tuples(st.floats(0, 0.97), st.floats(0, 0.97)),
    sessions=st.sampled_from([1, 4, 16]),
    devices=st.sampled_from([("", "", ""), ("one", "one", ""), SHARED]),
    hop_s=st.sampled_from([0.0001, 0.005]),
    faults=st.sampled_from(troubles),
    apart_s=st.sampled_from([0.0, 0.05]),
)


@settings(max_examples=12, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(any_setting)
@example(Setting(0.03, (0.2, 0.07), (0.26, 0.78), 16, SHARED, 0.0001))  # 0.11 of alone when the whole chain came first
@example(Setting(0.002, (0.02, 0.25), (0.68, 0.66), 4, SHARED, 0.0001))
@example(Setting(0.01, (0.2, 1.0), (0.06, 0.04), 1, SHARED, 0.001, troubles[3]))
@example(Setting(0.03, (0.9, 0.25), (0.85, 0.9), 16, SHARED, 0.005))
def test_never_slower_in_the_first_second(setting: Setting) -> None:
    """Guards the second promise where nothing is known yet: 5 % of a second, or what a few passes cost, and no more."""
    alone, adaptive = setting.outcome(1.0, (2,)), setting.outcome(1.0, adaptive=True)
    assert adaptive.elapsed_s <= 1.05 * alone.elapsed_s + max(OVERSHOOT_S, OVERSHOOT * alone.elapsed_s * setting.full_s)


@settings(max_examples=4, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(any_setting.filter(lambda setting: setting.sessions * 0.01 <= 4 * setting.full_s))
@example(Setting(0.03, (0.2, 0.07), (0.26, 0.78), 16, SHARED, 0.0001))
@example(Setting(0.1, (0.02, 0.25), (0.76, 0.51), 4, SHARED, 0.005))
def test_never_slower_in_ten_seconds(setting: Setting) -> None:
    """Guards the second promise in the long run: trials come back, and each has its price."""
    alone, adaptive = setting.outcome(10.0, (2,)), setting.outcome(10.0, adaptive=True)
    assert adaptive.elapsed_s <= 1.05 * alone.elapsed_s + max(OVERSHOOT_S, OVERSHOOT * alone.elapsed_s / 10 * setting.full_s)


@pytest.mark.parametrize(
    ("full_s", "tiny", "medium", "agreement"),
    [
        (0.01, 0.07, 0.3, (0.9, 0.8)),
        (0.03, 0.07, 0.2, (0.93, 0.95)),
        rare(0.03, 0.02, 0.2, (0.7, 0.9)),
        rare(0.1, 0.07, 0.3, (0.8, 0.8)),
    ],
)
def test_what_pays_is_found(full_s: float, tiny: float, medium: float, agreement: tuple[float, float]) -> None:
    """Guards the first purpose: where each tier has a device, a first request gains, and later ones nearly all there is."""
    setting = Setting(full_s, (tiny, medium), agreement, 1, ("", "", ""), 0.0005)
    best_s = min(setting.outcome(500 * full_s, chosen).elapsed_s for chosen in [(0, 2), (1, 2), (0, 1, 2)])
    first, some, more = (setting.outcome(num * full_s, adaptive=True).elapsed_s for num in (128, 1000, 2000))
    assert first < 0.85 * 128 * full_s
    assert more - some < 2 * best_s / 0.85


@pytest.mark.parametrize(("branches", "share"), [(0, 0.88), rare(MOST_BRANCHES, 0.8)])
def test_gains_are_kept(branches: int, share: float) -> None:
    """Guards the first purpose: where three tiers are several times as fast as one, so is a cascade that chooses."""
    costs = (TierCost("tiny", PassCost(0.002)), TierCost("medium", PassCost(0.006)), TierCost("full", PassCost(FULL_S)))
    bench = Bench(costs, Trace.drawn(Acceptance((0.8, 0.9)), 6000), 3000)
    fastest = max(bench.outcome(chosen, branches=branches).tokens_per_s for chosen in [(0, 2), (1, 2), (0, 1, 2)])
    assert fastest > 3 * bench.outcome((2,)).tokens_per_s
    assert bench.outcome((0, 1, 2), adaptive=True, branches=branches).tokens_per_s > share * fastest


def allowed_to_draft() -> Slot[None]:
    """A session of the full tier that may use both of the tiers below."""
    return Slot(Session(replace(opening(1, 0.0, 50), chain=ALLOWED, adaptive=True), "full", 2, 32), None, 0.0, 0.0)


def test_tiers_that_were_left_out_stand_in_for_one_that_died() -> None:
    """Guards degradation: the planner has chosen tiny alone, tiny dies, and medium, which is well, must not stand idle."""
    planner, sent = Planner(), list[Message]()
    rates = {ALLOWED: 10.0, (): 20.0, ("medium",): 10.0, ("tiny",): 50.0}
    play(planner, rates, 200)
    names = (f"s{number}" for number in itertools.count())
    drafting: Drafting[None] = Drafting(lambda tier, message: sent.append(message), lambda: next(names), planner)
    slot = allowed_to_draft()
    drafting.begin(slot, 1, 0.0)
    assert slot.using.tiers == ("tiny",)
    assert drafting.hear(Failed("s0", "died", "tiny"), 1.0) == ("tiny", "died")
    assert slot.using.tiers == ALLOWED
    retry_at = drafting.draft(slot, 1.0)
    assert retry_at is not None
    assert drafting.draft(slot, retry_at) is None
    assert slot.using.tiers == ("tiny",)
    assert [type(message).__name__ for message in sent] == ["Open", "Close", "Open", "Close", "Open"]


@pytest.mark.parametrize("prompt_len", [CHUNK + 1, 3 * CHUNK])
def test_a_prompt_that_is_read_leaves_the_rates_of_others(prompt_len: int) -> None:
    """Guards the loop's part of it: what a pass reads, at the price that passes showed, does not count for who drafts."""
    model, planner, profile, now = ToyModel(), Planner(), Profile([(1, PASS_S)]), 0.0
    limits, admission = Limits(model.vocab_size, model.context_len, Policy()), KVAdmission(model.new_cache, 1 << 20)
    loop = Loop[int](
        "full", 2, limits, admission, profile,
        send_up=lambda up, message: None, send_down=lambda tier, message: None, mint=lambda: "below", planner=planner,
    )  # fmt: skip
    runner = Runner("full", model, 512, Profile())
    writes = replace(opening(1, 0.0, 50), adaptive=True)
    reads = replace(opening(2, 0.0, 50), tokens=(1,) * prompt_len, prompt_len=prompt_len, adaptive=True)
    loop.take(writes, 0, now)
    for number in range(GLANCE):
        if number == 1:
            loop.take(reads, 0, now)
        batch, _ = loop.schedule(512, now)
        works = [work for _, work in batch]
        seconds = PASS_S + 2 * PASS_S / prompt_len * sum(work.num_read for work in works)
        profile.saw(works, seconds)
        now += seconds
        loop.advance(batch, runner.run(batch), now)
    both = next(measured for measured in planner.measured() if measured.num_sessions == 2)
    assert both.rates == {ALONE: pytest.approx(1 / PASS_S, rel=0.05)}


@pytest.mark.parametrize("reading_s", [0.0, 0.02, 9.0])
def test_reading_for_others_says_nothing_of_who_drafts(reading_s: float) -> None:
    """Guards a crowd from how it began: passes that read 64 prompts made slow what was in use then, and only that."""
    planner = Planner()
    drafting: Drafting[None] = Drafting(lambda tier, message: None, lambda: "below", planner)
    slot = allowed_to_draft()
    drafting.begin(slot, 1, 0.0)
    drafting.passed([slot], [(slot, Work(5, [1], 1), 1, PASS_S + reading_s)], reading_s, 1.0)
    (measured,) = planner.measured()
    left_s = max(PASS_S, (1 - MOST_READING) * (PASS_S + reading_s))  # an estimate may be too long, no pass took no time
    assert measured.rates == {ALONE: pytest.approx(1 / left_s)}
