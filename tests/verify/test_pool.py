"""Processes go where the most work is left for each of them."""

from verify.pool import WORTH_A_PROCESS, _Work, each


def chosen(sizes, processes):
    """Groups in the order in which so many processes choose, before any has begun."""
    work = _Work([()] * sum(sizes.values()), [name for name, n in sizes.items() for _ in range(n)])
    return "".join(work.choose() or "-" for _ in range(processes))


def test_a_long_group_has_a_second_process_before_a_short_one_has_its_first():
    assert chosen({"a": 87, "b": 43, "c": 20}, 5) == "aabaa"


def test_a_second_process_has_to_be_worth_it():
    assert chosen({"a": WORTH_A_PROCESS, "b": 1}, 3) == "ab-"
    assert chosen({"a": WORTH_A_PROCESS + 1}, 3) == "aaa"


def test_answers_keep_the_order_of_calls_and_a_failure_is_one_line():
    answers = each("math:factorial", [(3,), (-1,), (4,)], limit=60, jobs=1, groups=["a", "b", "a"])
    assert [value for value, _ in answers] == [6, None, 24] and "ValueError" in answers[1][1]
