"""Tiers that have less memory than their sessions want, and sessions that begin where others have been."""

import random
from collections.abc import Sequence

import pytest
import torch

from cascade.answer import Answer
from cascade.draft import Draft
from cascade.engine import devices
from cascade.engine.model import Model
from cascade.engine.network.attention import Contiguous
from cascade.engine.network.published import Published
from cascade.engine.sampling.state import state_maker
from cascade.errors import ModelError
from cascade.messages import Open
from cascade.params import SamplingParams
from cascade.scorer import BLOCK, TILE, Row
from cascade.session.session import Session
from cascade.tier.block_manager import BlockManager
from cascade.tier.kv_admission import KVAdmission
from cascade.tier.local_links import join
from cascade.tier.slot import Slot
from cascade.tier.tier import Tier
from tests.architectures import SERVED, build
from tests.books import check_memory
from tests.cases import rare
from tests.tier.test_tier import Inbox, Silent, alone, finish, opening, refusal, settle, written
from tests.toys import ToyCache, ToyModel, full_text
from tests.waiting import LONG_S

GREEDY = SamplingParams(temperature=0, seed=0)
LONG = tuple(7 * i % 32 for i in range(100))


def prompted(tokens: tuple[int, ...], **options: object) -> Open:
    return opening(3, 0.0, 10, chain=(), tokens=tokens, prompt_len=len(tokens), **options)


@pytest.mark.parametrize("blocks", [4, 7, 60])
def test_short_memory_changes_no_text_and_starves_nobody(blocks: int) -> None:
    """Guards requests against each other: when only one or two fit at a time, all finish, with the text they have alone."""
    models = [ToyModel(agreement=0.6), ToyModel(agreement=0.8), ToyModel()]
    tiers = [Tier(str(level), level, model, cache_tokens=blocks * BLOCK) for level, model in enumerate(models)]
    join(tiers)
    for tier in tiers:
        tier.start()
    chains = ("1", "0"), ("0",), ()
    written(tiers[-1], *(opening(s, 0.8, 5 + 3 * s, chain=chains[s % 3]) for s in range(14)))
    settle(tiers)
    for tier in tiers:
        check_memory(tier.kv_admission)
        tier.close()
        assert tier.kv_admission.block_manager.free == blocks
    assert (tiers[-1].kv_admission.preempted > 0) == (blocks < 60)


def test_prompts_are_recited_in_any_order_of_events() -> None:
    """Guards log-probabilities of prompts where a session loses its place, and readers against one that holds all memory."""
    params = SamplingParams(max_tokens=20, temperature=0, seed=3, prompt_logprobs=1)
    with alone(ToyModel(), cache_tokens=8 * BLOCK, new_state=state_maker()) as tier:
        inbox, idler = Inbox(), prompted(LONG, window=4, params=params)
        tier.post([idler], inbox)
        message = inbox.messages.get(timeout=LONG_S)
        written(tier, prompted(LONG[::-1]))
        assert tier.kv_admission.preempted == 1
        answer = Answer(idler.spec, Silent())
        _, commit = answer.receive(message)
        tier.post([commit])
        finish(tier, inbox, {idler.session: answer})
        assert [*LONG, *answer.tokens] == full_text(ToyModel(), idler.spec)
        [again], _ = written(tier, prompted(LONG, params=params))
    assert again.prompt == answer.prompt
    assert [token.id for token in again.prompt] == list(LONG)
    assert len({token.logprob for token in again.prompt}) > 5


def test_second_session_begins_where_the_first_has_been() -> None:
    """Guards reuse in the tier: of a session that is over and of one that is not, of the same salt, and never of drafts; and
    chunks of prompts, which keep the bound on tokens of a pass, and score none twice."""
    model = ToyModel()
    with alone(model, max_pass_tokens=16) as tier:
        [first], _ = written(tier, prompted(LONG, cache_salt="mine"))
        settle([tier])
        assert (model.tokens, model.passes) == (109, 7 + 9)
        for salt, scored in (("mine", 10), ("yours", 109)):
            before = model.tokens
            written(tier, prompted(LONG, cache_salt=salt))
            settle([tier])
            assert model.tokens - before == scored
        assert tier.kv_admission.block_manager.reused == 99
        before = model.tokens
        written(tier, prompted((*LONG, *first.tokens, 1, 2), cache_salt="mine"))
        assert model.tokens - before <= 3 + 9


def test_reuse_from_a_session_that_is_still_writing() -> None:
    """Guards reuse among requests at the same time, and the writing one against those that copy from it."""
    with alone(ToyModel(pass_s=0.001)) as tier:
        inbox, long = Inbox(), prompted(LONG, params=SamplingParams(max_tokens=400, temperature=0, seed=3))
        answer = Answer(long.spec, Silent())
        tier.post([long], inbox)
        answer.receive(inbox.messages.get(timeout=LONG_S))
        written(tier, prompted((*LONG[:80], 5, 6)))
        assert tier.kv_admission.block_manager.reused == 80
        finish(tier, inbox, {long.session: answer})
        assert [*LONG, *answer.tokens] == full_text(ToyModel(), long.spec)


