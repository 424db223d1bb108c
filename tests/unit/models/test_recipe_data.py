"""The demo model's training text: well formed, and one question never has two answers."""

import random
from pathlib import Path

import pytest

from models.recipe.chats import DATA_FOLDER, read_conversations, sample_messages, untidy
from models.recipe.evaluate import training_files


def _written(tmp_path: Path, text: str) -> list[Path]:
    path = tmp_path / "data.txt"
    path.write_text(text, encoding="utf-8")
    return [path]


def test_every_block_has_questions_and_answers():
    conversations = read_conversations(training_files())
    answers = {turn.answer for conversation in conversations for turn in conversation}
    assert len(answers) >= 300
    assert all(turn.questions and all(turn.questions) for conversation in conversations for turn in conversation)
    assert any(len(conversation) > 1 for conversation in conversations)


def test_no_question_has_two_answers():
    answer_of: dict[str, str] = {}
    for first, *_ in read_conversations(training_files()):
        for question in (*first.questions, *first.held_out):
            plain = question.lower().rstrip("?.!")
            assert answer_of.setdefault(plain, first.answer) == first.answer, question


def test_held_out_phrasings_are_not_trained_on():
    turns = [turn for conversation in read_conversations(training_files()) for turn in conversation]
    assert sum(len(turn.held_out) for turn in turns) > 300
    assert not any(set(turn.held_out) & set(turn.questions) for turn in turns)


def test_unseen_questions_are_not_in_the_training_text():
    trained = {
        question.lower()
        for conversation in read_conversations(training_files())
        for turn in conversation
        for question in (*turn.questions, *turn.held_out)
    }
    for (turn,) in read_conversations([DATA_FOLDER / "unseen.txt"]):
        assert not {question.lower() for question in (*turn.questions, *turn.held_out)} & trained


def test_lists_and_terms_expand_and_turns_follow_each_other(tmp_path):
    text = (
        "@city: Rome, Oslo\n\n# a comment\nQ: Where is {city}?\nA: Far\naway.\nQ: Why?\nA: Maps.\n\nT: a lane\nA: One."
    )
    (first, second), (term,) = read_conversations(_written(tmp_path, text))
    assert first.questions == ("Where is Rome?", "Where is Oslo?")
    assert first.answer == "Far\naway."
    assert (second.questions, second.answer) == (("Why?",), "Maps.")
    assert {"What is a lane?", "What does lane mean?"} <= {*term.questions, *term.held_out}


@pytest.mark.parametrize("text", ["Q: Where?", "A: There.", "Q: Where is {city}?\nA: There."])
def test_a_malformed_block_is_named(tmp_path, text):
    with pytest.raises(ValueError, match=r"data\.txt: .* block that starts"):
        read_conversations(_written(tmp_path, text))


def test_untidy_questions_vary_and_never_vanish():
    rng = random.Random(0)
    variants = {untidy("What happens when a worker dies?", rng) for _ in range(200)}
    assert len(variants) > 20
    assert all(len(variant) > 20 for variant in variants)
    assert all(untidy("?", rng) in ("?", "") for _ in range(20))


def test_sampled_messages_alternate_and_end_with_the_answer():
    conversation = next(c for c in read_conversations(training_files()) if len(c) > 1)
    messages = sample_messages(conversation, random.Random(0))
    assert [message["role"] for message in messages] == ["user", "assistant"] * len(conversation)
    assert messages[-1]["content"] == conversation[-1].answer
