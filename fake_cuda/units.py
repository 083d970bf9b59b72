"""The tasks by name, and what is counted of their samples; nothing here loads a library."""

TEXTS, TOKENS = "text_classification", "language_modelling"
PICTURES, SPEECH = "image_classification", "speech_recognition"
TASKS = (TEXTS, TOKENS, PICTURES, SPEECH)
CLASSIFY = (TEXTS, PICTURES)
# A sample has so many tokens, and this beside them. Speeds are told in whole samples of such tasks.
BESIDE = {PICTURES: " a picture", SPEECH: " and 30 s of sound"}
SAMPLES = {PICTURES: "pictures", SPEECH: "recordings"}


def titled(name: str, task: str, length: int) -> str:
    """A model and its samples, in words.

    >>> titled("gpt2", TOKENS, 1024)
    'gpt2, 1,024 tokens'
    >>> titled("whisper-small", SPEECH, 448)
    'whisper-small, 448 tokens and 30 s of sound'
    """
    return f"{name}, {length:,} tokens{BESIDE.get(task, '')}"