class Device:
    """Stores of toys on a device with memory for ``room`` positions, whatever a tier thinks that it has."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.caches: list[ToyCache] = []

    def new_cache(self) -> ToyCache:
        device = self

        class Cache(ToyCache):
            def reserve(self, positions: int) -> None:
                others = sum(cache.room or 0 for cache in device.caches if cache is not self and not cache.freed)
                if others + positions > device.room:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                super().reserve(positions)

        self.caches.append(Cache())
        return self.caches[-1]


def test_a_device_with_less_memory_than_thought_serves_all_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the loop of a tier: memory that the device did not have ended it, failed all, and was in the books already."""
    model, device = ToyModel(), Device(10 * BLOCK)
    monkeypatch.setattr(model, "new_cache", device.new_cache)
    with alone(model, cache_tokens=60 * BLOCK) as tier:
        for _ in range(2):  # the second time what is kept is in the way
            _, inbox = written(tier, *(opening(s, 0.8, 20 + 9 * s, chain=()) for s in range(8)))
            assert not inbox.failures
        assert "tier full has no memory" in refusal(tier, prompted((1,) * 200)).reason
        written(tier, opening(3, 0.8, 30, chain=()))
        assert tier.healthy


def test_guesses_preempt_nobody() -> None:
    """Guards texts: the guesses of an older session took the place of another one's text, which had to be scored again."""
    admission = KVAdmission(ToyCache, 4 * BLOCK)
    sessions = [Session(prompted(tuple(range(30))), "full", 0, 32), Session(prompted(tuple(range(1, 31))), "full", 0, 32)]
    slots: list[Slot[None]] = [Slot(session, None, 0.0, float(number)) for number, session in enumerate(sessions)]
    assert admission.admit(slots, 16, 0.0) == (slots, [], None)
    sessions[0].guesses.draft = Draft((1,) * 8, bytes(8))
    assert admission.admit(slots, 16, 0.0) == (slots, [], None)
    assert admission.preempted == 0
    assert sessions[0].depth == 2
    assert len(sessions[0].work(100, range(2))) == 2 * BLOCK
    check_memory(admission, slots)


def test_blocks_on_a_cpu_are_had_before_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory that is not there: a store that could not grow said that it had, and kernels wrote behind its end."""
    store = Model(build("llama"), cache_tokens=256).new_cache()
    store.reserve(TILE)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", lambda *sizes, **options: [][1])
        with pytest.raises(IndexError):
            store.reserve(3 * TILE)
    assert store.capacity == TILE
    store.reserve(3 * TILE)
    assert store.capacity == 3 * TILE


# real models


def _score(model: Model, pool: BlockManager, tokens: Sequence[int], num_own: int) -> tuple[torch.Tensor, int]:
    """Logits of the last tokens of a session that begins with what the pool has, and then is over."""
    opened = pool.open(tokens, "", len(tokens))
    allocation, num_known = opened
    logits = model.logits([Row(allocation.store, num_known, tokens[num_known:], num_own, GREEDY)])
    pool.close(allocation, tokens, "")
    return logits, num_known


QUICK = {"llama", "gemma2", "deepseek_v3", "gpt_oss"}  # sliding windows, latent attention, sinks


@pytest.mark.parametrize("name", [name if name in QUICK else rare(name) for name in SERVED if name != "phi3-longrope"])
def test_reused_keys_and_values_are_those_of_the_model(name: str) -> None:
    """Guards reuse on every architecture: sliding windows, latent attention, shared heads; to the last bit."""
    model = Model(Published(build(name), attention=Contiguous), cache_tokens=2048)
    rng = random.Random(name)
    text = rng.choices(range(96), k=70)
    pool = BlockManager(model.new_cache, 1024)
    _score(model, pool, text[:50], 1)
    for tokens, expected_known in ((text, 50), ([*text[:37], *text[50:]], 37)):
        logits, num_known = _score(model, pool, tokens, 5)
        assert num_known == expected_known
        fresh = model.new_cache()
        model.logits([Row(fresh, 0, text[:50], 1, GREEDY)])  # in the same pieces: the same sums in the same order
        again = model.logits([Row(fresh, num_known, tokens[num_known:], 5, GREEDY)])
        assert torch.equal(logits, again)
        whole = model.logits([Row(model.new_cache(), 0, tokens, 5, GREEDY)])
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits.argmax(-1), whole.argmax(-1))


def test_memory_of_the_device_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the budget: of tiers that share a GPU the second found nothing left, and PyTorch's reserve counted as taken."""
    cpu, gpu, held, own = torch.device("cpu"), torch.device("cuda"), 0, 5 * 10**6

    def start(kept: int = 0) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 10**6 - held - own - kept, 100 * 10**6))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: own)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own + kept)
        return devices.cache_tokens(gpu, 1000, 0.3)

    for _ in range(3):  # the weights of each take 5, and its cache the rest of its share
        assert start() == start(kept=20 * 10**6) == 25_000
        held += 30 * 10**6
    with pytest.raises(ModelError, match=r"0\.00 GiB free of 0\.09, 0\.00 its own, at gpu_memory_utilization 0\.3"):
        start()
    monkeypatch.setattr(devices, "host_memory", lambda: 8 * 10**6)
    assert devices.cache_tokens(cpu, 1000, 0.9) == 1000
    with pytest.raises(ModelError, match="cpu has memory for 1 tokens of 1000000 bytes"):
        devices.cache_tokens(cpu, 10**6, 0.9)
    monkeypatch.undo()
    assert 10**8 < devices.host_memory() < 10**14
    assert Model(build("llama"), cache_tokens=77).cache_tokens == 77
