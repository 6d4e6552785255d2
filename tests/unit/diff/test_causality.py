"""Parents come before children, and the headline is the first by step, microbatch, path, name."""

from __future__ import annotations

from tensortrace.diff.catalog import Slot
from tensortrace.diff.causality import Graph, Node
from tensortrace.tracer.types import Kind


def node(name: str, *, step: int = 0, microbatch: int | None = 0, kind: Kind = Kind.ACTIVATION) -> Node:
    return Node(step, microbatch, Slot("train", kind, name, "out", 0))


def chain(*names: str) -> Graph:
    graph = Graph()
    for name, before in zip(names, (None, *names), strict=False):
        graph.add(node(name), [node(before)] if before else [])
    return graph


def test_every_parent_comes_before_its_children() -> None:
    graph = chain("c", "a", "b")
    assert [n.slot.name for n in graph.ordered(0)] == ["c", "a", "b"]


def test_a_cycle_is_broken_and_every_node_is_visited_once() -> None:
    graph = Graph()
    graph.add(node("x"), [node("y")])
    graph.add(node("y"), [node("x")])
    assert sorted(n.slot.name for n in graph.ordered(0)) == ["x", "y"]


def test_a_long_chain_does_not_exhaust_the_stack() -> None:
    names = [f"n{number:05d}" for number in range(20_000)]
    assert len(chain(*names).ordered(0)) == len(names)


def test_parents_that_are_no_nodes_are_left_out() -> None:
    graph = Graph()
    graph.add(node("x"), [node("gone"), node("x")])
    assert graph.parents(node("x")) == ()


def test_the_longest_path_from_the_input_decides_before_the_name() -> None:
    graph = chain("z", "y", "a")
    graph.ordered(0)
    first = sorted([node("a"), node("y"), node("z")], key=graph.order_key)
    assert [n.slot.name for n in first] == ["z", "y", "a"]


def test_steps_come_before_microbatches_and_these_before_what_the_window_owns() -> None:
    graph = Graph()
    nodes = [node("w", microbatch=None), node("m1", microbatch=1), node("m0"), node("next", step=1)]
    for each in nodes:
        graph.add(each, [])
    graph.ordered(0)
    names = [n.slot.name for n in sorted(nodes, key=graph.order_key)]
    assert names == ["m0", "m1", "w", "next"]


def test_what_a_window_found_when_it_opened_comes_before_its_microbatches() -> None:
    graph = Graph()
    start = Node(0, None, Slot("window", Kind.LOCAL_GRAD, "p", "start", 0))
    for each in (start, node("m0")):
        graph.add(each, [])
    graph.ordered(0)
    assert graph.order_key(start) < graph.order_key(node("m0"))
