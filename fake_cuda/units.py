"""The tasks by name, and what is counted of their samples; nothing here loads a library."""

TEXTS, TOKENS = "text_classification", "language_modelling"
PICTURES, SPEECH = "image_classification", "speech_recognition"
TEXTS_AND_PICTURES = "image_text_to_text"  # as the pipelines of transformers call it
TASKS = (TEXTS, TOKENS, PICTURES, SPEECH, TEXTS_AND_PICTURES)
CLASSIFY = (TEXTS, PICTURES)
# A sample has so many tokens, and this beside them. Speeds are told in whole samples of such tasks.
BESIDE = {
    PICTURES: " a picture",
    SPEECH: " and 30 s of sound",
    TEXTS_AND_PICTURES: ", of which a picture of {size} x {size}",
}
SAMPLES = {PICTURES: "pictures", SPEECH: "recordings"}


def titled(name: str, task: str, length: int, image_size: int | None = None) -> str:
    """A model and its samples, in words.

    >>> titled("gpt2", TOKENS, 1024)
    'gpt2, 1,024 tokens'
    >>> titled("whisper-small", SPEECH, 448)
    'whisper-small, 448 tokens and 30 s of sound'
    >>> titled("qwen3-vl-4b", TEXTS_AND_PICTURES, 1024, 512)
    'qwen3-vl-4b, 1,024 tokens, of which a picture of 512 x 512'
    """
    return f"{name}, {length:,} tokens{BESIDE.get(task, '').format(size=image_size)}"
