# SPDX-License-Identifier: Apache-2.0
"""Policies in Python: written again they give what the built-in ones give; what they may not do is an error."""

import pytest

import pagetide
from pagetide.check import Latest, Lru, same

LRU = {f"{cache}.replacement": "lru" for cache in ("devtlb", "l2", "l3")}


def run(trace, policies=None, **settings):
    return pagetide.run(trace, preset="hypertrio", settings={**LRU, **settings}, policies=policies)


def test_lru_in_python_gives_what_the_built_in_one_gives(small):
    built_in = run(small)
    assert built_in.caches.devtlb.evictions > 100
    assert same(run(small, {"devtlb": Lru(), "l2": Lru(), "l3": Lru()}), built_in)


def test_lru_in_python_over_a_trace_with_invalidations():
    trace = pagetide.Trace.make(tenants=40, packets=4000, workload="websearch", uses=8, unmap="when-left")
    built_in = run(trace)
    assert built_in.invalidations > 0
    assert same(run(trace, {"devtlb": Lru()}), built_in)


def test_predictor_and_prefetcher_in_python_give_what_the_built_in_ones_give(small):
    built_in = run(small)
    assert built_in.prefetch.sent > 100
    assert same(run(small, {"predictor": Latest()}), built_in)

    class Unit:
        def __init__(self):
            self.predictor, self.pages = Latest(), {}

        def looked_up(self, page, step):
            self.pages[page.tenant] = (self.pages.get(page.tenant, []) + [page])[-2:]
            following = self.predictor.observe(page.tenant)
            if following is not None and step == "miss":
                return self.pages[following]

    assert same(run(small, {"prefetcher": Unit()}), built_in)


def test_fifo_of_one_method_less_is_another_policy(small):
    class Fifo:
        tick = 0

        def inserted(self, entries, at, next_use):
            assert next_use is None and entries.key(at)[0] < 40
            assert entries.mark(at) == 0 and at in entries.of_set(entries.set_of(at))
            assert entries.way_of(at) < entries.ways
            self.tick += 1
            entries.set_mark(at, self.tick)

        def victim(self, entries, set):
            return min(entries.of_set(set), key=entries.mark)

    fifo = run(small, {"devtlb": Fifo()})
    assert fifo.requests == 6000 and not same(fifo, run(small))
    assert fifo.id is None and run(small).id is not None


def failing(method, action):
    """An LRU whose `method` does `action` at its 50th call."""

    class Failing(Lru):
        calls = 0

        def _call(self, *arguments):
            self.calls += 1
            return action() if self.calls >= 50 else getattr(super(), method)(*arguments)

    setattr(Failing, method, Failing._call)
    return Failing()


def raises():
    raise ZeroDivisionError("division by nothing")


@pytest.mark.parametrize("method", ["used", "inserted", "victim"])
def test_policy_that_raises_is_an_error_with_its_cause(small, method):
    with pytest.raises(pagetide.Error) as error:
        run(small, {"devtlb": failing(method, raises)})
    assert "policy of devtlb: it raised ZeroDivisionError: division by nothing" in str(error.value)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("victim", [64, -1, 1 << 80, None, "first", 7.5])
def test_victim_that_is_not_there_is_an_error(small, victim):
    with pytest.raises(pagetide.Error, match="policy of devtlb: (it names entry|it raised)"):
        run(small, {"devtlb": failing("victim", lambda: victim)})


class Wrong:
    def __init__(self, given):
        self.given = given

    def observe(self, tenant):
        return self.given

    def looked_up(self, page, step):
        return self.given


@pytest.mark.parametrize("tenant", [40, -1, "next", 1 << 40])
def test_tenant_that_is_not_there_is_an_error(small, tenant):
    with pytest.raises(pagetide.Error, match="policy of prefetch"):
        run(small, {"predictor": Wrong(tenant)})


@pytest.mark.parametrize(
    "guess",
    [5, [5], [None], [pagetide.Page(99, 0, 0, 0, 21)], [pagetide.Page(0, 0, 0, 0, 13)], [pagetide.Page(0, 0, 0, 1 << 60, 12)]],
)
def test_page_that_cannot_be_is_an_error(small, guess):
    with pytest.raises(pagetide.Error, match="policy of prefetch"):
        run(small, {"prefetcher": Wrong(guess)})


def test_entry_that_is_not_there_is_an_index_error_of_the_policy(small):
    class Beyond(Lru):
        def victim(self, entries, set):
            return entries.mark(100_000)

    with pytest.raises(pagetide.Error, match="it raised IndexError: there is no entry 100000"):
        run(small, {"devtlb": Beyond()})


def test_policy_for_a_part_that_is_not_there_is_refused(small):
    with pytest.raises(pagetide.Error, match="there is no policy of 'tlb'"):
        run(small, {"tlb": Lru()})
    with pytest.raises(pagetide.Error, match="policy of iotlb: the configuration has no such part"):
        run(small, {"iotlb": Lru()})
    with pytest.raises(pagetide.Error, match="has no method 'victim'"):
        run(small, {"devtlb": object()})
    with pytest.raises(pagetide.Error, match="has no method 'observe'"):
        run(small, {"predictor": Lru()})


def test_interrupt_of_a_policy_is_raised_as_it_is(small):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small, {"devtlb": failing("used", interrupted)})


def test_page_is_a_value():
    page = pagetide.Page(1, 2, 3, 4096, 12)
    assert page == pagetide.Page(1, 2, 3, 4096, 12) and hash(page) == hash(pagetide.Page(1, 2, 3, 4096, 12))
    assert repr(page) == "Page(tenant=1, source=2, domain=3, iova=0x1000, shift=12)"
