"""Near-duplicates against a plain comparison of all pairs, and what counts as one."""

import random

import pytest

from data_prep.near_duplicates import RECALL, band_shape, jaccard, near_duplicates, shingles


def grams(text: str) -> set[tuple[str, ...]]:
    words = ["", "", *text.split(), "", ""]
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def similarity_of(one: list[set], other: list[set]) -> float:
    """Plain: the smaller share of common 3-grams of the two texts."""
    return min(len(left & right) / len(left | right) for left, right in zip(one, other))


def families(count: int, seed: int) -> dict[str, tuple[str, str]]:
    """Texts of 12 to 60 words in families: a member differs from the first one in none to a quarter of its words."""
    rng = random.Random(seed)
    vocabulary = [f"word{i}" for i in range(500)]
    prompts: dict[str, tuple[str, str]] = {}
    while len(prompts) < count:
        words = rng.choices(vocabulary, k=rng.randint(12, 60))
        system = " ".join(rng.choices(vocabulary, k=rng.choice((0, 0, 10, 40))))
        for _ in range(rng.randint(1, 5)):
            share = rng.random() ** 2 / 4
            text = " ".join(rng.choice(vocabulary) if rng.random() < share else word for word in words)
            prompts[f"{rng.getrandbits(64):016x}"] = (text, f"{system if rng.random() < 0.8 else ''} {text}")
    return prompts


@pytest.mark.parametrize("similarity", [0.5, 0.8, 0.95])
def test_the_survivors_are_those_of_a_comparison_of_all_pairs(similarity):
    prompts = families(300, seed=1)
    sets = {key: [grams(text) for text in prompt] for key, prompt in prompts.items()}
    kept: list[str] = []
    for key in sorted(prompts):
        if all(similarity_of(sets[key], sets[other]) < similarity for other in kept):
            kept.append(key)
    dropped = near_duplicates(prompts, lambda prompt: prompt, similarity)
    assert sorted(set(prompts) - set(dropped)) == kept and 10 < len(dropped) < 280
    for key, (like, share) in dropped.items():
        assert like in kept and share == similarity_of(sets[key], sets[like]) >= similarity


def test_the_survivors_do_not_depend_on_the_order_of_the_prompts():
    prompts = families(200, seed=2)
    shuffled = list(prompts.items())
    random.Random(0).shuffle(shuffled)
    found = near_duplicates(prompts, lambda prompt: prompt, 0.7)
    assert found and found == near_duplicates(dict(shuffled), lambda prompt: prompt, 0.7)


def alike(one: str, other: str, similarity: float = 0.8) -> bool:
    return jaccard(shingles(one), shingles(other)) >= similarity


def test_case_blanks_and_the_end_of_a_sentence_make_no_difference():
    assert alike("Write a poem about  the sea.", "write a poem, about the Sea!", 1.0)
    assert alike("hello", "Hello!", 1.0)


@pytest.mark.parametrize(
    "one, other",
    [
        ("question 1", "question 11"),
        ("yes", "no"),
        (
            "Write a Python function that checks whether a number is even",
            "Write a Python function that checks whether a number is prime",
        ),
        ("What is 3 + 4?", "What is 3 - 4?"),
        ("???", "!!!"),
        ("把这句话翻译成英文：今天天气很好。", "把这句话翻译成英文：我们明天去北京。"),
    ],
)
def test_another_word_number_or_sign_is_another_question(one, other):
    assert not alike(one, other)


def test_long_chinese_texts_that_differ_in_one_sign_are_near_duplicates():
    text = "请写一篇关于春天的短文，描写花园里的花和鸟，并说明你为什么喜欢这个季节，还有你和家人一起去公园散步时的心情"
    assert alike(text, text.replace("鸟", "树"))


def test_neither_a_shared_system_turn_nor_a_shared_question_alone_makes_duplicates():
    rng = random.Random(3)
    texts = [" ".join(f"w{rng.randrange(1000)}" for _ in range(30)) for _ in range(12)]
    long = " ".join(f"s{i}" for i in range(400))
    same_system = {str(i): (text, f"{long} {text}") for i, text in enumerate(texts)}
    same_question = {str(i): ("Sum it up.", f"{text} Sum it up.") for i, text in enumerate(texts)}
    for prompts in (same_system, same_question):
        assert near_duplicates(prompts, lambda prompt: prompt, 0.8) == {}
    both = {"a": (texts[0], f"{long} {texts[0]}"), "b": (texts[0], f"{long} today {texts[0]}")}
    assert set(near_duplicates(both, lambda prompt: prompt, 0.8)) == {"b"}


@pytest.mark.parametrize("similarity", [0.1, 0.5, 0.8, 0.95, 0.999])
def test_the_index_finds_the_pairs_at_the_threshold(similarity):
    bands, rows = band_shape(similarity)
    assert bands >= 2 and bands * rows <= 256
    assert 1 - (1 - similarity**rows) ** bands >= RECALL


def test_no_prompts_have_no_duplicates():
    assert near_duplicates({}, lambda prompt: prompt, 0.8) == {}
