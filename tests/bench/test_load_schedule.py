"""What is drawn before a run: equal seeds give equal runs, distances keep their bounds, a trace's texts share what its
blocks share."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tiny_bench import write_lines

from strata.bench.corpus import Document
from strata.bench.load.cache_distance import Distances, measured_distances, shuffled_order
from strata.bench.load.chats import ChatsWorkload
from strata.bench.load.documents import DocumentsWorkload, cut, load_documents
from strata.bench.load.schedule import Block, Draw, Workload, poisson_arrivals
from strata.bench.load.trace import Fit, TraceWorkload, read_trace
from strata.errors import ConfigError

DOCUMENTS = tuple(Document(f"title {name}", f"text {name} " * 20, ("Who?", "Why?")) for name in "abcd")
FIT = Fit(1.0, 1.0, None, None, 4.0)
TRACE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 500, "input_length": 1400, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 2000, "input_length": 300, "output_length": 9, "hash_ids": [3]},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "trace.jsonl", TRACE)


def workloads(trace: Path) -> list[Workload]:
    return [
        DocumentsWorkload(DOCUMENTS, Distances(least=1), 3),
        ChatsWorkload(DOCUMENTS, 3, 2.0, 3),
        TraceWorkload(read_trace(trace, None), FIT),
    ]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_equal_seeds_give_equal_runs_and_others_other_runs(trace: Path, index: int) -> None:
    def draw(seed: int) -> list[Any]:
        workload = workloads(trace)[index]
        sessions = workload.sessions(Draw(seed, 2.0, requests=3))
        texts = [turn.text() for session in sessions for turn in session.turns]
        return [sessions, texts, workload.warm_texts(Draw(seed, 2.0, requests=3))]

    assert draw(1) == draw(1)
    first, other = draw(1), draw(2)
    assert all(mine != theirs for mine, theirs in zip(first, other, strict=True))


def test_arrivals_are_poisson_and_rates_share_their_random_numbers() -> None:
    slow = poisson_arrivals(Draw(7, 1.0, requests=4000))
    fast = poisson_arrivals(Draw(7, 4.0, requests=4000))
    assert fast == pytest.approx([arrival / 4 for arrival in slow])
    gaps = [later - earlier for earlier, later in zip([0.0, *slow], slow, strict=False)]
    assert sum(gaps) / len(gaps) == pytest.approx(1.0, rel=0.1)
    # Of an exponential distribution, 1/e is above its mean.
    assert sum(gap > 1 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04)
    assert [arrival for arrival in slow if arrival < 50] == poisson_arrivals(Draw(7, 1.0, duration_s=50))
    with pytest.raises(ConfigError, match="is over before the first request"):
        poisson_arrivals(Draw(7, 0.001, duration_s=0.001))


@settings(deadline=None)
@given(
    documents=some.integers(1, 12),
    questions=some.integers(1, 6),
    least=some.integers(0, 6),
    spare=some.integers(0, 6),
    bounded=some.booleans(),
    seed=some.integers(0, 1000),
)
def test_distances_keep_their_bounds_or_are_refused(
    documents: int, questions: int, least: int, spare: int, bounded: bool, seed: int
) -> None:
    count = documents * questions
    distances = Distances(least, least + spare if bounded else None, questions)
    try:
        order = shuffled_order(documents, count, distances, random.Random(seed))
    except ConfigError as refused:
        # Only a distance that the last documents cannot keep is refused.
        assert least > 0 and "--min-distance" in str(refused)
        return
    assert len(order) == count
    assert all(order.count(document) == questions for document in range(documents))
    found = measured_distances(order)
    assert all(distance >= least for distance in found)
    assert distances.most is None or all(distance <= distances.most for distance in found)


def test_bounded_distances_can_be_kept_in_long_runs() -> None:
    order = shuffled_order(40, 300, Distances(4, 9, 10), random.Random(1))
    found = measured_distances(order)
    assert min(found) >= 4 and max(found) <= 9 and len(set(found)) > 3


@pytest.mark.parametrize(
    ("distances", "complaint"),
    [
        (Distances(least=4), "--min-distance 4 needs more than 4 documents"),
        (Distances(least=2, most=1), "--max-distance 1 is below --min-distance 2"),
        (Distances(most=2), "keeps 3 of --documents 4 busy for ever"),
        (Distances(questions=2), "make 8; give more of either"),
    ],
)
def test_distances_that_cannot_be_kept_are_refused(distances: Distances, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        shuffled_order(4, 9, distances, random.Random(0))
    assert complaint in str(raised.value)


def test_every_question_about_a_document_is_another_one() -> None:
    sessions = DocumentsWorkload(DOCUMENTS, Distances(), 3).sessions(Draw(1, 1.0, requests=40))
    texts = [session.turns[0].text() for session in sessions]
    assert len(set(texts)) == 40
    for session, text in zip(sessions, texts, strict=True):
        assert DOCUMENTS[session.topic].text in text


def test_no_run_shares_text_with_another() -> None:
    workload = DocumentsWorkload(DOCUMENTS, Distances(), 3)
    draws = [Draw(1, 1.0, requests=4), Draw(1, 2.0, requests=4), Draw(2, 1.0, requests=4)]
    beginnings = [text[:40] for draw in draws for text in workload.warm_texts(draw)]
    assert len(set(beginnings)) == len(beginnings)
    kept = [Draw(seed, 1.0, requests=40, keeps_documents=True) for seed in (1, 2)]
    assert workload.warm_texts(kept[0]) == workload.warm_texts(kept[1])
    asked = [session.turns[0].text() for draw in kept for session in workload.sessions(draw)]
    assert len(set(asked)) == 80, "questions are never those of another run"


def test_chats_count_requests_and_think_in_between() -> None:
    chats = ChatsWorkload(DOCUMENTS, 3, 2.0, 8).sessions(Draw(1, 1.0, requests=300))
    assert len(chats) == 100 and all(len(chat.turns) == 3 for chat in chats)
    assert all(chat.turns[0].think_s == 0 for chat in chats)
    thought = [turn.think_s for chat in chats for turn in chat.turns[1:]]
    assert sum(thought) / len(thought) == pytest.approx(2.0, rel=0.25)
    assert len({chat.turns[0].text() for chat in chats}) == 100


def test_a_traces_texts_share_what_its_blocks_share(trace: Path) -> None:
    workload = TraceWorkload(read_trace(trace, None), FIT)
    sessions = workload.sessions(Draw(1, None))
    first, second, third = (session.turns[0].text() for session in sessions)
    assert [session.arrival_s for session in sessions] == [0.0, 0.5, 2.0]
    assert [session.turns[0].max_tokens for session in sessions] == [5, 7, 9]
    assert [len(first), len(second), len(third)] == [4000, 5600, 1200]
    assert second.startswith(first), "the first prompt ends inside a block that the second holds whole"
    assert third[:20] != first[:20]
    assert workload.warm_texts(Draw(1, None)) == [first, second, third]
    assert (
        Block("a", 10, 100) != Block("b", 10, 100)
        and str(Block("a", 10, 100)) == str(Block("a", 50, 100))[:10]
    )


def test_a_trace_is_scaled_and_capped(trace: Path) -> None:
    workload = TraceWorkload(read_trace(trace, 2), Fit(0.1, 0.5, 600, 3, 4.0))
    sessions = workload.sessions(Draw(1, None))
    assert [session.arrival_s for session in sessions] == pytest.approx([0.0, 0.05])
    assert [len(session.turns[0].text()) for session in sessions] == [2000, 2400]
    assert [session.turns[0].max_tokens for session in sessions] == [2, 3]
    assert workload.capped(Draw(1, None)) == 1
    assert len(workload.sessions(Draw(1, None, duration_s=0.01))) == 1
    by_rate = workload.sessions(Draw(1, 5.0))
    assert [session.arrival_s for session in by_rate] == poisson_arrivals(Draw(1, 5.0, requests=2))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2 cannot be read"),
        ("[]", "line 2 cannot be read"),
        (json.dumps({"timestamp": 1, "input_length": 5}), "KeyError: 'output_length'"),
        (json.dumps({**TRACE[0], "hash_ids": [1]}), "1 hash_ids at least 2"),
        (json.dumps({**TRACE[0], "output_length": 0}), "output_length 0 must be at least 1"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(TRACE[0]) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        read_trace(path, None)
    assert complaint in str(raised.value) and "line 2" in str(raised.value)


def test_documents_come_from_a_folder_and_are_cut_without_overlap(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one.txt").write_text("abcdefghij" * 10, encoding="utf-8")
    (tmp_path / "two.md").write_text("klmnopqrst" * 3, encoding="utf-8")
    (tmp_path / "three.dat").write_bytes(b"\xff")
    write_lines(tmp_path / "four.jsonl", [{"input": "uvwxyz" * 5, "title": "four", "qa_pairs": "none"}])
    documents = load_documents(tmp_path)
    assert [document.title for document in documents] == ["one", "four", "two"]
    pieces = cut(documents, 5, 7, 4.0)
    assert [piece.title for piece in pieces] == ["one", "four", "two", "one", "one", "one", "one"]
    assert all(len(piece.text) == 20 and piece.questions for piece in pieces)
    assert "".join(piece.text for piece in pieces if piece.title == "one") == "abcdefghij" * 10
    with pytest.raises(ConfigError, match="the texts hold 7 pieces of --tokens 5, and 8 are asked for"):
        cut(documents, 5, 8, 4.0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no"):
        load_documents(tmp_path / "empty")


def test_cold_documents_are_new_in_every_run_and_not_warmed() -> None:
    workload = DocumentsWorkload(DOCUMENTS, Distances(), 3, cold=1)
    first, other = (Draw(seed, 2.0, requests=40, keeps_documents=True) for seed in (1, 2))
    assert workload.warm_texts(first) == workload.warm_texts(other)
    assert len(workload.warm_texts(first)) == len(DOCUMENTS) - 1

    def texts(draw: Draw, topic: int) -> set[str]:
        return {str(each.turns[0].parts[0]) for each in workload.sessions(draw) if each.topic == topic}

    assert texts(first, 0) == texts(other, 0) and len(texts(first, 0)) == 1
    assert len(texts(first, 3) | texts(other, 3)) == 2, "the last is another in each run"
