"""A cache that several threads may use."""

import sys
import threading

import pytest

from flex_inductor.kept import Kept


def together(work, threads=8):
    """Run `work` in several threads that change over as often as can be; raise what they raise."""
    errors, begin = [], threading.Barrier(threads)

    def run(number):
        begin.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]


def test_the_longest_unused_goes_first():
    cache = Kept(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [1, None, 3]
    cache.clear()
    assert len(cache) == 0 and cache.get("a") is None


def test_made_once():
    cache, made = Kept(4), []

    def make():
        made.append(0)
        return [len(made)]

    first = cache.once("a", make)
    assert cache.once("a", make) is first and len(made) == 1


def test_the_value_of_the_first_thread_stays():
    cache = Kept(4)

    def make():
        cache.put("a", "of another")
        return "late"

    assert cache.once("a", make) == "of another"


def test_threads_that_put_and_forget():
    cache = Kept(3)

    def work(number):
        for i in range(2000):
            key = (i + number) % 7
            assert cache.once(key, lambda key=key: ("value", key)) == ("value", key)
            assert len(cache) <= 4  # one is put before another goes

    together(work)


def test_no_change_is_lost():
    cache = Kept(2)
    together(lambda _: [cache.change("count", lambda count: (count or 0) + 1) for _ in range(2000)])
    assert cache.get("count") == 16000


def test_an_unhashable_key_is_an_error():
    with pytest.raises(TypeError, match="unhashable"):
        Kept(2).get([])


def test_a_value_that_goes_may_come_back():
    cache = Kept(1)

    class Parting:
        def __del__(self):
            cache.put("parted", True)

    cache.put("a", Parting())
    cache.put("b", True)
    assert cache.get("parted")
